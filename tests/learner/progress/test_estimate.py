"""How far a run is, and how long the rest takes: numbers worked by hand."""

from __future__ import annotations

import pytest

from learner.progress.watch import Progress, Timed, duration, progress, stage, words
from learner.records import Part, Stage
from tests.learner.conftest import make_group, make_row

NOTHING = Timed(work=0.0, seconds=0.0)


def of_tokens(name: str, *tokens: int, step: int = 0) -> Stage:
    parts = tuple(
        Part(group_id=f"g{at}", answers=2, tokens=size, step=step) for at, size in enumerate(tokens)
    )
    return Stage(name=name, parts=parts, steps=step)  # type: ignore[arg-type]  # a literal


def test_a_part_counts_the_prompt_once_and_no_masked_answer() -> None:
    rows = [make_row((4, 5), 1.0), make_row((6, 7, 8), -1.0), make_row((9,) * 50, trainable=False)]

    found = stage("training", [make_group((1, 2, 3), rows)], steps=[1])

    assert found == Stage(
        name="training", parts=(Part(group_id="g", answers=2, tokens=8, step=1),), steps=1
    )


def test_nothing_is_estimated_before_a_group_is_done() -> None:
    stages = [of_tokens("checking", 10, 10), of_tokens("training", 10, 10)]

    found = progress(stages, 0, tokens_before=0, measured=NOTHING, before=NOTHING)

    assert found == Progress(phase="checking", answers=4, tokens_left=40)


def test_the_rest_of_the_check_and_three_times_the_work_of_the_steps_are_left() -> None:
    stages = [of_tokens("checking", 10, 30), of_tokens("training", 10, 30, step=1)]

    found = progress(
        stages, 1, tokens_before=0, measured=Timed(work=10.0, seconds=5.0), before=NOTHING
    )

    assert (found.tokens_done, found.tokens_left, found.answers_done) == (10, 70, 2)
    assert found.left_s == pytest.approx(0.5 * (30 + 3 * 40))


def test_the_steps_own_speed_replaces_that_of_the_check() -> None:
    stages = [of_tokens("training", 10, 30, step=2)]
    check = Timed(work=40.0, seconds=20.0)

    first = progress(stages, 0, tokens_before=40, measured=NOTHING, before=check)
    second = progress(
        stages, 1, tokens_before=40, measured=Timed(work=30.0, seconds=3.0), before=check
    )

    assert first.left_s == pytest.approx(0.5 * 3 * 40)
    assert second.left_s == pytest.approx(0.1 * 3 * 30)
    assert (second.tokens_done, second.tokens_left) == (50, 30)


def test_words_for_a_person() -> None:
    found = Progress(
        phase="training",
        answers_done=12,
        answers=64,
        step=2,
        steps=3,
        tokens_done=4_100,
        tokens_left=17_900,
        left_s=130.0,
    )

    assert words(found) == "training: step 2 of 3, 12 of 64 answers, about 2 min left"
    assert words(Progress(phase="loading")) == "loading"


def test_no_time_is_left_once_the_last_step_is_done() -> None:
    done = Progress(
        phase="training", answers_done=64, answers=64, step=3, steps=3, tokens_done=9, left_s=0.0
    )

    assert words(done) == "training: step 3 of 3, 64 of 64 answers"
    assert words(Progress(phase="measuring")) == "measuring how far the policy is from the base"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "about 1 s"), (89.0, "about 89 s"), (100.0, "about 2 min"), (9_000.0, "about 2.5 h")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
