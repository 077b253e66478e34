"""Reading a request's head facts, and splicing into it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.relay.request_edit import (
    UnreadableBodyError,
    edit_request,
    opening_messages,
    read_request,
)

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
    value: dict, ask_ids: bool, ask_logprobs: bool, spaced: bool
) -> None:
    separators = (", ", " : ") if spaced else (",", ":")
    body = json.dumps(value, separators=separators).encode()

    edited = edit_request(body, model="m--v1", ask_token_ids=ask_ids, ask_logprobs=ask_logprobs)

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
    edited = edit_request(body, model="a", ask_token_ids=True, ask_logprobs=True)

    assert edited == expected


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
    view = read_request(body)

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
    ],
)
def test_what_the_client_asked_for_is_not_asked_on_our_account(
    body: bytes, ids: bool, logprobs: bool
) -> None:
    view = read_request(body)

    assert (view.may_ask_token_ids, view.may_ask_logprobs) == (ids, logprobs)


@pytest.mark.parametrize(
    ("body", "reply"),
    [
        # Each was sent to a vLLM 0.32 and is what it answered.
        (
            b'{"model":',
            b'{"error":{"message":"1 validation error:\\n  {\'type\': \'json_invalid\', '
            b"'loc': 'body.9', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', "
            b"'ctx': {'error': 'Expecting value'}}\",\"type\":\"Bad Request\","
            b'"param":"body.9","code":400}}',
        ),
        (
            b"{} x",
            b'{"error":{"message":"1 validation error:\\n  {\'type\': \'json_invalid\', '
            b"'loc': 'body.3', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', "
            b"'ctx': {'error': 'Extra data'}}\",\"type\":\"Bad Request\","
            b'"param":"body.3","code":400}}',
        ),
        (
            b"[1]",
            b'{"error":{"message":"1 validation error:\\n  {\'type\': \'model_attributes_type\', '
            b"'loc': 'body', 'msg': 'Input should be a valid dictionary or object to extract "
            b"fields from', 'input': '<list of 1 items>'}\",\"type\":\"Bad Request\","
            b'"param":"body","code":400}}',
        ),
        (
            b'"a"',
            b'{"error":{"message":"1 validation error:\\n  {\'type\': \'model_attributes_type\', '
            b"'loc': 'body', 'msg': 'Input should be a valid dictionary or object to extract "
            b'fields from\', \'input\': \'a\'}","type":"Bad Request","param":"body",'
            b'"code":400}}',
        ),
        (
            b"",
            b'{"error":{"message":"1 validation error:\\n  {\'type\': \'missing\', '
            b"'loc': 'body', 'msg': 'Field required', 'input': 'None'}\","
            b'"type":"Bad Request","param":"body","code":400}}',
        ),
        (b'"\xff\xfe"', b'{"detail":"There was an error parsing the body"}'),
    ],
)
def test_a_body_that_is_no_object_gets_vllms_own_words(body: bytes, reply: bytes) -> None:
    with pytest.raises(UnreadableBodyError) as raised:
        read_request(body)

    assert raised.value.refusal.body == reply
    assert raised.value.refusal.status == 400


@given(st.binary(max_size=60))
def test_no_body_makes_it_raise_anything_else(body: bytes) -> None:
    try:
        view = read_request(body)
    except UnreadableBodyError:
        return
    edited = edit_request(view.body, model="a", ask_token_ids=True, ask_logprobs=True)
    assert b'"model":"a"' in edited


@pytest.mark.parametrize(
    ("messages", "roles"),
    [
        (b'[{"role":"system"},{"role":"user"},{"role":"assistant"}]', ["system", "user"]),
        (b'[{"role":"system"}]', ["system"]),
        (b"[1]", []),
        (b'{"role":"user"}', []),
        (b"", []),
    ],
)
def test_the_opening_ends_with_the_first_user_message(messages: bytes, roles: list) -> None:
    assert [message["role"] for message in opening_messages(messages)] == roles
