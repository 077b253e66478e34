"""`sidecar canary watch`: which looks are told, how, and how it ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from deploy.admin.client import AdminClient
from deploy.cli import canary as following
from deploy.cli.canary import Changes, looks, progress_line
from tests.deploy.cli.conftest import Command

NAME = "m--v7-0a0b0c0d0e0f"


def canary(**changes: Any) -> dict[str, Any]:
    return {
        "canary_id": "c1",
        "candidate": NAME,
        "state": "ramping",
        "paused": False,
        "reason": "step 1 of 2: 3 of 50 exchanges",
        "step": 0,
        "steps": [2_000, 5_000],
        "weight_bp": 2_000,
        **changes,
    }


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Api:
    """Answers with one canary after the other, the last one for ever."""

    def __init__(self, found: Iterable[dict[str, Any]]) -> None:
        self._found = list(found)
        self.asked: list[tuple[str, ...]] = []

    def get(self, *path: str) -> dict[str, Any]:
        self.asked.append(path)
        return self._found.pop(0) if len(self._found) > 1 else self._found[0]


@pytest.mark.parametrize(
    ("states", "timeout_s", "seen", "now"),
    [
        # each second until it has ended
        (["ramping", "ramping", "promoted", "ramping"], None, 3, 2.0),
        # once more when the time is over
        (["ramping"], 2.5, 4, 2.5),
    ],
)
def test_it_looks_each_second(
    states: list[str], timeout_s: float | None, seen: int, now: float
) -> None:
    clock = Clock()
    api: Any = Api(canary(state=state) for state in states)

    shown = list(looks(api, "c1", timeout_s, clock=clock, sleep=clock.sleep))

    assert [one["state"] for one in shown] == (states * seen)[:seen]
    assert clock.now == now
    assert set(api.asked) == {("/canaries", "c1")}


@pytest.mark.parametrize(
    "change",
    [
        {"state": "promoted"},
        {"step": 1},
        {"weight_bp": 5_000},
        {"paused": True},
        {"reason": "waits for proof"},
    ],
)
def test_a_change_is_told_at_once_and_only_once(change: dict[str, Any]) -> None:
    changes = Changes()

    told = [changes.is_told(one, 0.0) for one in (canary(), canary(), canary(**change))]

    assert told == [True, False, True]
    assert not changes.is_told(canary(**change), 1.0)


def test_counts_that_grow_are_told_once_a_minute() -> None:
    changes = Changes()
    told = [
        second
        for second in range(121)
        if changes.is_told(canary(reason=f"{second} of 1,000 exchanges"), float(second))
    ]

    assert told == [0, 60, 120]


def test_a_line_has_time_version_state_step_share_and_reason() -> None:
    line = progress_line(canary(paused=True), 1_772_357_400.9)

    assert line == (
        "2026-03-01T09:30:00.000Z  v7  ramping (paused), step 1 of 2, 20% of the sessions: "
        "step 1 of 2: 3 of 50 exchanges"
    )
    ended = canary(state="promoted", weight_bp=0, reason="no worse")
    assert progress_line(ended, 1_772_357_400.0).endswith("  v7  promoted: no worse")


@pytest.fixture
def watch(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.setattr(following, "EVERY_S", 0.0)
    return Command(config, capsys, "canary", "watch", "c1")


def test_each_change_is_a_line_and_the_end_is_the_exit_code(
    watch: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api([canary(state="gating"), canary(), canary(), canary(state="rolled_back")])
    monkeypatch.setattr(AdminClient, "get", lambda _, *path: api.get(*path))

    assert watch() == 1
    assert [line.split("  ")[2].split(",")[0].split(":")[0] for line in watch.out.splitlines()] == [
        "gating",
        "ramping",
        "rolled_back",
    ]


def test_json_is_one_object_a_line_and_says_when(
    watch: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api([canary(), canary(state="inconclusive", reason="\x1b[31m\x7f")])
    monkeypatch.setattr(AdminClient, "get", lambda _, *path: api.get(*path))

    assert watch("-o", "json") == 3
    found = [json.loads(line) for line in watch.out.splitlines()]
    assert [one["state"] for one in found] == ["ramping", "inconclusive"]
    assert all(one["seen_at"] > 0 for one in found)
    assert "\x7f" not in watch.out


def test_an_interrupt_ends_it_quietly(watch: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: object) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return canary()

    monkeypatch.setattr(AdminClient, "get", get)
    before = signal.getsignal(signal.SIGINT)

    assert watch() == 130
    assert watch.err == ""
    assert signal.getsignal(signal.SIGINT) == before
