"""Best of N, the request's side: who may, where there is a point in it, what vLLM is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.relay.best_of import BestOfPlan, plan_best_of, refuse_surface, wanted_answers
from sidecar.relay.peek import peek_request
from sidecar.relay.refusals import Refusal
from sidecar.relay.reply_edit import Strip

PLAIN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def plan(body: dict[str, Any] | bytes, n: int = 3, *, captured: bool = True) -> BestOfPlan | str:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return plan_best_of(peek_request(data), n, captured=captured)


def planned(body: dict[str, Any] | bytes, n: int = 3, *, captured: bool = True) -> BestOfPlan:
    found = plan(body, n, captured=captured)
    assert isinstance(found, BestOfPlan), found
    return found


@pytest.mark.parametrize(("header", "n"), [("", 1), ("1", 1), ("2", 2), ("8", 8)])
def test_the_header_names_a_number_within_the_limit(header: str, n: int) -> None:
    assert wanted_answers(header, limit=8) == n


NO_NUMBER = "x-sidecar-best-of must be a whole number from 2 to 8."


@pytest.mark.parametrize(
    ("header", "limit", "message"),
    [
        *((header, 8, NO_NUMBER) for header in ("0", "9", "2.0", "2, 3", "٣", "99999999999", "+2")),
        ("5", 4, "x-sidecar-best-of is 5; at most 4 is allowed here."),
        ("2", 1, "[best_of] enabled = true"),
    ],
)
def test_another_header_is_refused_in_vllms_shape(header: str, limit: int, message: str) -> None:
    refusal = wanted_answers(header, limit=limit)

    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    error = json.loads(refusal.body)["error"]
    assert message in error.pop("message")
    assert error == {"type": "BadRequestError", "param": "x-sidecar-best-of", "code": 400}


def test_other_surfaces_refuse_it_by_name_and_pass_who_does_not_ask() -> None:
    refusal = refuse_surface("2", b"/v1/responses?x=1", "responses")

    assert refusal is not None
    assert refusal.status == 400
    assert b"not available on /v1/responses, only on /v1/chat/completions" in refusal.body
    assert refuse_surface("", b"/v1/responses", "responses") is None


def test_vllm_is_asked_once_for_n_choices_and_not_for_a_stream() -> None:
    body = planned(
        {**PLAIN, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7}
    ).body_for("m--v2")

    assert json.loads(body) == {
        **PLAIN,
        "model": "m--v2",
        "temperature": 0.7,
        "n": 3,
        "stream": False,
        "stream_options": None,
        "return_token_ids": True,
        "logprobs": True,
    }


def test_what_the_client_wrote_reaches_vllm_byte_for_byte() -> None:
    body = b'{ "messages" : [ ],"n":1,\n "model":"m","odd":1e400000,"x":"\\u00e9","n":null}'

    assert planned(body, 2).body_for("v2") == (
        b'{"stream":false,"return_token_ids":true,"logprobs":true,'
        b' "messages" : [ ],"n":2,\n "model":"v2","odd":1e400000,"x":"\\u00e9","n":2}'
    )


def test_without_capture_token_ids_are_asked_for_and_log_probabilities_not() -> None:
    found = planned(PLAIN, captured=False)

    assert found.strip == Strip(token_ids=True, logprobs=False)
    assert "logprobs" not in json.loads(found.body_for("m"))


def test_the_plan_remembers_the_stream_that_was_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = planned({**PLAIN, "stream": True, "stream_options": options})

    assert (found.stream, found.include_usage, found.continuous_usage) == (True, True, True)
    alone = planned({**PLAIN, "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert (alone.include_usage, alone.continuous_usage) == (False, False)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"temperature": 0}, "temperature_zero"),
        ({"temperature": 9e-6}, "temperature_zero"),
        ({"seed": 0}, "seed"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stream": "yes"}, "not_valid"),
        ({"stream_options": {"include_usage": True}}, "not_valid"),
        ({"stream": True, "stream_options": 3}, "not_valid"),
        ({"model": 3}, "not_valid"),
        ({"odd": float("nan")}, "not_valid"),
        ({"n": 1, "temperature": 1e-5, "use_beam_search": False, "stream_options": {}}, None),
        ({"n": None, "temperature": None, "seed": None, "stream": None}, None),
    ],
)
def test_where_there_is_no_point_in_it_the_reason_has_a_name(
    fields: dict[str, Any], reason: str | None
) -> None:
    found = plan({**PLAIN, **fields})

    assert (None if isinstance(found, BestOfPlan) else found) == reason
