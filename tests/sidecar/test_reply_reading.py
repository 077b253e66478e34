"""Replies as they are recorded: whole and streamed say the same."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sidecar.reply_choices import read_stream, read_whole
from sidecar.reply_parts import UnreadableReplyError, message_json

Recorded = Callable[[str], bytes]


@pytest.mark.parametrize("name", ["whole", "two"])
def test_a_stream_reads_like_the_whole_reply(name: str, recorded: Recorded) -> None:
    whole = read_whole(recorded(f"{name}_reply_asked.json"))
    stream = read_stream([recorded(f"{name}_stream_asked.sse")])

    assert stream.models == whole.models == {"smollm2-135m"}
    assert stream.prompt_token_ids == whole.prompt_token_ids
    assert stream.choices.keys() == whole.choices.keys()
    for index, choice in whole.choices.items():
        streamed = stream.choices[index]
        assert streamed.token_ids == choice.token_ids
        assert streamed.logprobs == choice.logprobs
        assert streamed.finish_reason == choice.finish_reason == "length"
        assert message_json(streamed.message) == message_json(choice.message)


def test_the_numbers_of_a_recorded_reply() -> None:
    reply = read_whole(
        b'{"model":"m","prompt_token_ids":[1,2,3],"usage":{"completion_tokens":2},"choices":['
        b'{"index":0,"message":{"role":"assistant","content":"ok","tool_calls":[],"audio":null},'
        b'"logprobs":{"content":[{"token":"o","logprob":-0.5},{"token":"k","logprob":-0.25}]},'
        b'"finish_reason":"stop","token_ids":[7,2]}]}'
    )

    choice = reply.choices[0]
    assert (choice.token_ids, choice.logprobs) == ((7, 2), (-0.5, -0.25))
    assert (reply.prompt_token_ids, reply.completion_tokens) == ((1, 2, 3), 2)
    assert message_json(choice.message) == b'{"role":"assistant","content":"ok"}'


def _event(delta: str, index: int = 0) -> bytes:
    return b'data: {"model":"m","choices":[{"index":%d,"delta":%b}]}\n\n' % (index, delta.encode())


def test_tool_calls_are_merged_by_their_index() -> None:
    stream = [
        _event('{"role":"assistant","content":""}'),
        _event('{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f"}}]}'),
        _event('{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\""}}]}'),
        _event(
            '{"tool_calls":[{"index":1,"id":"b","type":"function",'
            '"function":{"name":"g","arguments":"{}"}}]}'
        ),
        _event('{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}'),
        b"data: [DONE]\n\n",
    ]

    message = json.loads(message_json(read_stream(stream).choices[0].message))

    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_reasoning_and_content_grow_apart() -> None:
    stream = [
        _event('{"reasoning":"a"}'),
        _event('{"reasoning":"b"}'),
        _event('{"content":"c"}'),
        _event('{"content":"d","reasoning":null}'),
    ]

    message = json.loads(message_json(read_stream(stream).choices[0].message))

    assert message == {"role": "assistant", "content": "cd", "reasoning": "ab"}


def test_a_stream_has_ended_only_with_done(recorded: Recorded) -> None:
    stream = recorded("whole_stream_asked.sse")

    assert read_stream([stream]).ended
    assert not read_stream([stream.replace(b"data: [DONE]\n\n", b"")]).ended


def test_the_error_event_of_a_broken_stream_is_seen() -> None:
    error = b'data: {"error":{"message":"x","type":"InternalServerError","code":500}}\n\n'

    assert read_stream([_event("{}"), error, b"data: [DONE]\n\n"]).error == "InternalServerError"


def test_comments_are_not_data(recorded: Recorded) -> None:
    stream = recorded("whole_stream_asked.sse")

    assert read_stream([b": keep-alive\n\n", stream]) == read_stream([stream])


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"choices":3}', b'{"model":1}'])
def test_what_is_no_chat_reply_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(UnreadableReplyError):
        read_whole(body)
