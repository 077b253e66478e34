"""Best of N, the request's side: who may, where there is a point in it, what vLLM is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

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


@pytest.mark.parametrize(("header", "n"), [("", 1), ("1", 1), ("2", 2), ("4", 4), ("8", 8)])
def test_the_header_names_a_number_within_the_limit(header: str, n: int) -> None:
    assert wanted_answers(header, limit=8) == n


@pytest.mark.parametrize("header", ["0", "9", "-2", "2.0", "two", "2, 3", "٣", "99999999999", "+2"])
def test_a_header_that_is_no_such_number_is_refused_in_vllms_shape(header: str) -> None:
    refusal = wanted_answers(header, limit=8)

    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    assert json.loads(refusal.body) == {
        "error": {
            "message": "x-sidecar-best-of must be a whole number from 2 to 8.",
            "type": "BadRequestError",
            "param": "x-sidecar-best-of",
            "code": 400,
        }
    }


def test_above_the_limit_the_refusal_names_the_limit() -> None:
    refusal = wanted_answers("5", limit=4)

    assert isinstance(refusal, Refusal)
    assert b"x-sidecar-best-of is 5; at most 4 is allowed here." in refusal.body


def test_where_it_is_off_the_refusal_says_how_it_is_turned_on() -> None:
    refusal = wanted_answers("2", limit=1)

    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    assert b"[best_of] enabled = true" in refusal.body


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


def test_a_body_without_members_gets_them_all() -> None:
    assert json.loads(planned(b"{}").body_for("m"))["n"] == 3


def test_what_the_client_asked_for_itself_stays_in_its_reply() -> None:
    found = planned({**PLAIN, "logprobs": True, "return_token_ids": True})

    assert found.strip == Strip(token_ids=False, logprobs=False)


def test_without_capture_token_ids_are_asked_for_and_log_probabilities_not() -> None:
    found = planned(PLAIN, captured=False)

    assert found.strip == Strip(token_ids=True, logprobs=False)
    assert "logprobs" not in json.loads(found.body_for("m"))


def test_the_plan_remembers_the_stream_that_was_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = planned({**PLAIN, "stream": True, "stream_options": options})

    assert (found.stream, found.include_usage, found.continuous_usage) == (True, True, True)
    plain = planned(PLAIN)
    assert (plain.stream, plain.include_usage, plain.continuous_usage) == (False, False, False)
    alone = planned({**PLAIN, "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert (alone.include_usage, alone.continuous_usage) == (False, False)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"temperature": 0}, "temperature_zero"),
        ({"temperature": 9e-6}, "temperature_zero"),
        ({"seed": 0}, "seed"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stream": "yes"}, "not_valid"),
        ({"stream": 1}, "not_valid"),
        ({"stream_options": {"include_usage": True}}, "not_valid"),
        ({"stream": True, "stream_options": 3}, "not_valid"),
        ({"model": 3}, "not_valid"),
    ],
)
def test_where_there_is_no_point_in_it_the_reason_has_a_name(
    fields: dict[str, Any], reason: str
) -> None:
    assert plan({**PLAIN, **fields}) == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": None},
        {"temperature": None},
        {"temperature": 1e-5},
        {"seed": None},
        {"stream": None, "stream_options": None},
        {"stream_options": {}},
        {"use_beam_search": False},
    ],
)
def test_fields_that_ask_for_nothing_do_not_stand_in_the_way(fields: dict[str, Any]) -> None:
    assert isinstance(plan({**PLAIN, **fields}), BestOfPlan)


def test_a_body_that_only_pythons_json_reads_is_left_to_vllm() -> None:
    assert plan(b'{"model":"m","messages":[],"temperature":NaN}') == "not_valid"


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "stream_options", "model", "user", "logprobs", "tools", "é"]),
        st.none() | st.booleans() | st.text(max_size=5) | st.lists(st.integers(), max_size=2),
        max_size=7,
    )
)
def test_only_the_fields_that_are_ours_ever_change(fields: dict[str, Any]) -> None:
    found = plan({**fields, "model": "m"}, 2)
    if isinstance(found, str):
        return

    sent = json.loads(found.body_for("up"))

    ours = {"model", "n", "stream", "stream_options", "logprobs", "return_token_ids"}
    assert {key: sent[key] for key in sent.keys() - ours} == {
        key: fields[key] for key in fields.keys() - ours
    }
    assert (sent["model"], sent["n"], sent["stream"]) == ("up", 2, False)
    assert not sent.get("stream_options")
