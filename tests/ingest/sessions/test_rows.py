"""Rows of tokens: each sampled token is trainable once, and a row repeats what vLLM saw."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from ingest.sessions import rows
from ingest.sessions.rows import (
    RowLink,
    SampledAnswer,
    TokenRow,
    TokenTurn,
    join_rows,
    parents_first,
)


def answer(*ids: int, index: int = 0, logprobs: Sequence[float] | None = None) -> SampledAnswer:
    known = [-0.5] * len(ids) if logprobs is None else logprobs
    return SampledAnswer(index=index, token_ids=ids, logprobs=known)


def turn(
    name: str,
    parent: str | None,
    prompt: Sequence[int],
    *answers: SampledAnswer,
    trainable: bool = True,
) -> TokenTurn:
    return TokenTurn(
        exchange_id=name,
        parent=parent,
        prompt_token_ids=prompt,
        answers=answers,
        trainable=trainable,
    )


def shape(row: TokenRow) -> tuple[list[int], list[tuple[str, int, int, int]], RowLink | None]:
    """Its ids, its trainable answers, its link."""
    trained = [
        (one.exchange_id, one.choice, one.start, one.stop) for one in row.answers if one.logprobs
    ]
    return row.token_ids.tolist(), trained, row.link


def test_a_turn_extends_the_row_of_its_parent() -> None:
    found = join_rows(
        [
            turn("a", None, [1, 2], answer(3, 4, logprobs=[-0.25, -1.0])),
            turn("b", "a", [1, 2, 3, 4, 5], answer(6)),
        ]
    )

    assert [shape(row) for row in found] == [
        ([1, 2, 3, 4, 5, 6], [("a", 0, 2, 4), ("b", 0, 5, 6)], None)
    ]
    assert found[0].answers[0].logprobs == (-0.25, -1.0)


def test_a_template_that_writes_the_answer_in_other_tokens_begins_a_linked_row() -> None:
    found = join_rows([turn("a", None, [1], answer(2, 3)), turn("b", "a", [1, 23, 4], answer(5))])

    assert [shape(row) for row in found] == [
        ([1, 2, 3], [("a", 0, 1, 3)], None),
        ([1, 23, 4, 5], [("b", 0, 3, 4)], RowLink(row=0, shared=1)),
    ]


def test_a_branch_has_the_common_answer_as_context_only() -> None:
    found = join_rows(
        [
            turn("a", None, [1], answer(2)),
            turn("b", "a", [1, 2, 3], answer(4)),
            turn("c", "a", [1, 2, 5], answer(6)),
        ]
    )

    assert [shape(row) for row in found] == [
        ([1, 2, 3, 4], [("a", 0, 1, 2), ("b", 0, 3, 4)], None),
        ([1, 2, 5, 6], [("c", 0, 3, 4)], RowLink(row=0, shared=2)),
    ]


def test_each_choice_has_a_row_and_the_one_that_was_taken_goes_on() -> None:
    found = join_rows(
        [
            turn("a", None, [1], answer(2), answer(3, index=1)),
            turn("b", "a", [1, 3, 4], answer(5)),
        ]
    )

    assert [shape(row) for row in found] == [
        ([1, 2], [("a", 0, 1, 2)], None),
        ([1, 3, 4, 5], [("a", 1, 1, 2), ("b", 0, 3, 4)], RowLink(row=0, shared=1)),
    ]


@pytest.mark.parametrize(
    "context",
    [
        turn("a", None, [1], answer(2), trainable=False),
        turn("a", None, [1], answer(2, logprobs=[])),
    ],
    ids=["untrainable", "without log-probabilities"],
)
def test_an_answer_that_cannot_be_trained_on_is_context(context: TokenTurn) -> None:
    found = join_rows([context, turn("b", "a", [1, 2, 3], answer(4))])

    assert [shape(row) for row in found] == [([1, 2, 3, 4], [("b", 0, 3, 4)], None)]
    assert [(one.start, one.stop) for one in found[0].answers] == [(1, 2), (3, 4)]


def test_parents_come_first_whatever_the_order_and_a_circle_is_cut() -> None:
    given_order = {"d": "c", "a": "b", "b": "a", "c": None, "e": "gone", "f": "d"}

    assert list(parents_first(given_order)) == ["c", "d", "b", "a", "e", "f"]


IDS = st.lists(st.integers(0, 2), max_size=3)


@st.composite
def sessions(draw: st.DrawFn) -> list[TokenTurn]:
    """Turns that continue each other or not, with few ids, so that much is equal by chance."""
    turns: list[TokenTurn] = []
    for number in range(draw(st.integers(1, 9))):
        parent = draw(st.none() | st.sampled_from([*turns, None])) if turns else None
        prompt = draw(IDS)
        if parent is not None and draw(st.integers(0, 3)):
            taken: Sequence[int] = (
                draw(st.sampled_from(parent.answers)).token_ids if parent.answers else []
            )
            prompt = [*parent.prompt_token_ids, *taken, *prompt]
        answers = tuple(
            answer(*ids, index=index, logprobs=None if draw(st.booleans()) else ids[1:])
            for index, ids in enumerate(draw(st.lists(IDS, max_size=3)))
        )
        name = None if parent is None else parent.exchange_id
        turns.append(
            turn(f"t{number}", name, prompt, *answers, trainable=draw(st.integers(0, 3)) > 0)
        )
    return turns


@settings(max_examples=60)
@given(sessions())
def test_each_sampled_token_is_trainable_in_exactly_one_row(turns: list[TokenTurn]) -> None:
    found = join_rows(turns)

    seen: Counter[tuple[str, int, int]] = Counter()
    for row in found:
        used: set[int] = set()
        for one in row.answers:
            if one.logprobs:
                places = range(one.start, one.stop)
                assert used.isdisjoint(places)
                used.update(places)
                seen.update((one.exchange_id, one.choice, at - one.start) for at in places)
    expected = {
        (one.exchange_id, sampled.index, at)
        for one in turns
        for sampled in one.answers
        for at in range(len(sampled.token_ids))
        if one.trainable
        and one.prompt_token_ids
        and len(sampled.logprobs) == len(sampled.token_ids)
    }
    assert seen == Counter(dict.fromkeys(expected, 1))


@settings(max_examples=60)
@given(sessions())
def test_a_row_begins_with_prompt_and_answer_of_each_turn(turns: list[TokenTurn]) -> None:
    found = join_rows(turns)

    by_name = {one.exchange_id: one for one in turns}
    for number, row in enumerate(found):
        ids = row.token_ids.tolist()
        assert row.number == number
        for one in row.answers:
            source = by_name[one.exchange_id]
            sampled = next(
                (x for x in source.answers if x.index == one.choice),
                SampledAnswer(index=0, token_ids=()),
            )
            assert ids[: one.start] == list(source.prompt_token_ids)
            assert ids[one.start : one.stop] == list(sampled.token_ids)
            assert one.logprobs in ((), tuple(sampled.logprobs))
        assert len(ids) == row.answers[-1].stop
        if row.link is not None:
            other = found[row.link.row].token_ids.tolist()
            assert row.link.row < number
            assert ids[: row.link.shared] == other[: row.link.shared]
            assert min(len(ids), len(other)) >= row.link.shared


@settings(max_examples=50)
@given(sessions())
def test_a_row_begins_only_where_none_can_be_extended(turns: list[TokenTurn]) -> None:
    found = join_rows(turns)

    by_name = {one.exchange_id: one for one in turns}
    for row in found:
        first = by_name[row.answers[0].exchange_id]
        if row.answers[0].choice or first.parent is None:
            continue
        prompt = list(first.prompt_token_ids)
        for other in found:
            for one in other.answers:
                whole = other.token_ids.tolist()[: one.stop]
                if one.exchange_id == first.parent and prompt[: one.stop] == whole:
                    assert one is not other.answers[-1], "it could have been extended"


def long_session(length: int, turns: int) -> Iterator[TokenTurn]:
    """A conversation that has this many tokens after as many turns."""
    step = length // turns
    ids = array("i", range(length))
    for number in range(turns):
        begin = number * step
        yield turn(
            f"t{number}",
            f"t{number - 1}" if number else None,
            ids[: begin + step - 100],
            answer(*ids[begin + step - 100 : begin + step]),
        )


@pytest.mark.parametrize("branches", [0, 5])
def test_a_long_session_costs_its_tokens(monkeypatch: pytest.MonkeyPatch, branches: int) -> None:
    compared = 0
    same = rows._same

    def counted(one: array[int], other: array[int], start: int, stop: int) -> bool:
        nonlocal compared
        compared += stop - start
        return same(one, other, start, stop)

    monkeypatch.setattr(rows, "_same", counted)
    chain = list(long_session(100_000, 200))
    again = [replace(chain[-1], exchange_id=f"again{number}") for number in range(branches)]

    found = join_rows([*chain, *again])

    given_tokens = sum(len(one.prompt_token_ids) for one in (*chain, *again))
    assert compared <= given_tokens
    assert [len(row.token_ids) for row in found] == [100_000] * (1 + branches)
    assert len(found[0].answers) == 200
    assert sum(bool(one.logprobs) for row in found for one in row.answers) == 200 + branches
