"""The supervisor's decisions."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.supervisor_rules import RESTARTS, describe_exit, is_hopeless, plan
from sidecar.backoff import Waits
from sidecar.settings import Settings


def test_backoff_doubles_up_to_half_a_minute_and_begins_anew_after_a_steady_life() -> None:
    waits = Waits(RESTARTS)

    waited = [waits.restart_s(lived_s=1.0) for _ in range(8)]
    assert waited == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert waits.restart_s(lived_s=59.9) == 30.0
    assert waits.restart_s(lived_s=60.0) == 0.5


def test_plan_attaches_to_a_foreign_vllm_by_default() -> None:
    names = [spec.name for spec in plan(Settings(), None)]

    assert names == ["proxy", "ingest", "score", "learn", "control"]


def test_plan_starts_our_own_engine_first_and_hands_the_file_to_ours_alone() -> None:
    settings = Settings(engine={"command": ["vllm", "serve"], "env": {"A": "1"}})

    specs = plan(settings, Path("/etc/sidecar.toml"))

    assert specs[0].command == ("vllm", "serve")
    assert specs[0].env == {"A": "1"}
    proxy = ("-P", "-m", "sidecar", "--config", "/etc/sidecar.toml")
    assert specs[1].command == (sys.executable, *proxy)


def test_an_exit_is_told_in_words() -> None:
    assert describe_exit(-9) == "killed by signal 9"
    assert describe_exit(3) == "exited with 3"


def test_five_immediate_deaths_are_enough_to_give_up() -> None:
    assert not is_hopeless([1.0] * 4)
    assert is_hopeless([12.0] * 5)
    assert not is_hopeless([12.0, 12.0, 12.0, 12.0, 12.1]), "in more than a minute"
    assert is_hopeless([500.0, 1.0, 1.0, 1.0, 1.0, 1.0]), "the last five"
