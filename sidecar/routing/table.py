"""The routing table: which adapter answers which sessions. Deploy writes it and the relay follows
it (`assignment.py`). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import msgspec

from sidecar.lines import public_model
from sidecar.records import BASE

BUCKETS = 10_000
"""Weights are in basis points: 10000 means every session."""
GENERATIONS = 2**40
"""A generation is smaller than this: a larger one is damage, because neither a count of changes nor
the time in seconds comes near it. Else proxies would take a table after which none is newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """One line of adapters: those that answer its requests."""

    model: str
    """Name of the line (`sidecar.lines`). The default line's is the public model name."""
    champion: str = BASE
    """vLLM's name of the adapter, or "base"."""
    canary: str | None = None
    canary_weight_bp: int = 0
    """Share of sessions that the canary answers, in basis points, 0..10000."""
    salt: str = ""
    """Differs for each canary, so that two canaries do not get the same sessions."""
    generation: int = 0
    """Grows by one with each change; a proxy never returns to a lower one."""

    def __post_init__(self) -> None:
        """Raises: ValueError for a name that cannot be written into a header, and for a generation
        that is no count of changes."""
        if not is_generation(self.generation):
            raise ValueError(f"the generation {self.generation} is not from 0 to 2**40 - 1")
        for name in (self.model, self.champion, self.canary or BASE):
            if not is_adapter_name(name):
                raise ValueError(f"the adapter or model name {name!r} is not printable ASCII")

    @property
    def public_model(self) -> str:
        """The model name that agents send; also vLLM's `--served-model-name` of the base."""
        return public_model(self.model)


def is_generation(value: object) -> TypeGuard[int]:
    """Return True for an integer from 0 to 2**40 - 1; any other value is damage."""
    return isinstance(value, int) and 0 <= value < GENERATIONS


def is_adapter_name(value: object) -> bool:
    """Return True for a name that can be written into a header: printable ASCII, not empty. The
    public model name keeps the same rule."""
    return isinstance(value, str) and value.isascii() and value.isprintable() and value != ""


def upstream_model(model: str, adapter: str) -> str:
    """Return the `model` to write into a request so that this adapter, or the base, answers it.
    model: the public model name."""
    return model if adapter == BASE else adapter


def encode_table(table: RoutingTable) -> str:
    """Return the table as JSON text for the store."""
    return msgspec.json.encode(table).decode()


def decode_table(text: str) -> RoutingTable:
    """Read a table from the store. Raises: msgspec.MsgspecError."""
    return msgspec.json.decode(text, type=RoutingTable)
