"""Replies of completions, responses and messages, as a vLLM 0.32 sent them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.records import Surface
from sidecar.replies.check import read_reply, untrainable
from sidecar.replies.parts import ReadReply, UnreadableReplyError, message_json

Recorded = Callable[[str], bytes]


def _whole(surface: Surface, body: bytes) -> ReadReply:
    return read_reply(surface, [body], streamed=False)


def _stream(surface: Surface, body: bytes) -> ReadReply:
    return read_reply(surface, [body], streamed=True)


def _message(reply: ReadReply, index: int = 0) -> Any:
    return json.loads(message_json(reply.choices[index].message))


@pytest.mark.parametrize(
    "name",
    [
        "completions",
        "completions_two",
        "completions_list",
        "completions_stop",
        "responses",
        "responses_tools",
        "messages",
    ],
)
def test_a_stream_reads_like_the_whole_reply(name: str, recorded: Recorded) -> None:
    surface: Any = name.partition("_")[0]
    whole = _whole(surface, recorded(f"{name}_reply.json"))
    stream = _stream(surface, recorded(f"{name}_stream.sse"))

    assert whole.ended
    assert stream.ended
    assert stream.models == whole.models == {"smollm2-135m"}
    assert stream.completion_tokens in (None, whole.completion_tokens)
    assert (stream.prompt_ids, stream.several_prompts) == (
        whole.prompt_ids,
        whole.several_prompts,
    )
    assert stream.choices.keys() == whole.choices.keys()
    for index, choice in whole.choices.items():
        streamed = stream.choices[index]
        assert (streamed.token_ids, streamed.logprobs) == (choice.token_ids, choice.logprobs)
        assert (streamed.finish_reason, streamed.stop_reason, streamed.token_texts) == (
            choice.finish_reason,
            choice.stop_reason,
            choice.token_texts,
        )
        message = _message(whole, index)
        if "tool_calls" in message:  # the stream is what was sampled, the whole is written anew
            for reply in (stream, whole):
                call = _message(reply, index)["tool_calls"][0]
                assert call["function"]["name"] == "get_weather"
                assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        else:
            assert _message(stream, index) == message


@pytest.mark.parametrize(
    ("name", "chunk_bytes"),
    [(name, size) for name in ("completions", "responses", "messages") for size in (1, 7, 1000)],
)
def test_a_stream_may_be_cut_anywhere(name: str, chunk_bytes: int, recorded: Recorded) -> None:
    surface: Any = name
    body = recorded(f"{name}_stream.sse")
    chunks = [body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes)]

    assert read_reply(surface, chunks, streamed=True) == _stream(surface, body)


def test_a_completion_has_ids_and_log_probabilities(recorded: Recorded) -> None:
    reply = _whole("completions", recorded("completions_reply.json"))

    choice = reply.choices[0]
    assert choice.token_ids == (7042, 30, 198, 198, 504)
    assert choice.logprobs[0] == -0.2692539393901825
    assert choice.token_texts == [" Paris", ".", "\n", "\n", "The"]
    assert reply.prompt_ids == b"[504,3575,282,4649,314]"
    assert message_json(choice.message) == rb'{"role":"assistant","content":" Paris.\n\nThe"}'
    assert untrainable(reply, "completions", "smollm2-135m") is None


def test_the_echoed_prompts_log_probabilities_are_not_taken_for_the_answers() -> None:
    body = (
        b'{"model":"m","choices":[{"text":"b","token_ids":[2],"prompt_token_ids":[1],"logprobs":'
        b'{"tokens":["a","b"],"token_logprobs":[null,-0.5]}}],"usage":{"completion_tokens":1}}'
    )

    assert untrainable(_whole("completions", body), "completions", "m") == "text_mismatch"
    two = body.replace(b"null", b"-0.1")
    assert untrainable(_whole("completions", two), "completions", "m") == "count_mismatch"


def test_the_input_of_a_tool_use_is_merged_from_its_pieces(recorded: Recorded) -> None:
    reply = _stream("messages", recorded("messages_tools_stream.sse"))

    (call,) = _message(reply)["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert call["id"] == "chatcmpl-tool-0000000000000000"
    assert call["function"]["arguments"].startswith('{\n  "type": "function"')
    assert reply.choices[0].finish_reason == "length"


def test_a_whole_message_of_every_kind_of_block() -> None:
    body = json.dumps(
        {
            "model": "m",
            "stop_reason": "tool_use",
            "usage": {"output_tokens": 3},
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Bern"}},
            ],
        }
    ).encode()

    reply = _whole("messages", body)

    assert reply.choices[0].finish_reason == "tool_calls"
    assert _message(reply) == {
        "role": "assistant",
        "content": "so",
        "reasoning": "hm",
        "tool_calls": [
            {
                "id": "t1",
                "type": "function",
                "function": {"name": "f", "arguments": '{"city": "Bern"}'},
            }
        ],
    }


def test_a_whole_response_of_every_kind_of_item() -> None:
    body = json.dumps(
        {
            "model": "m",
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "output": [
                {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
                {"type": "message", "content": [{"type": "output_text", "text": "so"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            ],
        }
    ).encode()

    reply = _whole("responses", body)

    assert reply.choices[0].finish_reason == "length"
    assert _message(reply) == {
        "role": "assistant",
        "content": "so",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }


@pytest.mark.parametrize(
    ("name", "up_to", "said"),
    [
        ("responses", b'"delta":" capital"', "The"),
        ("responses", b"event: response.completed", "The capital of France is Paris."),
        ("messages", b'"text":" capital"', "The"),
        ("messages", b"event: message_stop", "The capital of France is Paris."),
        ("completions", b'"text":"\\n"', " Paris."),
    ],
)
def test_of_a_stream_that_was_cut_what_came_is_kept(
    name: str, up_to: bytes, said: str, recorded: Recorded
) -> None:
    surface: Any = name
    body = recorded(f"{name}_stream.sse")

    reply = _stream(surface, body[: body.index(up_to)])

    assert not reply.ended
    assert _message(reply)["content"] == said


@pytest.mark.parametrize(
    ("surface", "event"),
    [
        ("completions", b'data: {"error": {"message": "x", "type": "InternalServerError"}}\n\n'),
        ("messages", b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n'),
        ("responses", b'event: error\ndata: {"type":"error","message":"x"}\n\n'),
        ("responses", b'data: {"type":"response.failed","response":{"status":"failed"}}\n\n'),
    ],
)
def test_the_error_event_of_each_surface_is_seen(surface: Surface, event: bytes) -> None:
    assert _stream(surface, event).error is not None


@pytest.mark.parametrize("surface", ["completions", "responses", "messages", "embeddings"])
def test_what_is_no_reply_of_the_surface_is_unreadable(surface: Surface) -> None:
    with pytest.raises(UnreadableReplyError):
        _whole(surface, b"<html>")


@pytest.mark.parametrize(
    ("surface", "event"),
    [
        ("responses", b'{"type":"response.output_text.delta","output_index":1048576,"delta":"x"}'),
        ("messages", b'{"type":"content_block_delta","index":0,"delta":{"text":"x"}}'),
        ("messages", b'{"type":"content_block_start","index":-1,"content_block":{"type":"text"}}'),
        ("chat", b'{"choices":[{"delta":{"tool_calls":[{"index":1000000000}]}}]}'),
        ("chat", b'{"choices":[{"delta":{"tool_calls":[{"index":"0"}]}}]}'),
        ("chat", b'{"choices":[{"delta":{"tool_calls":{"index":0}}}]}'),
        ("chat", b'{"choices":[{"delta":{"tool_calls":[7]}}]}'),
        ("chat", b'{"choices":[{"delta":{"tool_calls":[{"function":7}]}}]}'),
        ("chat", b'{"choices":[{"delta":{"content":' + b"[" * 100_000 + b"}}]}"),
        ("chat", b'{"id":' + b"[" * 100_000 + b"}"),
    ],
)
def test_nonsense_in_an_event_is_unreadable_and_costs_no_memory(
    surface: Surface, event: bytes
) -> None:
    with pytest.raises(UnreadableReplyError):
        _stream(surface, b"data: " + event + b"\n\n")


def test_what_msgspec_refuses_is_read_the_slow_way() -> None:
    body = (
        b'{"model":"m","prompt_token_ids":[1],"choices":[{"message":{"content":"\\ud800!"},'
        b'"token_ids":[7],"logprobs":{"content":[{"token":"!","logprob":NaN}]}}]}'
    )

    reply = _whole("chat", body)

    assert untrainable(reply, "chat", "m") == "logprobs_not_finite"
    assert message_json(reply.choices[0].message) == b'{"role":"assistant","content":"?!"}'


def test_an_event_longer_than_a_block_is_put_together() -> None:
    text = "x" * 300_000
    event = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode()
    body = event + b"data: [DONE]\r\n\r\n"
    chunks = [body[at : at + 4096] for at in range(0, len(body), 4096)]

    reply = read_reply("chat", chunks, streamed=True)

    assert reply.ended
    assert reply.choices[0].message["content"] == text


def test_a_completion_of_several_prompts_says_so(recorded: Recorded) -> None:
    reply = _stream("completions", recorded("completions_list_stream.sse"))

    assert reply.several_prompts
    assert untrainable(reply, "completions", "smollm2-135m") == "several_prompts"
