"""What `sidecar runs` prints and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.admin.client import AdminClient
from deploy.admin.text import REWARD_NOTE, away_words, progress_words, short, step_lines
from learner.progress.export import PANELS, draw
from tests.deploy.cli.conftest import Command

FIGURES = {
    "step": 1,
    "reward_mean": 0.5,
    "loss": -0.25,
    "clip_share": 0.125,
    "peak_memory_bytes": 2_500_000_000,
    "tokens_per_s": 1234.4,
    "entropy": None,
}


def test_a_table_of_steps_has_the_figures_that_are_known() -> None:
    head, line = step_lines([FIGURES])

    heads = ["step", "reward", "loss", "entropy", "clipped", "tokens/s", "memory"]
    assert head.split() == heads
    assert line.split() == ["1", "0.500", "-0.25000", "-", "12.50%", "1,234", "2,500", "MB"]
    assert list(step_lines([])) == ["no step is done"]


def test_what_a_step_left_out_is_said_below_the_table() -> None:
    left_out = {"answers.top_p": 1, "answers.drift": 2, "groups.no_spread": 1, "more": "x"}

    of_all = {"groups.no_spread": 1}
    steps: tuple[object, ...] = (left_out, of_all, of_all, {}, "damaged")

    lines = list(
        step_lines(
            [{**FIGURES, "step": number, "left_out": one} for number, one in enumerate(steps, 1)]
        )
    )

    assert lines[6:] == [
        REWARD_NOTE,
        "step 1 left out: 1 answer top_p, 2 answers drift, 1 group no_spread",
        "steps 2 to 3 left out: 1 group no_spread",
    ]
    assert "left" not in lines[0]


@pytest.mark.parametrize(
    ("schedule", "run", "said"),
    [
        (None, None, "heard of yet: the run begins"),
        (
            {"at": 1_000.0},
            {"ended_at": 2.0, "heartbeat_at": 2.0},
            "heard of for 2 h: the run begins",
        ),
        ({"at": 8_100.0}, None, ""),
        ({"at": 1_000.0}, {"ended_at": None, "heartbeat_at": 8_190.0}, ""),
    ],
)
def test_a_requested_run_that_nobody_will_begin_is_said(schedule: Any, run: Any, said: str) -> None:
    found = away_words({"schedule": schedule, "last_run": run}, 8_200.0)

    assert (said in found) if said else (found == "")


@pytest.mark.parametrize(
    ("status", "shown"), [("finished", None), ("failed", "saving the adapter")]
)
def test_a_finished_run_is_nowhere_any_more_and_a_failed_one_says_where_it_was(
    status: str, shown: str | None
) -> None:
    run = {"status": status, "progress": {"phase": "saving"}}

    assert short(run, 1.0).get("progress") == shown


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, ""),
        ({"phase": "loading", "at": 1.0}, "loading"),
        (
            {"phase": "checking", "answers_done": 1, "answers": 4, "tokens_left": 9, "at": 1.0},
            "checking: 1 of 4 answers",
        ),
        ({"phase": "dreaming", "of": "sheep"}, "dreaming"),
        ({"phase": "checking", "answers": "many"}, "checking"),
    ],
)
def test_progress_in_words(found: object, said: str) -> None:
    assert progress_words(found) == said


def test_a_plot_is_a_png(sidecar: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [{"step": 1, "figures": FIGURES}, {"step": 2, "figures": {**FIGURES, "step": 2}}]
    monkeypatch.setattr(AdminClient, "get", lambda *_: {"run_id": "r1", "steps": steps})

    assert sidecar("runs", "plot", "r1", "--out", str(tmp_path / "x")) == 0
    assert (tmp_path / "x").read_bytes().startswith(b"\x89PNG")
    assert len(PANELS) == 9, "as many as the figure has axes"


def test_ids_with_dollars_and_figures_of_any_size_are_drawn(tmp_path: Path) -> None:
    steps = [FIGURES, {**FIGURES, "step": 2, "loss": 10**400}, {**FIGURES, "step": 10**400}]

    draw(steps, tmp_path / "x", title=r"run $a_{$ \frac$")

    assert (tmp_path / "x").read_bytes().startswith(b"\x89PNG")
