"""Reading a request's head facts, and splicing into it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from sidecar.records import Surface
from sidecar.relay.peek import UnreadableBodyError, peek_request
from sidecar.relay.request_edit import SCANNED_BYTES, edit_request, splice_request

ASKS = {"model": b'"a"', "return_token_ids": b"true", "logprobs": b"true"}

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "logprobs", "a"]), inner, max_size=3)
    ),
    max_leaves=10,
)
KEYS = st.sampled_from(["model", "logprobs", "return_token_ids", "messages", "stream"]) | st.text()
BODY = st.dictionaries(KEYS, VALUE, max_size=7)


@given(BODY, st.booleans(), st.booleans(), st.booleans())
def test_only_what_is_wanted_changes(
    value: dict[str, object], ask_ids: bool, ask_logprobs: bool, spaced: bool
) -> None:
    separators = (", ", " : ") if spaced else (",", ":")
    body = json.dumps(value, separators=separators).encode()

    wanted = {"model": b'"m--v1"'}
    wanted |= {"return_token_ids": b"true"} if ask_ids else {}
    wanted |= {"logprobs": b"true"} if ask_logprobs else {}

    edited = edit_request(body, wanted)

    expected = {**value, "model": "m--v1"}
    if ask_ids:
        expected["return_token_ids"] = True
    if ask_logprobs:
        expected["logprobs"] = True
    assert json.loads(edited) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            b'{"model":"m", "x": 1e2,"messages":[{"content":"\\"model\\":\\"m\\""}]}',
            b'{"return_token_ids":true,"logprobs":true,"model":"a", "x": 1e2,'
            b'"messages":[{"content":"\\"model\\":\\"m\\""}]}',
        ),
        (b"{}", b'{"model":"a","return_token_ids":true,"logprobs":true}'),
        (
            b'{"logprobs":false,"metadata":{"model":"m","logprobs":null},"model":"m"}',
            b'{"return_token_ids":true,"logprobs":true,'
            b'"metadata":{"model":"m","logprobs":null},"model":"a"}',
        ),
        (
            b'{"model":"m","model":"m","mod\\u0065l":"m"}',
            b'{"return_token_ids":true,"logprobs":true,"model":"a","model":"a","mod\\u0065l":"a"}',
        ),
        (
            b'{"n":12345678901234567890123,"temperature":NaN}',
            b'{"model":"a","return_token_ids":true,"logprobs":true,'
            b'"n":12345678901234567890123,"temperature":NaN}',
        ),
    ],
)
def test_every_other_byte_stays(body: bytes, expected: bytes) -> None:
    edited = edit_request(body, ASKS)

    assert edited == expected


MANY = ",".join(f'"k{number}":0' for number in range(10_000)).encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","x":[NaN%b]}' % (b",[]" * 30_000),
        b'{"model":"m","logprobs":false,%b} \n' % MANY,
        b'{"model":"m","model":"m","x":"%b"}' % (rb"\u0022" * 20_000),
        b" {%b}" % (b" " * 2 * SCANNED_BYTES),
    ],
)
def test_a_long_body_is_not_scanned_and_what_is_wanted_comes_last(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.relay.request_edit.members", None)

    edited = edit_request(body, ASKS)

    expected = {**json.loads(body), "model": "a", "return_token_ids": True, "logprobs": True}
    assert repr(json.loads(edited)) == repr(expected)  # NaN is NaN here
    assert edited.startswith(body.rstrip(b"} \n"))


@pytest.mark.parametrize(
    ("body", "model", "is_text"),
    [
        (b'{"model":"m"}', "m", True),
        (b'{"model":"a","model":"m"}', "m", True),
        (b'{"mod\\u0065l":"m"}', "m", True),
        (b'{"metadata":{"model":"m"}}', None, True),
        (b'{"model":null}', None, True),
        (b'{"model":""}', None, True),
        (b'{"model":3}', None, False),
        (b'{"model":"m","temperature":NaN}', "m", True),
        (b'\xef\xbb\xbf{"model":"m"}', "m", True),
        ('{"model":"m"}'.encode("utf-16"), "m", True),
    ],
)
def test_the_model_is_the_one_that_vllm_would_read(
    body: bytes, model: str | None, is_text: bool
) -> None:
    view = peek_request(body)

    assert (view.model, view.model_is_text) == (model, is_text)


@pytest.mark.parametrize(
    ("body", "ids", "logprobs"),
    [
        (b"{}", True, True),
        (b'{"logprobs":null,"return_token_ids":false}', True, True),
        (b'{"logprobs":true}', True, False),
        (b'{"return_token_ids":true}', False, True),
        (b'{"logprobs":1}', True, False),
        (b'{"logprobs":"yes"}', True, False),
        (b'{"top_logprobs":0}', True, True),
        # vLLM refuses these two without logprobs, and must go on refusing them.
        (b'{"top_logprobs":2}', True, False),
        (b'{"logprob_token_ids":[1]}', True, False),
        (b'{"prompt":"p"}', True, True),
        (b'{"prompt":"p","logprobs":null}', True, True),
        # In completions even these two ask.
        (b'{"prompt":"p","logprobs":0}', True, False),
        (b'{"prompt":"p","logprobs":false}', True, False),
        # The reply would lose the prompt from its text, and gain the prompt's log-probabilities.
        (b'{"prompt":"p","echo":true}', False, False),
    ],
)
def test_what_the_client_asked_for_is_not_asked_on_our_account(
    body: bytes, ids: bool, logprobs: bool
) -> None:
    view = peek_request(body)
    surface: Surface = "completions" if b"prompt" in body else "chat"

    assert (view.may_ask_token_ids(surface), view.may_ask_logprobs(surface)) == (ids, logprobs)


@pytest.mark.parametrize(
    ("body", "detail"),
    [  # Each was sent to a vLLM 0.32 and is what it answered.
        (
            b'{"model":',
            "{'type': 'json_invalid', 'loc': 'body.9', 'msg': 'JSON decode error', "
            "'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}",
        ),
        (
            b"[1]",
            "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid "
            "dictionary or object to extract fields from', 'input': '<list of 1 items>'}",
        ),
        (b"", "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}"),
        (b'"\xff\xfe"', "There was an error parsing the body"),
    ],
)
def test_a_body_that_is_no_object_gets_vllms_own_words(body: bytes, detail: str) -> None:
    with pytest.raises(UnreadableBodyError) as raised:
        peek_request(body)

    assert raised.value.refusal.status == 400
    told = json.loads(raised.value.refusal.body)
    if "error" not in told:
        assert told == {"detail": detail}
        return
    param = "body.9" if body.startswith(b"{") else "body"
    message = f"1 validation error:\n  {detail}"
    expected = {"message": message, "type": "Bad Request", "param": param, "code": 400}
    assert told == {"error": expected}


@given(st.binary(max_size=60))
def test_no_body_makes_it_raise_anything_else(body: bytes) -> None:
    try:
        view = peek_request(body)
    except UnreadableBodyError:
        return
    edited = edit_request(view.body, ASKS)
    assert b'"model":"a"' in edited


@given(BODY, st.booleans(), st.sampled_from(["m", 'a"b', "\u00e9"]))
def test_the_fast_way_does_what_the_slow_way_does_or_nothing(
    value: dict[str, object], spaced: bool, model: str
) -> None:
    value = {key: item for key, item in value.items() if key not in ("logprobs", "model")}
    places = list(value.items())
    places.insert(len(places) // 2, ("model", model))
    body = json.dumps(dict(places), separators=(", ", ": ") if spaced else (",", ":")).encode()
    old = json.dumps(model).encode()

    spliced = splice_request(body, old, b'"a"', b'"logprobs":true,')

    expected = edit_request(body, {"model": b'"a"', "logprobs": b"true"})
    if spliced is not None:
        assert isinstance(spliced, bytes)  # only a long body is pieced
        assert json.loads(spliced) == json.loads(expected)
        assert len(spliced) == len(expected)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"hi"}],"model":"m"}',
        b'{"model":"m","messages":[{"role":"user","content":"\\"model\\":\\"m\\""}]}',
        b'{"model": "m", "messages": []}',
        b'{"messages":[],"model":"m","metadata":{"model":"m"},"stream":true}',
    ],
)
def test_ordinary_bodies_go_the_fast_way(body: bytes) -> None:
    spliced = splice_request(body, b'"m"', b'"a"', b'"x":1,')

    assert isinstance(spliced, bytes)
    assert json.loads(spliced) == {**json.loads(body), "model": "a", "x": 1}


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata":{"model":"m"}}',
        b'{"model":"m","model":"m"}',
        b'{"mod\\u0065l":"m"}',
        b' {"model":"m"}',
    ],
)
def test_what_is_not_certain_at_a_glance_goes_the_slow_way(body: bytes) -> None:
    assert splice_request(body, b'"m"', b'"a"', b"") is None
