"""`sidecar judge noise`: what is shown, and accepted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from ingest.judge_noise import (
    CHECKS,
    Check,
    Checks,
    NoiseState,
    read_noise_state,
    write_noise_state,
)
from ingest.ruler.prompt import rubric_hash
from sidecar.store.database import Database, set_flag
from sidecar.store.models import JudgeNoiseDayRow
from support.migrated_store import open_migrated
from support.simulated_judge import SimulatedJudge, sums
from tests.deploy.cli.conftest import Command

HASH = rubric_hash("Be good.")


@pytest.fixture
def database(tmp_path: Path, config: Path) -> Iterator[Database]:
    with config.open("a") as file:
        file.write('[judge]\nmodel = "openai/judge"\nrubric = "Be good."\n')
    with closing(open_migrated(tmp_path / "store.db")) as opened:
        yield opened


@pytest.fixture
def noise(config: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(config, capsys, "judge", "noise")


def fill(database: Database, day: int, judge: SimulatedJudge) -> None:
    found = asdict(sums(judge, groups=50))
    with database.write() as session:
        session.add(
            JudgeNoiseDayRow(rubric_hash=HASH, judge_model="openai/judge", day=day, **found)
        )


def test_the_days_are_shown(noise: Command, database: Database) -> None:
    assert noise() == 0
    assert "nothing is known yet" in noise.out
    fill(database, 20_000, SimulatedJudge(noise=0.03))
    fill(database, 20_001, SimulatedJudge(noise=0.1, slope=0.3))

    found = noise.json()
    noise()
    lines = noise.out.splitlines()

    assert lines[0] == f"openai/judge, rubric {HASH[:12]}: noise of a score over 2 passes"
    assert lines[2].split()[:2] == ["day", "(UTC)"]
    assert [line.split()[0] for line in lines[3:]] == ["2024-10-05", "2024-10-04"]
    newest, oldest = found["days"]
    assert newest["pass_sd"] == pytest.approx(0.1, rel=0.15)
    assert newest["slope"] == pytest.approx(0.3, abs=0.06)
    assert oldest["sd"] == pytest.approx(0.03 / 2**0.5, rel=0.15)


def test_the_judge_as_it_is_now_can_be_accepted(noise: Command, database: Database) -> None:
    assert noise("--accept") == 1
    assert "has not been checked yet" in noise.err
    drift = {"drift": "noise sd 0.1", "drift_at": 4.0}
    checks = Checks(
        judge_model="openai/judge", rubric_hash=HASH, due_at=9.0, **drift,  # type: ignore[arg-type]
        last=Check(at=5.0, scores=[[0.1, 0.9]], variance=0.0),
    )  # fmt: skip
    state = NoiseState(
        at=5.0, judge_model="openai/judge", rubric_hash=HASH, passes=2, **drift,  # type: ignore[arg-type]
    )  # fmt: skip
    with database.write() as session:
        set_flag(session, CHECKS, msgspec.json.encode(checks).decode(), now=5.0)
        write_noise_state(session, state)
    noise()
    assert "the judge is NOT AS IT WAS: noise sd 0.1" in noise.out

    assert noise("--accept") == 0
    assert "later checks are compared with that of" in noise.err
    with database.read() as session:
        after = read_noise_state(session)
    assert after is not None
    assert after.drift == ""
