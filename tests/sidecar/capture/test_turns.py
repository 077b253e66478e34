"""A request and its retries are one turn; two requests that are merely alike are two."""

from __future__ import annotations

from typing import Any

from sidecar.capture.assemble import Turns

PLAIN: dict[str, Any] = {
    "project": "p",
    "session_key": "h:s",
    "body": b"{}",
    "retry_count": 0,
    "idempotency_key": "",
    "ended_well": True,
}


def _name(turns: Turns, exchange_id: str, **changes: Any) -> str:
    return turns.name(exchange_id, **{**PLAIN, **changes})


def test_the_retries_of_a_failed_original_join_it() -> None:
    turns = Turns()

    first = _name(turns, "ex_1", ended_well=False)
    second = _name(turns, "ex_2", retry_count=1, ended_well=False)
    third = _name(turns, "ex_3", retry_count=2)

    assert first == second == third
    assert first.startswith("try-")


def test_they_meet_in_any_process_and_in_any_order() -> None:
    failed = _name(Turns(), "ex_1", ended_well=False)

    assert _name(Turns(), "ex_2", retry_count=1) == failed
    turns = Turns()  # the retry ended before the original was seen to be cut
    assert _name(turns, "ex_2", retry_count=1) == failed
    assert _name(turns, "ex_1", ended_well=False) == failed


def test_a_retry_of_a_reply_that_was_lost_on_its_way_joins_it() -> None:
    turns = Turns()

    assert _name(turns, "ex_1") == "ex_1"
    assert _name(turns, "ex_2", retry_count=1) == "ex_1"


def test_a_retry_joins_the_failed_one_of_two_alike() -> None:
    turns = Turns()
    failed = _name(turns, "ex_1", ended_well=False)

    assert _name(turns, "ex_2") == "ex_2"
    assert _name(turns, "ex_3", retry_count=1) == failed
    assert _name(turns, "ex_4") == "ex_4"
    assert _name(turns, "ex_5", retry_count=1) == "ex_4"


def test_another_body_session_or_project_is_another_turn() -> None:
    turns = Turns()
    changes: list[dict[str, Any]] = [
        {},
        {"body": b"[]"},
        {"session_key": "h:t"},
        {"project": "q"},
    ]
    names = {
        _name(turns, f"ex_{number}", ended_well=False, **change)
        for number, change in enumerate(changes)
    }

    assert len(names) == 4


def test_an_idempotency_key_makes_one_turn_of_equal_bodies() -> None:
    turns = Turns()
    first = _name(turns, "ex_1", idempotency_key="k")

    assert first.startswith("key-")
    assert _name(turns, "ex_2", idempotency_key="k", session_key="h:t") == first
    assert _name(Turns(), "ex_3", idempotency_key="k", retry_count=1) == first
    assert _name(turns, "ex_4", idempotency_key="l") != first
    assert _name(turns, "ex_5", idempotency_key="k", project="q") != first
    # a client that always sends the same key must not lose all but one of its turns
    assert _name(turns, "ex_6", idempotency_key="k", body=b"[]") != first


def test_only_so_many_originals_are_remembered() -> None:
    turns = Turns(remembered=2)
    for number in range(3):
        _name(turns, f"ex_{number}", body=b"%d" % number)

    assert _name(turns, "ex_9", body=b"2", retry_count=1) == "ex_2"
    assert _name(turns, "ex_9", body=b"1", retry_count=1) == "ex_1"
    assert _name(turns, "ex_9", body=b"0", retry_count=1).startswith("try-")
