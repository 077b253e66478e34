"""The demo's arithmetic and its files: what the table says must be what was measured."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from demo.exam import ExamAnswer, bootstrap
from demo.questions import load_questions
from demo.report import compare, write_result
from demo.rollback import switch_times
from demo.stack import Addresses, configuration, to_toml
from demo.traffic import FirstByte


def answer(question: str, tokens: int, *, complete: bool) -> ExamAnswer:
    return ExamAnswer(
        question_id=question, message=b"{}", text="x", tokens=tokens, complete=complete
    )


SHEETS = {
    "base": [answer("h00", 40, complete=False), answer("h01", 20, complete=True)],
    "v1": [answer("h00", 10, complete=True), answer("h01", 14, complete=True)],
}
GRADED = {"base": {"h00": 0.2, "h01": 0.4}, "v1": {"h00": 0.6, "h01": 0.6}}


def test_a_bootstrap_is_the_same_for_the_same_seed_and_holds_the_mean() -> None:
    values = [0.0, 0.1, 0.2, 0.9]

    one, again = bootstrap(values, seed=3), bootstrap(values, seed=3)

    assert one == again
    assert round(one.mean, 9) == 0.3
    assert 0.0 < one.low < 0.3 < one.high < 0.9


def test_the_gain_is_the_mean_of_the_paired_differences() -> None:
    held_out = compare(GRADED, SHEETS, base="base", champion="v1")

    assert round(held_out.gain.mean, 9) == 0.3  # (0.4 + 0.2) / 2
    assert round(held_out.gain.low, 9) == 0.2
    assert round(held_out.gain.high, 9) == 0.4
    assert (held_out.base.tokens, held_out.champion.tokens) == (30.0, 12.0)
    assert (held_out.base.complete, held_out.champion.complete) == (0.5, 1.0)
    assert held_out.questions == 2


def test_the_result_file_has_the_keys_that_others_rely_on(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    rollback = {"ms_to_first_old_reply": 80.0, "failed_requests": 0, "from": "v1", "to": "base"}

    write_result(
        path,
        held_out=compare(GRADED, SHEETS, base="base", champion="v1"),
        rounds=6,
        setup_s=100.0,
        run_s=700.04,
        rollback=rollback,
        judge="stand-in",
    )

    result = json.loads(path.read_text())
    assert result["held_out"] == {
        "base": 0.3,
        "champion": 0.6,
        "gain": 0.3,
        "gain_low": 0.2,
        "gain_high": 0.4,
        "n": 2,
    }
    assert result["mean_tokens"] == {"base": 30.0, "champion": 12.0}
    assert (result["rounds"], result["setup_s"], result["run_s"]) == (6, 100.0, 700.0)
    assert result["rollback"] == rollback
    assert result["judge"] == "stand-in"


def test_rollback_times_count_from_the_call() -> None:
    begun = [
        FirstByte(at=9.0, adapter="v1"),  # an earlier champion, long before the call
        FirstByte(at=10.05, adapter="v2"),
        FirstByte(at=10.08, adapter="v1"),
        FirstByte(at=10.2, adapter="v1"),
    ]

    first_old, last_new = switch_times(begun, called_at=10.0, before="v2", after="v1")

    assert round(first_old, 6) == 80.0
    assert round(last_new, 6) == 50.0


def test_the_questions_are_as_many_as_the_readme_says() -> None:
    questions = load_questions()

    assert (len(questions.traffic), len(questions.held_out)) == (40, 20)
    assert sum(item.stream for item in questions.traffic) == 20
    assert sum(len(item.turns) > 1 for item in questions.traffic) == 6
    assert sum(bool(item.tools) for item in questions.traffic) == 6
    asked = {turn for item in questions.traffic for turn in item.turns}
    assert not asked & {item.turns[0] for item in questions.held_out}


def test_the_configuration_is_toml_that_holds_what_was_asked(tmp_path: Path) -> None:
    addresses = Addresses(engine=1, proxy=2, admin=3, judge=4)
    sections = configuration(tmp_path, addresses, {"canary": {"steps": [4000, 8000]}})

    read = tomllib.loads(to_toml(tmp_path, sections))

    assert read["state_dir"] == str(tmp_path)
    assert read["judge"]["api_base"] == "http://127.0.0.1:4/v1"
    assert read["canary"] == {"steps": [4000, 8000]}
    assert read["engine"]["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
