"""Values that the listings filter by. An unknown one is refused: an empty list would look like an
answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from deploy.errors import DeployError
from deploy.records import AdapterState
from ingest.store.groups import CLAIMED, SAMPLED, SAMPLING, SCORED, SET_ASIDE
from learner.runs.source import DROPPED, TRAINED

ADAPTER_STATES: tuple[str, ...] = get_args(AdapterState)
GROUP_STATUSES = (SAMPLING, SAMPLED, SCORED, CLAIMED, TRAINED, SET_ASIDE, DROPPED)
"""In the order in which a group goes through them."""


class UnknownValueError(DeployError, ValueError):
    """The filter has no such value; the message names the known ones."""


def refuse_unknown(name: str, value: str, known: Collection[str]) -> None:
    """Raises: UnknownValueError."""
    if value not in known:
        raise UnknownValueError(f"{name}: no such value: {value}; known: {', '.join(known)}")
