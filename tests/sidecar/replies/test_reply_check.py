"""Text and tokens must say the same, with what a tokenizer and a parser may change granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sidecar.replies.check import read_reply, text_agrees, untrainable, withheld
from sidecar.replies.parts import ReadChoice

Recorded = Callable[[str], bytes]


def _choice(content: str | None, texts: list[str], **changes: Any) -> ReadChoice:
    message = {"role": "assistant", "content": content, **changes.pop("message", {})}
    return ReadChoice(message=message, token_texts=texts, **changes)


@pytest.mark.parametrize(
    ("choice", "agrees"),
    [
        (_choice("Hello you", ["Hello", " you"]), True),
        (_choice("Hello you", ["Hello", " me"]), False),
        (_choice("Hello you", ["Hello"]), False),
        (_choice("Hello", ["Hello", " you"], finish_reason="length"), False),
        (_choice("", ["Hello"], finish_reason="length"), False),
        # characters over several tokens: vLLM gives the text with the token that completes it
        (_choice("Hi 🌍", ["Hi", "", "", " 🌍"]), True),
        (_choice("Hi \ufffd", ["Hi", " ", "", ""], finish_reason="length"), True),
        # the end token, a stop token, a stop string
        (_choice("Hello", ["Hello", "<|im_end|>"], finish_reason="stop"), True),
        (_choice("", ["<|im_end|>"], finish_reason="stop"), True),
        (_choice(None, ["<|im_end|>"], finish_reason="stop"), True),
        (_choice("Hello", ["Hello", "<|a|>"], finish_reason="stop", stop_reason=9), True),
        (_choice("Hello", ["Hello", " you", "<|im_end|>"], finish_reason="stop"), False),
        (_choice("Hello", ["Hello", "<|im_end|>"], finish_reason="length"), False),
        (_choice("is ", ["is", " Paris"], finish_reason="stop", stop_reason="Paris"), True),
        (_choice("is Paris", ["is", " Paris."], finish_reason="stop", stop_reason="Paris"), True),
        (_choice("is ", ["is", " Rome"], finish_reason="stop", stop_reason="Paris"), False),
        (_choice("a", ["a", "\n\n"], finish_reason="stop", stop_reason="\n\n"), True),
        (_choice("a", ["a", "b", "\n\n"], finish_reason="stop", stop_reason="\n\n"), False),
        # SentencePiece: a token decoded alone has lost the space before it
        (_choice("Hello you", ["Hello", "you"]), True),
        (_choice("Hello you", ["Hello", "you", "</s>"], finish_reason="stop"), True),
        (_choice("Hello you", ["Hello", "me"]), False),
        # a special token inside the text is not granted
        (_choice("ab", ["a", "<|x|>", "b"]), False),
        # asked for as ids
        (_choice("ab", ["token_id:7", "token_id:8"], token_ids=(7, 8)), True),
        (_choice("ab", ["token_id:7", "token_id:9"], token_ids=(7, 8)), False),
        (_choice("ab", []), True),
    ],
)
def test_plain_text_must_be_the_tokens_joined(choice: ReadChoice, agrees: bool) -> None:
    assert text_agrees(choice, tools=False) is agrees


CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "content", "texts", "agrees"),
    [
        ({"tool_calls": [CALL]}, None, ["<tool_call>", '{"name": "get_', "weather", '"}'], True),
        ({"tool_calls": [CALL]}, None, ["<tool_call>", '{"name": "get_', '"}'], False),
        ({"tool_calls": [CALL]}, "So:", ["So", ": ", "get_weather", "()"], True),
        ({"tool_calls": [CALL]}, "So:", [": ", "get_weather", "()"], False),
        ({"reasoning": "I think"}, "Yes", ["<think>", "\nI", " think", "</think>", "Yes"], True),
        ({"reasoning": "I think"}, "Yes", ["<think>", "\nI", " th", "</think>", "Yes"], False),
        ({"reasoning": "I think"}, "Yes", ["<think>", "\nI", " think", "</think>"], False),
    ],
)
def test_of_a_parsed_message_each_part_must_stand_in_what_was_sampled(
    message: dict[str, Any], content: str | None, texts: list[str], agrees: bool
) -> None:
    assert text_agrees(_choice(content, texts, message=message), tools=False) is agrees


@pytest.mark.parametrize(
    "name",
    [
        "whole_reply_asked.json",
        "whole_stream_asked.sse",
        "two_reply_asked.json",
        "two_stream_asked.sse",
        "tools_reply_asked.json",
        "tools_stream_asked.sse",
        "stop_reply.json",
        "stop_stream.sse",
    ],
)
def test_what_vllm_really_sends_can_be_learned_from(name: str, recorded: Recorded) -> None:
    reply = read_reply("chat", [recorded(name)], streamed=name.endswith(".sse"))

    assert untrainable(reply, "chat", "smollm2-135m") is None


def test_a_token_that_a_stream_lost_with_its_text_is_found(recorded: Recorded) -> None:
    """As vLLM 27482: an event without the ids and log-probabilities of what it says."""
    stream = recorded("whole_stream_asked.sse")
    events = stream.split(b"\n\n")
    place = next(n for n, event in enumerate(events) if b'"content":" I"' in event)
    head, _, _ = events[place].partition(b',"logprobs"')
    events[place] = head + b',"logprobs":null,"finish_reason":null,"token_ids":null}]}'

    reply = read_reply("chat", [b"\n\n".join(events)], streamed=True)

    assert reply.completion_tokens is None  # nothing else would tell
    assert untrainable(reply, "chat", "smollm2-135m") == "text_mismatch"


@pytest.mark.parametrize(
    ("choice", "agrees", "rest"),
    [
        (_choice("", ["<tool", "_call>"], finish_reason="length"), True, "<tool_call>"),
        (_choice("So ", ["So", " ", "{", "<|e|>"], finish_reason="stop"), True, "{"),
        (_choice("So", ["So", " [", "END"], finish_reason="stop", stop_reason="END"), True, " ["),
        (_choice("So", ["No", " ["], finish_reason="length"), False, ""),
        (_choice("So it", ["So"], finish_reason="length"), False, ""),
        (_choice("So", ["So", "<|e|>"], finish_reason="stop"), True, ""),
    ],
)
def test_where_tools_are_offered_the_text_may_be_a_beginning(
    choice: ReadChoice, agrees: bool, rest: str
) -> None:
    assert text_agrees(choice, tools=True) is agrees
    assert withheld(choice) == rest
