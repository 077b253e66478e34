"""What a body of feedback may hold, and what is refused with which status."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sidecar.bounds import bound
from sidecar.feedback import (
    Caller,
    Feedback,
    FeedbackRefusedError,
    Kind,
    decode_feedback,
    encode_feedback,
    is_feedback,
    read_feedback,
)
from sidecar.records import encode_exchange
from support.exchanges import make_plain_exchange

EXCHANGE = "ex_01ARZ3NDEKTSV4RRFFQ69G5FAV"
SHOP = Caller(project="shop", key_id="k1")


def read(
    body: Any, kind: Kind = "feedback", caller: Caller = SHOP, key: str = "", fresh: str = "0"
) -> Feedback:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_feedback(kind, data, caller, idempotency_key=key, fresh_id=fresh, now=7.0)


def refusal(body: Any, kind: Kind = "feedback", key: str = "") -> FeedbackRefusedError:
    with pytest.raises(FeedbackRefusedError) as caught:
        read(body, kind, key=key)
    return caught.value


def test_feedback_names_its_target_its_project_and_its_source() -> None:
    body = {"exchange_id": EXCHANGE, "score": -1, "label": "wrong", "comment": "No."}

    record = read(body, fresh="ab")

    assert record == Feedback(
        feedback_id="fb_ab",
        kind="feedback",
        target_kind="exchange",
        target=EXCHANGE,
        project="shop",
        key_id="k1",
        source="key:k1",
        received_at=7.0,
        score=-1.0,
        label="wrong",
        comment="No.",
    )


def test_an_outcome_has_success_reward_and_cost() -> None:
    trace = "4BF92F3577B34DA6A3CE929D0E0E4736"

    record = read({"trace_id": trace, "success": True, "reward": 2, "cost": 0.5}, "outcome")

    assert (record.target_kind, record.target) == ("trace", trace.lower())
    assert (record.success, record.reward, record.cost, record.score) == (True, 2.0, 0.5, None)


def test_an_outcome_of_a_task_may_say_no_more_than_that_it_is_over() -> None:
    over = read({"task_id": " refund-7 ", "done": True}, "outcome")
    scored = read({"task_id": "refund-7", "value": 0.0}, "outcome")

    assert (over.target_kind, over.target, over.done) == ("task", "refund-7", True)
    assert (over.success, over.reward, over.cost) == (None, None, None)
    assert (scored.reward, scored.done) == (0.0, None)


def test_a_long_task_is_named_as_the_exchange_that_the_proxy_stores_names_it() -> None:
    name = "t\u00e9" * 100
    stored, _ = bound(msgspec.structs.replace(make_plain_exchange("e"), task=name))

    assert read({"task_id": name, "score": 1}).target == stored.task != name


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ("alice", "h:shop/alice"),
        (EXCHANGE, EXCHANGE),
        ("h:shop/alice", "h:shop/alice"),
        ("x" * 300, "hx:"),
        ("order7 ", "h:shop/order7"),
        (" \torder 7\t", "h:shop/order 7"),
        ("h:shop/alice ", "h:shop/alice"),
        ("hx:" + "0a" * 32, "hx:0a"),
    ],
)
def test_a_session_is_named_as_the_store_names_it(sent: str, stored: str) -> None:
    target = read({"session_id": sent, "score": 0}).target
    assert target == stored or (stored.startswith("hx:") and target.startswith(stored))


def test_the_source_is_what_the_caller_says_else_the_user_else_the_key() -> None:
    body = {"exchange_id": EXCHANGE, "score": 1}
    user = Caller(project="shop", key_id="k1", user="bob")

    assert read({**body, "source": "unit tests"}, caller=user).source == "unit tests"
    assert read(body, caller=user).source == "user:bob"
    assert read(body, caller=Caller(project="default")).source == ""


def test_one_idempotency_key_is_one_id_in_one_project_and_for_one_kind() -> None:
    body = {"exchange_id": EXCHANGE, "score": 1}
    first = read(body, key="order-7", fresh="1")

    again = read({**body, "score": -1}, key="order-7", fresh="2")
    other_project = read(body, caller=Caller(project="mail"), key="order-7")
    outcome = read({"exchange_id": EXCHANGE, "reward": 1}, "outcome", key="order-7")

    assert first.feedback_id == again.feedback_id
    assert len({first.feedback_id, other_project.feedback_id, outcome.feedback_id}) == 3


@pytest.mark.parametrize("score", ["NaN", "Infinity", "1e999", "true", "1.5", "-2", '"1"', "null"])
def test_a_score_is_a_finite_number_within_its_bounds(score: str) -> None:
    error = refusal(b'{"exchange_id":"%b","score":%b}' % (EXCHANGE.encode(), score.encode()))

    assert error.status == (400 if score in ("NaN", "Infinity") else 422)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 422),
        (b"{", 400),
        (b'{"exchange_id":"\xff","score":1}', 400),
        (b'{"exchange_id":"' + EXCHANGE.encode() + b'","score":1,"label":"\\ud800"}', 400),
        (b'{"exchange_id":"' + EXCHANGE.encode() + b'","score":1,"label":"\\u0000"}', 422),
        (b'{"score":1' + b"0" * 5_000 + b"}", 422),
        (b'{"score":' + b"[" * 8_000 + b"]" * 8_000 + b"}", 422),
        (b'{"other":' + b"[" * 8_000 + b"]" * 8_000 + b"}", 422),
        (b" " * 16_385, 413),
        ({"score": 1}, 422),
        ({"exchange_id": EXCHANGE, "session_id": "a", "score": 1}, 422),
        ({"exchange_id": "m:not-one", "score": 1}, 422),
        ({"session_id": "", "score": 1}, 422),
        ({"session_id": " \t", "score": 1}, 422),
        ({"session_id": "h:", "score": 1}, 422),
        ({"session_id": "hx:", "score": 1}, 422),
        ({"session_id": "hx:order7", "score": 1}, 422),
        ({"trace_id": "0" * 32, "score": 1}, 422),
        ({"exchange_id": EXCHANGE}, 422),
        ({"exchange_id": EXCHANGE, "score": 1, "stars": 5}, 422),
        ({"exchange_id": EXCHANGE, "score": 1, "comment": "x" * 4_001}, 422),
        ({"exchange_id": EXCHANGE, "score": 1, "source": ""}, 422),
    ],
)
def test_a_bad_body_is_refused_with_its_status(body: Any, status: int) -> None:
    assert refusal(body).status == status


@pytest.mark.parametrize(
    "body",
    [
        {"exchange_id": EXCHANGE},
        {"exchange_id": EXCHANGE, "success": 1},
        {"exchange_id": EXCHANGE, "reward": 1e13},
        {"exchange_id": EXCHANGE, "cost": -1},
        {"exchange_id": EXCHANGE, "reward": True},
        {"exchange_id": EXCHANGE, "reward": 1, "value": 1},
        {"exchange_id": EXCHANGE, "done": False},
        {"exchange_id": EXCHANGE, "task_id": "refund", "done": True},
        {"task_id": " ", "done": True},
        {"exchange_id": EXCHANGE, "score": 1},
    ],
)
def test_a_bad_outcome_is_refused(body: dict[str, Any]) -> None:
    assert refusal(body, "outcome").status == 422


def test_an_idempotency_key_is_bounded_in_bytes() -> None:
    body = {"exchange_id": EXCHANGE, "score": 1}

    assert read(body, key="é" * 128).feedback_id
    assert refusal(body, key="é" * 128 + "x").reason == "idempotency_key"


def test_a_record_survives_the_bus_and_is_told_from_an_exchange() -> None:
    record = read({"exchange_id": EXCHANGE, "score": 1})
    payload = encode_feedback(record)

    assert is_feedback(payload)
    assert decode_feedback(payload) == record
    assert not is_feedback(encode_exchange(make_plain_exchange("record")))


@pytest.mark.parametrize("name", ["h:" + "x" * 500, "hx:" + "y" * 1_000])
def test_a_stored_name_that_no_store_holds_is_refused(name: str) -> None:
    assert refusal({"session_id": name, "score": 1}).status == 422
