"""The trie's index arithmetic: by hand, and for drawn rows against what each row is alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from learner.policy.attention import dense_mask
from learner.policy.packing import Segment, Trie, fold, pairs, unique_tokens

ROWS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple), min_size=1, max_size=8
)


def test_rows_share_what_they_begin_with() -> None:
    trie = fold([(1, 2, 3, 4, 5), (1, 2, 3, 6, 7, 8), (1, 2, 3, 6, 9)])

    assert trie == Trie(
        tokens=(1, 2, 3, 4, 5, 6, 7, 8, 9),
        positions=(0, 1, 2, 3, 4, 3, 4, 5, 4),
        segments=(
            Segment(start=0, stop=3, last=9, parent=-1, position=0),
            Segment(start=3, stop=5, last=5, parent=0, position=3),
            Segment(start=5, stop=6, last=9, parent=0, position=3),
            Segment(start=6, stop=8, last=8, parent=2, position=4),
            Segment(start=8, stop=9, last=9, parent=2, position=4),
        ),
        places=((0, 1, 2, 3, 4), (0, 1, 2, 5, 6, 7), (0, 1, 2, 5, 8)),
    )


def test_few_shared_tokens_are_computed_twice_when_asked() -> None:
    rows = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 6, 7)]

    assert fold(rows).tokens == (1, 2, 3, 4, 5, 6, 7)
    assert fold(rows, least=2).tokens == (1, 2, 3, 4, 5, 1, 6, 7)
    assert fold(rows, least=4).tokens == (1, 2, 3, 4, 1, 2, 3, 5, 1, 6, 7)


def test_pairs_are_what_a_mask_of_all_tokens_allows() -> None:
    segments = fold([(1, 2, 3, 4, 5), (1, 2, 3, 6)]).segments

    # the prompt 1 + 2 + 3, three tokens that see its 3 tokens, and themselves 1 + 2 and 1
    assert pairs(segments) == 6 + 3 * 3 + 3 + 1
    assert int(dense_mask(segments, torch.device("cpu")).sum()) == pairs(segments)


@settings(max_examples=300)
@given(rows=ROWS, least=st.integers(1, 5))
def test_each_row_is_in_the_trie_as_it_is_alone(rows: list[tuple[int, ...]], least: int) -> None:
    trie = fold(rows, least=least)
    seen_TT = dense_mask(trie.segments, torch.device("cpu"))

    for row, places in zip(rows, trie.places, strict=True):
        assert tuple(trie.tokens[place] for place in places) == row
        assert [trie.positions[place] for place in places] == list(range(len(row)))
        for number, place in enumerate(places):  # it sees its own past in the row, and no more
            assert seen_TT[place].nonzero()[:, 0].tolist() == sorted(places[: number + 1])
    assert len(trie.tokens) == unique_tokens(rows, least=least)
    if least == 1:
        beginnings = {row[: stop + 1] for row in rows for stop in range(len(row))}
        assert len(trie.tokens) == len(beginnings)
