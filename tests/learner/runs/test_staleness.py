"""Distance between adapter versions."""

from __future__ import annotations

import pytest

from learner.runs.selection import runs_between

PARENTS = {"v1": "base", "v2": "v1", "v3": "v1", "v4": "v1", "v5": "v4"}
"""v2 and v3 lost their canaries."""


@pytest.mark.parametrize(
    ("left", "right", "runs"),
    [
        ("base", "base", 0),
        ("v1", "v1", 0),
        ("v1", "base", 1),
        ("v5", "v4", 1),
        ("v5", "v1", 2),  # and not 4: v2 and v3 changed nothing
        ("v5", "base", 3),
        ("v4", "v2", 2),  # up to v1 and down again
        ("base", "v5", 3),  # after a rollback to the base
    ],
)
def test_runs_are_counted_along_the_tree(left: str, right: str, runs: int) -> None:
    assert runs_between(PARENTS, left, right) == runs


@pytest.mark.parametrize("pair", [("v1", "gone"), ("gone", "v1")])
def test_an_unknown_version_has_no_distance(pair: tuple[str, str]) -> None:
    assert runs_between(PARENTS, *pair) is None


def test_a_circle_of_parents_ends() -> None:
    assert runs_between({"a": "b", "b": "a"}, "a", "base") is None
