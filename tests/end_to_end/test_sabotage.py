"""A candidate under whose name the real vLLM hangs is taken away from its users by itself.

`make bench BENCH=sabotage` tries the others, whose weights are bad: their making takes minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sabotage.adapters import HANGING, make_nearly_base
from benchmarks.sabotage.play import OPEN_GATE, play
from demo.stack import ENGINE_PYTHON, MODEL_FOLDER

SHORT = 16
"""Tokens of an answer."""

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]


def test_a_candidate_that_hangs_loses_its_users_and_nobody_else_notices(tmp_path: Path) -> None:
    if not ENGINE_PYTHON.exists() or not (MODEL_FOLDER / "config.json").exists():
        pytest.skip("no engine or no model here: `make test` sets both up")
    make_nearly_base(tmp_path / "candidate")

    # With short answers a user of the base is not kept waiting by a busy machine for as long as a
    # user of the candidate; and the five who make the proof each wait that long.
    rules = {**OPEN_GATE, "max_tokens": SHORT}
    candidates = [(HANGING, tmp_path / "candidate")]
    told = play(tmp_path / "run", candidates, rules, patience_s=40.0, max_tokens=SHORT)

    (played,) = told.played
    # All users come from one address: where the breaker is first, too few callers are behind it to
    # blame the candidate.
    assert played.state in ("rolled_back", "inconclusive"), played.reason
    assert 1 <= told.exposed[HANGING].sessions <= 100
    assert told.failed_elsewhere == 0
    assert len(told.visits) > told.exposed[HANGING].sessions
