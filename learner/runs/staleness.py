"""Distance between two adapter versions. Pure.

The distance counts training runs along the tree of parents, not version numbers: a candidate whose
canary was rolled back uses up a number but does not change the champion's answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sidecar.records import BASE


def runs_between(parents: Mapping[str, str], left: str, right: str) -> int | None:
    """Count the training runs between two versions, through their common ancestor.

    parents: adapter name -> name of its parent, "base" at the root.
    Returns: None when one of the two versions is unknown.
    """
    distances = {name: runs for runs, name in enumerate(_ancestry(parents, left))}
    for runs, name in enumerate(_ancestry(parents, right)):
        if name in distances:
            return distances[name] + runs
    return None


def _ancestry(parents: Mapping[str, str], name: str) -> Iterator[str]:
    """Yield a version and its ancestors down to the base; nothing for an unknown version."""
    seen: set[str] = set()
    while name != BASE:
        if name not in parents or name in seen:
            return
        seen.add(name)
        yield name
        name = parents[name]
    yield BASE
