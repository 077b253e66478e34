"""Which exchanges go next, by age and by the size of the store. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ingest.store.groups import CLAIMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """How long records stay, in seconds; None: for good."""

    exchanges_s: float | None
    groups_s: float | None

    @property
    def youngest_s(self) -> float | None:
        """No exchange goes by its age before this."""
        known = [age for age in (self.exchanges_s, self.groups_s) if age is not None]
        return min(known) if known else None


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


def next_to_go(
    held: Sequence[Held], ages: Ages, *, now: float, excess_bytes: int
) -> tuple[list[Held], bool]:
    """Choose among exchanges, the oldest first.

    An exchange with a group goes with it, by the age of groups. While the store is too large, the
    oldest go whatever their age. What a training run has now stays.
    excess_bytes: of the store over its limit; 0 or below: none.
    Returns: those that go, and whether younger ones may have to go too.
    """
    chosen: list[Held] = []
    for one in held:
        age_s = ages.exchanges_s if one.group_status is None else ages.groups_s
        too_old = age_s is not None and one.stored_at < now - age_s
        if (too_old or excess_bytes > 0) and one.group_status != CLAIMED:
            chosen.append(one)
            excess_bytes -= one.stored_bytes
    if excess_bytes > 0:
        return chosen, True
    youngest_s = ages.youngest_s
    return chosen, bool(held and youngest_s is not None and held[-1].stored_at < now - youngest_s)


def chunks(chosen: Sequence[Sized], *, rows: int, limit_bytes: int) -> list[list[str]]:
    """Divide exchanges so that one transaction deletes a bounded number of rows and bytes."""
    found: list[list[str]] = []
    size = 0
    for one in chosen:
        if not found or len(found[-1]) >= rows or size + one.stored_bytes > limit_bytes:
            found.append([])
            size = 0
        found[-1].append(one.exchange_id)
        size += one.stored_bytes
    return found
