"""Which exchanges go next, by age and by the size of the store. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ingest.store.groups import CLAIMED

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """How long records stay, in seconds; None: for good."""

    exchanges_s: float | None
    groups_s: float | None


class Sized(Protocol):
    """An exchange that is to be deleted."""

    @property
    def exchange_id(self) -> str: ...

    @property
    def stored_bytes(self) -> int:
        """Size of its content, about."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An exchange that the store holds."""

    seq: int
    exchange_id: str
    stored_at: float
    stored_bytes: int
    """Size of its content, about."""
    group_status: str | None
    """None: it has no group."""


def too_old(held: Sequence[Held], ages: Ages, *, now: float) -> list[Held]:
    """Choose exchanges by their age. One with a group goes with it, by the age of groups. What a
    training run has now stays."""
    chosen = []
    for one in held:
        age_s = ages.exchanges_s if one.group_status is None else ages.groups_s
        if age_s is not None and one.stored_at < now - age_s and one.group_status != CLAIMED:
            chosen.append(one)
    return chosen


def too_much(held: Iterable[Held], *, excess_bytes: int) -> list[Held]:
    """Choose the first ones, whatever their age, until they have so many bytes. What a training run
    has now stays."""
    chosen = []
    for one in held:
        if excess_bytes > 0 and one.group_status != CLAIMED:
            chosen.append(one)
            excess_bytes -= one.stored_bytes
    return chosen


def chunks(chosen: Sequence[Sized], *, rows: int, limit_bytes: int) -> list[list[str]]:
    """Divide exchanges so that one transaction deletes a bounded number of rows and bytes."""
    return divide([(one.exchange_id, one.stored_bytes) for one in chosen], rows, limit_bytes)


def divide(sizes: Iterable[tuple[Key, int]], rows: int, limit_bytes: int) -> list[list[Key]]:
    """Divide keys, each with its bytes, into parts of so many rows and bytes at most; one key that
    has more bytes is a part."""
    found: list[list[Key]] = []
    total = 0
    for key, size in sizes:
        if not found or len(found[-1]) >= rows or total + size > limit_bytes:
            found.append([])
            total = 0
        found[-1].append(key)
        total += size
    return found
