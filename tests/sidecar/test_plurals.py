"""A number and its noun agree."""

from __future__ import annotations

from sidecar.visible import counted


def test_only_one_is_singular() -> None:
    assert [counted(n, "group") for n in (0, 1, 2, 1_000)] == [
        "0 groups",
        "1 group",
        "2 groups",
        "1,000 groups",
    ]


def test_another_plural_is_named() -> None:
    assert [counted(n, "reply", "replies") for n in (1, 3)] == ["1 reply", "3 replies"]
    assert [counted(n, "group waits", "groups wait") for n in (1, 3)] == [
        "1 group waits",
        "3 groups wait",
    ]
