"""Best of N, the reply's side: one of N, whole and as a stream, against recorded replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage

from sidecar.relay.best_of import UnreadableAnswersError, read_answers, stream_reply, whole_reply
from sidecar.relay.reply_edit import STRIP_NOTHING, Strip
from sidecar.replies.choices import read_stream, read_whole
from sidecar.replies.parts import message_json

ALL = Strip(token_ids=True, logprobs=True)
Recorded = Callable[[str], bytes]
PLAIN_STREAMS = ("whole_stream_plain", "two_stream_plain", "tools_stream_plain")


def events(stream: bytes) -> list[Any]:
    """The events but for `[DONE]`, which must end it."""
    *found, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in found]


def reply(*choices: dict[str, Any], **top: Any) -> bytes:
    """A reply as vLLM writes one, with these choices."""
    filled = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "x"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [1],
            **choice,
        }
        for index, choice in enumerate(choices)
    ]
    usage = {"prompt_tokens": 5, "total_tokens": 5 + len(choices), "completion_tokens": 2}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": filled}
    body |= {"usage": usage, "prompt_token_ids": [3, 4], **top}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def called(recorded: Recorded) -> dict[str, Any]:
    """A recorded choice with a tool call, without its index."""
    (choice,) = json.loads(recorded("called_reply_plain.json"))["choices"]
    return {key: value for key, value in choice.items() if key != "index"}


@pytest.mark.parametrize("picked", [0, 1])
def test_the_whole_reply_is_the_plain_one_with_one_choice_left(
    picked: int, recorded: Recorded
) -> None:
    answers = read_answers(recorded("two_reply_asked.json"), 2)

    out = whole_reply(answers, picked, ALL)

    plain = recorded("two_reply_plain.json")
    start, end = plain.index(b'"choices":[') + 11, plain.index(b'],"service_tier"')
    first, second = plain[start:end].split(b',{"index":1,')
    kept = first if picked == 0 else b'{"index":0,' + second
    expected = plain[:start] + kept + plain[end:]
    expected = expected.replace(
        b'"total_tokens":50,"completion_tokens":16', b'"total_tokens":42,"completion_tokens":8'
    )
    assert out == expected


def function_calls(message: ChatCompletionMessage) -> list[tuple[str, str, str]]:
    calls = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        calls.append((call.id, call.function.name, call.function.arguments))
    return calls


def test_openais_client_puts_the_stream_together_to_the_whole_message(recorded: Recorded) -> None:
    call = called(recorded)
    body = reply({"message": {"role": "assistant", "content": 'Say "hi" 🌍\n'}}, call)
    answers = read_answers(body, 2)
    for picked in (0, 1):
        state = ChatCompletionStreamState()
        for event in events(
            stream_reply(answers, picked, ALL, include_usage=True, continuous_usage=False)
        ):
            state.handle_chunk(ChatCompletionChunk.model_validate(event))

        streamed = state.current_completion_snapshot
        whole = ChatCompletion.model_validate_json(whole_reply(answers, picked, ALL))
        said, meant = streamed.choices[0].message, whole.choices[0].message
        assert (said.role, said.content or "") == (meant.role, meant.content or "")
        assert function_calls(said) == function_calls(meant)
        assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
        assert streamed.usage == whole.usage


def skeleton(value: Any) -> Any:
    """The keys of an event in their order, without its values."""
    if isinstance(value, dict):
        return [(key, skeleton(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [skeleton(inner) for inner in value[:1]]
    return None


def test_every_event_has_the_keys_of_one_that_vllm_sends_in_their_order(recorded: Recorded) -> None:
    names = (*PLAIN_STREAMS, "usage_stream_plain")
    real = [skeleton(event) for name in names for event in events(recorded(f"{name}.sse"))]
    call = called(recorded)
    text = {"message": {"role": "assistant", "content": "text", "tool_calls": []}}
    body = reply(text, call, system_fingerprint="f", prompt_text=None)

    for picked in (0, 1):
        for include_usage in (False, True):
            made = events(
                stream_reply(
                    read_answers(body, 2),
                    picked,
                    ALL,
                    include_usage=include_usage,
                    continuous_usage=False,
                )
            )
            without_sign = [skeleton(event) for event in made]
            if include_usage:  # the recorded end with `delta: {}` is of a stream without usage
                end = dict(made[-2])
                without_sign[-2] = skeleton({**end, "system_fingerprint": "f"})
            assert [one for one in without_sign if one not in real] == []


def test_usage_in_every_event_has_vllms_shape(recorded: Recorded) -> None:
    real = {
        json.dumps(skeleton(event["usage"]))
        for event in events(recorded("usage_stream_continuous.sse"))
    }
    body = reply({}, {"token_ids": [1, 2, 3]})

    made = events(
        stream_reply(read_answers(body, 2), 1, ALL, include_usage=True, continuous_usage=True)
    )

    assert {json.dumps(skeleton(event["usage"])) for event in made} == real
    tokens = [event["usage"]["completion_tokens"] for event in made]
    totals = [event["usage"]["total_tokens"] for event in made]
    assert (tokens, totals) == ([0, 3, 3, 3], [5, 8, 8, 8])


def test_the_usage_is_that_of_the_returned_answer() -> None:
    details = {"cached_tokens": 4, "created_tokens": None}
    usage = {
        "prompt_tokens": 5,
        "total_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    body = reply({"token_ids": [1]}, {"token_ids": [1, 2, 3]}, usage=usage)
    answers = read_answers(body, 2)

    whole = json.loads(whole_reply(answers, 1, ALL))["usage"]
    *_, last = events(stream_reply(answers, 1, ALL, include_usage=True, continuous_usage=False))

    assert whole == usage | {
        "total_tokens": 8,
        "completion_tokens": 3,
        "completion_tokens_details": None,
    }
    assert last["usage"] == {
        "prompt_tokens": 5,
        "total_tokens": 8,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_choices_are_told_by_their_index_and_not_by_their_place() -> None:
    body = reply({"index": 1, "token_ids": [1, 2]}, {"index": 0, "token_ids": [7]})

    answers = read_answers(body, 2)

    assert answers.tokens == (1, 2)
    assert json.loads(whole_reply(answers, 0, STRIP_NOTHING))["choices"][0]["token_ids"] == [7]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'{"error":{"message":"x"}}',
        b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}',
        reply({}),
        reply({}, {}, {}),
        reply({"index": 0}, {"index": 0}),
        reply({}, {}).replace(b'"usage"', b'"usage_"'),
        reply({}, {}).replace(b'"created":1', b'"created":NaN'),
    ],
)
def test_what_is_not_n_answers_is_said_to_be_unreadable(body: bytes) -> None:
    with pytest.raises(UnreadableAnswersError):
        read_answers(body, 2)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": TEXTS,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS}),
        }
    ),
    max_size=3,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | TEXTS, "refusal": st.none() | TEXTS},
    optional={"tool_calls": CALLS, "reasoning": st.none() | TEXTS},
)
CHOICES = st.fixed_dictionaries(
    {
        "message": MESSAGES,
        "finish_reason": st.sampled_from(["stop", "length", "tool_calls"]),
        "stop_reason": st.none() | st.integers(0, 9) | TEXTS,
        "token_ids": st.lists(st.integers(0, 50_000), max_size=4),
        "logprobs": st.none()
        | st.fixed_dictionaries(
            {
                "content": st.lists(
                    st.fixed_dictionaries({"token": TEXTS, "logprob": st.floats(-20, 0)}),
                    max_size=3,
                )
            }
        ),
    }
)


def said(read: Any) -> Any:
    """What a client puts together from a reply, whole or streamed."""
    assert read.ended
    (choice,) = read.choices.values()
    message = json.loads(message_json(choice.message))
    message["content"] = message["content"] or ""  # a stream's first event says "" for null
    empty = [key for key, value in message.items() if key != "content" and value == ""]
    for key in empty:  # events are not sent for nothing
        del message[key]
    return (
        message,
        choice.finish_reason,
        choice.token_ids,
        choice.logprobs,
        read.completion_tokens,
        read.models,
        read.prompt_ids,
    )


@given(st.lists(CHOICES, min_size=2, max_size=4), st.data(), st.booleans())
def test_the_stream_says_what_the_whole_reply_says(
    choices: list[dict[str, Any]], data: st.DataObject, asked: bool
) -> None:
    picked = data.draw(st.integers(0, len(choices) - 1))
    strip = STRIP_NOTHING if asked else ALL
    answers = read_answers(reply(*choices), len(choices))

    whole = read_whole(whole_reply(answers, picked, strip))
    stream = stream_reply(answers, picked, strip, include_usage=True, continuous_usage=False)

    assert said(read_stream([stream])) == said(whole)
    assert list(said(whole)[2]) == (choices[picked]["token_ids"] if asked else [])
    assert whole.completion_tokens == len(choices[picked]["token_ids"])
