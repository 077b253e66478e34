"""Which of our additions a vLLM takes: what counts against one, when it is left out, and for how
long."""

from __future__ import annotations

import pytest

from sidecar.relay.upstream import BUSY_PAUSE_S, CAPTURE, EVERY, REFUSALS, TRACE, USAGE, OwnFields


def refusing(kinds: int, *, now: float = 100.0, proven: int = 0) -> OwnFields:
    fields = OwnFields()
    fields.took(proven)
    for _ in range(REFUSALS):
        fields.refuses(kinds, now)
    return fields


def test_everything_is_sent_until_three_refusals_in_a_row() -> None:
    fields = OwnFields()

    assert [fields.refuses(CAPTURE, 100.0) for _ in range(3)] == [0, 0, CAPTURE]

    assert fields.to_send(EVERY, 100.0) == USAGE | TRACE


def test_a_success_between_refusals_starts_the_count_again() -> None:
    """So an engine that refuses only requests with tools goes on being asked."""
    fields = OwnFields()
    for _ in range(10):
        fields.refuses(CAPTURE, 100.0)
        fields.refuses(CAPTURE, 100.0)
        fields.took(CAPTURE)

    assert (fields.refused, fields.to_send(CAPTURE, 100.0)) == (0, CAPTURE)


def test_one_request_tries_again_when_the_wait_is_over_and_the_waits_double_to_ten_minutes() -> (
    None
):
    fields, now, waits = refusing(CAPTURE), 100.0, []
    for _ in range(7):
        begin = now
        while not fields.to_send(CAPTURE, now):
            now += 1.0
        waits.append(now - begin)
        assert fields.to_send(CAPTURE, now) == 0  # one request tries at a time
        fields.refuses(CAPTURE, now)

    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


def test_a_try_that_succeeds_ends_the_refusal() -> None:
    fields = refusing(CAPTURE)
    fields.to_send(CAPTURE, 130.0)

    assert fields.took(CAPTURE) == CAPTURE

    assert (fields.refused, fields.to_send(CAPTURE, 130.0)) == (0, CAPTURE)
    assert fields.took(CAPTURE) == 0


def test_a_kind_that_is_known_to_be_taken_is_not_blamed() -> None:
    assert refusing(CAPTURE | USAGE, proven=CAPTURE).refused == USAGE


def test_of_kinds_that_nothing_is_known_of_one_is_blamed_and_the_next_after_it() -> None:
    fields = refusing(CAPTURE | USAGE)
    assert fields.refused == CAPTURE

    for _ in range(REFUSALS):
        fields.refuses(fields.to_send(CAPTURE | USAGE, 100.0), 100.0)

    assert fields.refused == CAPTURE | USAGE
    assert fields.to_send(CAPTURE | USAGE, 130.0) == CAPTURE | USAGE  # and both are tried again


@pytest.mark.parametrize("status", [400, 404, 413, 422, 500, 501])
def test_a_request_that_failed_is_always_asked_again(status: int) -> None:
    fields = OwnFields()
    fields.failed_plainly(503, 1.0)
    fields.failed_plainly(status, 1.0)

    assert [fields.may_ask_plainly(status, 1.0) for _ in range(5)] == [True] * 5


@pytest.mark.parametrize("status", [429, 502, 503, 504, 529])
def test_only_a_plain_request_that_meets_a_busy_vllm_too_ends_the_asking_for_a_second(
    status: int,
) -> None:
    fields = OwnFields()
    assert [fields.may_ask_plainly(status, 50.0) for _ in range(5)] == [True] * 5

    fields.failed_plainly(400, 50.0)
    assert fields.may_ask_plainly(status, 50.0)

    fields.failed_plainly(status, 50.0)
    times = [50.0, 50.0 + BUSY_PAUSE_S - 0.001, 50.0 + BUSY_PAUSE_S]
    assert [fields.may_ask_plainly(status, at) for at in times] == [False, False, True]
