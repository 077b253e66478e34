"""Decide which adapter folders may be removed. Pure.

A folder is needed while its version serves or may serve: aliases, routing tables and the last
champions name it, a canary runs with it or it waits for one, a training run goes on from it, a vLLM
has it loaded. The parents of all these are needed too. What nothing needs goes when it was unused
for some days. The version's row, digest, lineage and events stay for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.records import AdapterVersion
from sidecar.records import BASE

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRule:
    """How long adapter folders stay: the settings `[adapters]`."""

    folder_days: float
    """Days without use after which a folder that nothing needs goes; 0: never."""
    keep_champions: int
    """Newest champions of each model whose folders stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one version's folder, and why."""

    version: AdapterVersion
    goes: bool
    why: str
    failed: bool = False
    """True when it should have gone, and somebody must look why it did not."""


def with_parents(versions: Sequence[AdapterVersion], needed: Mapping[str, str]) -> dict[str, str]:
    """Add the parents of the needed versions, and all that share a digest with a needed one.

    needed: name -> why. Returns: the same with the added ones.
    """
    by_name = {one.name: one for one in versions}
    found = dict(needed)
    for name in needed:
        parent = by_name[name].parent if name in by_name else BASE
        if parent != BASE:
            found.setdefault(parent, f"is the parent of {name}")
    holders = {by_name[name].digest: name for name in found if name in by_name}
    for one in versions:
        if one.digest in holders:
            found.setdefault(one.name, f"has the files of {holders[one.digest]}")
    return found


def decide_fates(
    versions: Iterable[AdapterVersion],
    needed: Mapping[str, str],
    last_used: Mapping[str, float],
    rule: FolderRule,
    *,
    now: float,
) -> list[Fate]:
    """Decide about each version whose folder is not removed yet, the newest first.

    needed: as `with_parents` returns. last_used: Unix seconds by name; a version that it lacks
        counts from its registration. now: Unix seconds.
    """
    fates = []
    for one in versions:
        if one.removed_at is not None:
            continue
        used = max(last_used.get(one.name, 0.0), _number(one.created_at, now))
        age_days = (now - used) / DAY_S
        if one.name in needed:
            fates.append(Fate(version=one, goes=False, why=needed[one.name]))
        elif rule.folder_days <= 0:
            fates.append(Fate(version=one, goes=False, why="adapters.folder_days is 0"))
        elif age_days < rule.folder_days:
            why = f"used {_days(age_days)} ago, adapters.folder_days is {rule.folder_days:g}"
            fates.append(Fate(version=one, goes=False, why=why))
        else:
            fates.append(Fate(version=one, goes=True, why=f"unused for {_days(age_days)}"))
    return fates


def _number(value: object, otherwise: float) -> float:
    """A damaged time of the store counts as now: a folder is never removed because of it."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known else otherwise  # type: ignore[arg-type]


def _days(number: float) -> str:
    """Rounded down: 29.6 days must not look like the 30 of the rule."""
    return f"{int(number)} days" if number >= 2 else f"{int(24 * number)} h"
