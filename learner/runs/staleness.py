"""How far apart two adapter versions are. Pure.

Counted in training runs along the tree of parents and not in version numbers: a candidate that
lost its canary uses up a number and changes nothing for the champion's answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sidecar.records import BASE


def runs_between(parents: Mapping[str, str], left: str, right: str) -> int | None:
    """Training runs on the way from one version to the other, through their common ancestor.

    parents: adapter name -> name of its parent, "base" at the root.
    Returns: None when one of the two is no known version.
    """
    distances = {name: runs for runs, name in enumerate(_ancestry(parents, left))}
    for runs, name in enumerate(_ancestry(parents, right)):
        if name in distances:
            return distances[name] + runs
    return None


def _ancestry(parents: Mapping[str, str], name: str) -> Iterator[str]:
    """A version and its ancestors down to the base; nothing for an unknown version."""
    seen: set[str] = set()
    while name != BASE:
        if name not in parents or name in seen:
            return
        seen.add(name)
        yield name
        name = parents[name]
    yield BASE
