"""The routing table: which adapter answers whom. Deploy writes it, the relay obeys it.

Pure. Assignment is sticky both ways: a session's bucket is a hash of its key, so raising the
canary's weight moves sessions into the canary and never out of it, and a session whose bucket is
not under the weight stays with the champion. (`deploy.md` section 1: recommended state machine.)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from sidecar.records import BASE, Arm

BUCKETS = 10_000
"""Weights are in basis points: 10000 = every session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """One public model name and the adapters behind it."""

    model: str
    """The public model name that agents send; also vLLM's `--served-model-name` of the base."""
    champion: str = BASE
    """vLLM adapter name, or "base"."""
    canary: str | None = None
    canary_weight_bp: int = 0
    """Share of sessions that the canary answers, in basis points, 0..10000."""
    salt: str = ""
    """One per canary, so that two canaries do not always meet the same sessions."""
    generation: int = 0
    """Grows by one with each change; a proxy never goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one request got."""

    adapter: str
    arm: Arm
    propensity: float
    upstream_model: str
    """What to write into the request's `model`: the adapter's name, or the base model's."""


def bucket(salt: str, session_key: str) -> int:
    """A session's place in 0..9999, the same in every process and on every machine."""
    digest = hashlib.sha256(f"{salt}\x00{session_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS


def assign(table: RoutingTable, session_key: str) -> Assignment:
    """Choose the arm of a session. Same table and key, same answer."""
    weight = table.canary_weight_bp if table.canary is not None else 0
    if table.canary is not None and bucket(table.salt, session_key) < weight:
        return _assignment(table, table.canary, "canary", weight / BUCKETS)
    return _assignment(table, table.champion, "champion", 1 - weight / BUCKETS)


def fallbacks(table: RoutingTable, first: Assignment) -> tuple[Assignment, ...]:
    """Who answers, in order, when vLLM does not know the adapter of `first` (it was restarted, or
    the adapter was unloaded under our feet): the champion, then the base, which is always there."""
    champion_share = 1 - (table.canary_weight_bp / BUCKETS if table.canary is not None else 0.0)
    left = dict.fromkeys((table.champion, BASE))
    left.pop(first.adapter, None)
    if first.adapter == BASE:
        return ()
    return tuple(_assignment(table, adapter, "champion", champion_share) for adapter in left)


def upstream_model(model: str, adapter: str) -> str:
    """What to write into a request's `model` so that this adapter, or the base, answers it."""
    return model if adapter == BASE else adapter


def _assignment(table: RoutingTable, adapter: str, arm: Arm, propensity: float) -> Assignment:
    return Assignment(
        adapter=adapter,
        arm=arm,
        propensity=propensity,
        upstream_model=upstream_model(table.model, adapter),
    )


def encode_table(table: RoutingTable) -> str:
    """The table as JSON text, for the store."""
    return msgspec.json.encode(table).decode()


def decode_table(text: str) -> RoutingTable:
    """Read a table from the store. Raises msgspec.MsgspecError when it is not one."""
    return msgspec.json.decode(text, type=RoutingTable)
