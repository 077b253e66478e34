"""Which groups the next run takes when some are suspected of failed runs."""

from __future__ import annotations

import pytest

from learner.runs.source import SUSPECTS_KEPT, choose

FRESH = [f"g{number}" for number in range(16)]


def test_without_failures_the_newest_are_taken() -> None:
    assert choose(FRESH, {}, least=4, most=6, after_failure=False) == (FRESH[:6], [])
    assert choose(FRESH, {}, least=17, most=6, after_failure=False) == ([], [])


def test_half_of_the_suspects_join_those_that_never_failed() -> None:
    failures = {"g0": 1, "g3": 1, "g5": 1, "g7": 2}

    taken, given_up = choose(FRESH, failures, least=4, most=8, after_failure=False)

    clean = [name for name in FRESH if name not in failures]
    assert taken == [*clean[:6], "g0", "g3"]
    assert given_up == []


def test_the_run_after_a_failure_leaves_suspects_out_if_enough_others_wait() -> None:
    failures = {"g0": 1}

    assert choose(FRESH, failures, least=16, most=64, after_failure=True)[0] == FRESH[1:]


def test_the_run_after_a_failure_takes_suspects_when_hardly_anything_else_waits() -> None:
    failures = dict.fromkeys(FRESH, 1)

    assert choose(FRESH, failures, least=16, most=64, after_failure=True)[0] == FRESH[:8]


@pytest.mark.parametrize("most", [1, 2, 64])
def test_a_lone_suspect_is_tried_alone_at_last(most: int) -> None:
    assert choose(["g0"], {"g0": 5}, least=1, most=most, after_failure=True)[0] == ["g0"]


def test_suspects_without_end_are_given_up_the_oldest_first() -> None:
    most = 2
    failures = dict.fromkeys(FRESH, 1)

    taken, given_up = choose(FRESH, failures, least=1, most=most, after_failure=True)

    assert given_up == FRESH[SUSPECTS_KEPT * most :]
    assert len(taken) == most
