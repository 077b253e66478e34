"""The limit of open files: how far it is raised, and how many connections fit into it."""

from __future__ import annotations

import os
import resource

import pytest

from sidecar.processes import connections_that_fit, raise_open_files

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((256, 4_096), [(4_096, 4_096)]),
        ((4_096, 4_096), []),
        ((1_024, 2**30), [(2**20, 2**30)]),
        ((1_024, INFINITE), [(2**20, INFINITE)]),
        ((2**20, 2**30), []),
        ((INFINITE, INFINITE), []),
    ],
)
def test_the_soft_limit_becomes_the_hard_one_and_a_million_at_most(
    limits: tuple[int, int], raised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: told.append(both))

    raise_open_files()

    assert told == raised


def test_a_system_that_refuses_a_higher_limit_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_kind: int, _limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 10_000))
    monkeypatch.setattr(resource, "setrlimit", refuse)

    raise_open_files()


@pytest.mark.parametrize(
    ("limit", "open_now", "fit"),
    [
        (256, 14, 89),  # (256 - 14 - 64) / 2
        (1_024, 14, 473),
        (4_096, 14, 2_009),
        (65_536, 14, 4_096),  # as many as were wanted
        (64, 14, 1),
        (INFINITE, 14, 4_096),
    ],
)
def test_the_files_that_are_left_are_shared_by_connections_of_two_files_each(
    limit: int, open_now: int, fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(os, "listdir", lambda _: ["x"] * open_now)

    assert connections_that_fit(4_096, files_each=2) == fit
