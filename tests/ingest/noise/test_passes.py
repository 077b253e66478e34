"""What the store keeps of a scoring: the positions, which no seed alone tells."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.noise.estimate import decode_passes, encode_passes
from ingest.noise.windows import is_chosen
from ingest.records import ShownPass
from ingest.ruler.prompt import build_prompt
from ingest.ruler.ruler import score_answers
from support.fake_judge import FakeJudge, Shown, scores_reply


@st.composite
def scorings(draw: st.DrawFn) -> tuple[ShownPass, ...]:
    size = draw(st.integers(2, 8))
    score = st.floats(0, 1)
    return tuple(
        ShownPass(
            order=tuple(draw(st.permutations(range(size)))),
            scores=tuple(draw(st.lists(score, min_size=size, max_size=size))),
        )
        for _ in range(draw(st.integers(1, 4)))
    )


@given(scorings())
def test_passes_come_back_as_they_were_stored(passes: tuple[ShownPass, ...]) -> None:
    assert decode_passes(json.loads(json.dumps(encode_passes(passes)))) == passes


@pytest.mark.parametrize(
    "stored", [None, [[[0, 0.5], [0, 0.5]]], [[[0, 0.5], [2, 0.5]]], [[[0, 7.0]]], [["x"]], 5]
)
def test_a_damaged_scoring_is_refused(stored: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_passes(stored)


async def test_a_judgement_tells_which_answer_was_shown_where() -> None:
    """Two of the four answers are one to the judge: positions are those of distinct answers."""
    answers = [{"role": "assistant", "content": text} for text in ("a", "b", "a", "c")]

    def by_position(shown: Shown) -> str:
        return scores_reply({name: k / 10 for k, name in enumerate(shown)})

    judge = FakeJudge(by_position)
    judged = await score_answers(
        judge, context=[{"role": "user", "content": "hi"}], tools=(), answers=answers,
        rubric="Be good.", passes=2, seed=7,
    )  # fmt: skip

    first, second = judged.passes
    assert second.order == first.order[::-1]
    for one in judged.passes:
        assert [one.scores[answer] for answer in one.order] == [0.0, 0.1, 0.2]
    contents = "abc"
    for one, prompt in zip(judged.passes, judge.prompts, strict=True):
        places = [prompt.index(f'"content": "{contents[answer]}"') for answer in one.order]
        assert places == sorted(places)
    # The seed tells the order only to who knows that three were shown, not four.
    drawn = build_prompt(
        context=(), tools=(), answers=answers[:2] + answers[3:], rubric="", rng=Random(7)
    )
    assert drawn.order == first.order


def test_a_twentieth_of_the_groups_is_chosen_and_the_same_ones_again() -> None:
    names = [f"g-{number}" for number in range(20_000)]

    chosen = [name for name in names if is_chosen(name, 0.05)]

    assert 880 < len(chosen) < 1_120  # 1,000 by chance with a standard deviation of 31
    assert chosen == [name for name in names if is_chosen(name, 0.05)]
    assert set(chosen) <= {name for name in names if is_chosen(name, 0.1)}
    assert not any(is_chosen(name, 0.0) for name in names)
    assert all(is_chosen(name, 1.0) for name in names)
