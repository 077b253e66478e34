"""`sidecar judge noise`: what is shown, drawn and accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from deploy.cli.main import main
from ingest.noise.estimate import encode_passes
from ingest.noise.windows import WINDOW, Series, read_noise_state, refresh
from ingest.ruler.prompt import rubric_hash
from sidecar.store.database import Database
from sidecar.store.models import RescoringRow
from support.migrated_store import open_migrated
from support.simulated_judge import SimulatedJudge, scored_twice

HASH = rubric_hash("Be good.")
SERIES = Series(rubric_hash=HASH, judge_model="openai/judge", passes=2)


def fill(database: Database, window: int, judge: SimulatedJudge, groups: int = WINDOW) -> None:
    with database.write() as session:
        for number, one in enumerate(scored_twice(judge, groups=groups, seed=window)):
            session.add(
                RescoringRow(
                    group_id=f"g-{window}-{number}", chosen_at=1.0, due_at=2.0, attempts=1,
                    judge_model="openai/judge", rubric_hash=HASH, passes=2,
                    first=encode_passes(one.first), again=encode_passes(one.again), at=3.0,
                    window_number=window,
                )
            )  # fmt: skip
        session.flush()
        assert refresh(session, SERIES, window, now=1_772_357_400.0 + 60 * window) is not None


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    (tmp_path / "sidecar.toml").write_text(
        f'[judge]\nmodel = "openai/judge"\nrubric = "Be good."\n'
        f'[store]\nurl = "sqlite:///{tmp_path}/store.db"\n'
    )
    with closing(open_migrated(tmp_path / "store.db")) as opened:
        yield opened


def command(folder: Path, *words: str, code: int | None = None) -> None:
    assert main(["--config", str(folder / "sidecar.toml"), "judge", "noise", *words]) == (code or 0)


STEADY = SimulatedJudge(noise=0.03, step=0.01)
NOISY = SimulatedJudge(noise=0.1, slope=0.3, step=0.01)


def test_the_windows_are_shown_and_drawn(
    tmp_path: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(database, 0, STEADY)
    fill(database, 1, NOISY)
    fill(database, 2, NOISY, groups=7)

    command(tmp_path, "--out", str(tmp_path / "out"))

    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].startswith(
        f"openai/judge, rubric {HASH[:12]}: 0 groups wait to be scored again"
    )
    assert lines[3].split()[:2] == ["window", "until"]
    assert [line.split()[0] for line in lines[4:]] == ["2+", "1", "0*"]
    assert "noise sd 0.0" in lines[5]
    assert "position slope +0.2" in lines[5]
    assert (tmp_path / "out" / "noise.txt").read_text() == said
    assert (tmp_path / "out" / "noise.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "out" / "noise.json").read_text())
    assert [one["window_number"] for one in found["windows"]] == [2, 1, 0]
    command(tmp_path, "-o", "json")
    assert json.loads(capsys.readouterr().out) == found


def test_without_groups_it_says_so_and_nothing_can_be_accepted(
    tmp_path: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    command(tmp_path)
    assert "nothing is known yet" in capsys.readouterr().out
    fill(database, 0, STEADY, groups=3)

    command(tmp_path, "--accept", code=1)

    assert "there is no whole window yet" in capsys.readouterr().err


def test_the_judge_as_it_is_now_can_be_accepted(
    tmp_path: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(database, 0, STEADY)
    fill(database, 1, NOISY)

    command(tmp_path, "--accept")

    assert "later windows are compared with window 1" in capsys.readouterr().err
    with database.read() as session:
        state = read_noise_state(session)
    assert state is not None
    assert (state.drift, state.groups) == ("", WINDOW)
    fill(database, 2, NOISY)
    command(tmp_path)
    assert capsys.readouterr().out.splitlines()[4].rstrip().endswith("]")  # no drift
