"""A machine without the learner's packages: the process says so at its start and trains nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from learner import ready
from learner.__main__ import main
from learner.schedule import loop
from sidecar import processes
from sidecar.conditions import read_all
from sidecar.store.database import Database

WHAT = (
    "learner: torch, peft cannot be imported; run `pip install 'learning-sidecar[learner]'`, or "
    "`pip install '.[learner]'` in a clone"
)
ELSEWHERE = ', or set learner.schedule = "manual" where another machine learns'


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process started, on a machine that lacks two packages."""
    begun: list[str] = []

    def schedule(*_given: object, measure: bool, **_named: object) -> int:
        begun.append("measuring schedule" if measure else "schedule")
        return 0

    monkeypatch.setattr(
        processes, "find_spec", lambda name: None if name in ("torch", "peft") else name
    )
    monkeypatch.setattr(loop, "run_schedule", schedule)
    monkeypatch.setattr("sidecar.logs.configure_logging", lambda *_: None)
    return begun


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], list[str]]:
    """Write settings with this schedule. Returns: the words that name them."""

    def write(schedule: str) -> list[str]:
        file = tmp_path / "sidecar.toml"
        file.write_text(
            f'state_dir = "{tmp_path}"\n[store]\nurl = "sqlite:///{tmp_path}/store.db"\n'
            f'[learner]\nschedule = "{schedule}"\n'
        )
        return ["--config", str(file)]

    return write


@pytest.mark.parametrize(
    ("words", "schedule", "then"),
    [
        ([], "groups", ELSEWHERE),
        (["--once"], "groups", ""),
        (["--once"], "manual", ""),
        (["--measure"], "groups", ""),
        (["--replay", "v1"], "manual", ""),
    ],
)
def test_missing_packages_are_said_in_one_line_and_nothing_starts(
    words: list[str],
    schedule: str,
    then: str,
    config: Callable[[str], list[str]],
    started: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main([*config(schedule), *words])

    assert code == 1
    assert capsys.readouterr().err == f"{WHAT}{then}\n"
    assert started == []
    assert not (tmp_path / "store.db").exists()


def test_a_schedule_by_hand_goes_on_and_measures_nothing(
    config: Callable[[str], list[str]], started: list[str]
) -> None:
    """Another machine learns; a run asked of this one says what it lacks."""
    assert main(config("manual")) == 0
    assert started == ["schedule"]


def test_a_run_that_was_asked_for_and_lacks_packages_is_a_condition_until_one_has_them(
    config: Callable[[str], list[str]],
    started: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(Database(f"sqlite:///{tmp_path}/store.db")) as store:
        store.upgrade()

        assert main([*config("manual"), "--worker", "0"]) == 1

        with store.read() as session:
            (found,) = read_all(session)

        monkeypatch.setattr(processes, "find_spec", lambda name: name)
        monkeypatch.setattr("learner.once.serve", lambda *_, **__: 0)
        schedule, worker = os.pipe()
        assert main([*config("manual"), "--worker", str(worker)]) == 0
        os.close(schedule)
        with store.read() as session:
            assert read_all(session) == []
    assert (found.code, found.state) == ("learner_cannot_run", "act")
    assert WHAT.removeprefix("learner: ") in found.message
    assert started == []


def test_unsound_settings_are_told_before_missing_packages(
    config: Callable[[str], list[str]], started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*config("sometimes"), "--once"]) == 2
    assert "learner.schedule" in capsys.readouterr().err
    assert started == []


def test_what_runs_lack_is_said_at_the_start_and_stored_until_one_trains(
    config: Callable[[str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_base: Path,
) -> None:
    monkeypatch.setattr("sidecar.logs.configure_logging", lambda *_: None)
    words = config("cron")
    file = Path(words[-1])
    store = Database(f"sqlite:///{tmp_path}/store.db")

    def lacks() -> list[str]:
        with store.read() as session:
            return sorted(one.message.split(": ", 1)[1] for one in read_all(session))

    def measure(base: str, more: str) -> list[tuple[str, str]]:
        text = f'{kept}{more}\n[serving]\nmodel = "m"\nbase_model_path = "{base}"\n'
        file.write_text(text)
        with capture_logs() as logs:
            assert main([*words, "--measure"]) == 0
        found = [one for one in logs if one["event"].startswith("learner_")]
        assert sorted(f"{one['setting']}: {one['why']}" for one in found) == lacks()
        return [(one["event"], one["setting"]) for one in found]

    kept = file.read_text()
    try:
        assert measure("/no/such/folder", 'device = "cuda:7"') == [
            ("learner_cannot_run", "serving.base_model_path"),
            ("learner_cannot_run", "learner.device"),
        ]
        assert measure(str(tiny_base), "memory_fraction = 0.000001\npack_tokens = 512") == [
            ("learner_cannot_run", "learner.memory_fraction")
        ]
        monkeypatch.setattr(ready, "why_no_export", lambda _: "wandb cannot be imported")
        assert measure(str(tiny_base), "") == [("learner_lacks", "learner.export")]

        begun: list[str] = []

        def schedule(*_given: object, measure: bool, **_named: object) -> int:
            begun.append("measuring schedule" if measure else "schedule")
            return 0

        monkeypatch.setattr(loop, "run_schedule", schedule)
        file.write_text(f"{kept}pack_tokens = 512\n")
        assert main(words) == 0
        assert begun == ["measuring schedule"]
        assert lacks() == [], "what an earlier start found"
    finally:
        store.close()
