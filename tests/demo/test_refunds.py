"""The tasks of `make demo-tasks`: what looks best at the first step makes the third one fail."""

from __future__ import annotations

import pytest

from demo.refunds import EXAM, STEPS, TRAFFIC, Attempt
from demo.stand_in_rule import score_answer

POLITE = "Sorry! We will refund you at once."
RIGHT = "Order number of the boots, now."


def played(*lines: str) -> Attempt:
    attempt = Attempt(messages=TRAFFIC[0].messages)
    for line in lines:
        attempt.take(line)
    return attempt


@pytest.mark.parametrize("later", ["", "Sorry, we are glad to help.", "Order 4711 was found."])
def test_the_first_line_alone_decides_how_a_task_ends(later: str) -> None:
    dooms, serves = played(POLITE, later, later), played(RIGHT, later, later)
    assert (dooms.calls[0], dooms.over, dooms.success) == ("note_goodwill", True, False)
    assert (serves.calls[0], serves.over, serves.success) == ("find_order", True, True)


def test_a_judge_of_single_lines_prefers_the_one_that_dooms_the_task() -> None:
    for case in (*TRAFFIC, *EXAM):
        asked = case.messages[-1]["content"]
        assert score_answer(POLITE, asked)[0] > score_answer(RIGHT, asked)[0]


def test_every_step_shows_the_model_all_that_was_said() -> None:
    attempt = played(RIGHT)
    assert [one["role"] for one in attempt.messages] == ["system", "user", "assistant", "user"]
    assert not attempt.over
    assert len(played(*[RIGHT] * STEPS).messages) == 2 * STEPS + 1  # nothing follows the last line


def test_no_task_of_the_exam_is_in_the_traffic() -> None:
    names = [case.name for case in (*TRAFFIC, *EXAM)]
    assert len(set(names)) == len(names)
    assert not {case.goods for case in EXAM} & {case.goods for case in TRAFFIC}
