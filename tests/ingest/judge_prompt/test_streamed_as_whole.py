"""One sampled reply gives one record, whole or in any way of cutting it into events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ingest.judge_prompt import shown_answer, shown_trajectory
from ingest.sessions.messages import read_reply as read_said
from sidecar.capture.assemble import assemble
from sidecar.records import Assignment, Exchange, RawCapture, Timings

Json = dict[str, Any]
ROUTE = Assignment(adapter="base", arm="champion", propensity=1.0, upstream_model="m")
PROMPT = [5, 6, 7]
NAMES = ("get_weather", "get_time", "f")
ARGUMENTS = ('{"city": "Rome"}', '{"city": "Paris", "days": [1, 2]}', "{}", "", '{"city": "Ro', "{")


def record(chunks: Sequence[bytes], *, streamed: bool, surface: Any = "chat") -> Exchange:
    raw = RawCapture(
        exchange_id="ex_1",
        public_model="m",
        route=ROUTE,
        replica="",
        session_key="",
        user="",
        request=b'{"tools": [{}]}',
        reply=chunks,
        streamed=streamed,
        status=200,
        outcome="ok",
        timings=Timings(started_at=1.0),
        surface=surface,
    )
    return assemble(raw)


def same(whole: Exchange, streamed: Exchange) -> None:
    """Records, identities, and texts before the judge are equal."""
    assert streamed.choices == whole.choices
    assert streamed.prompt_ids == whole.prompt_ids
    assert streamed.completion_tokens == whole.completion_tokens
    assert streamed.untrainable_reason == whole.untrainable_reason
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        said, streamed_said = json.loads(one.message), json.loads(other.message)
        assert read_said(streamed_said).digest() == read_said(said).digest()
        for reasoning in (False, True):
            shown = shown_answer(said, show_reasoning=reasoning)
            assert shown_answer(streamed_said, show_reasoning=reasoning) == shown
            assert None not in shown.values()
        assert shown_trajectory([streamed_said]) == shown_trajectory([said])


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """A text in pieces of any length; empty ones too."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[begin:end] for begin, end in pairwise([0, *places, len(text)])]


def merged(draw: st.DrawFn, lists: Sequence[list[Any]]) -> list[Any]:
    """The lists' items in any order that keeps each list's own."""
    left = [list(one) for one in lists if one]
    found = []
    while left:
        of = left[draw(st.integers(0, len(left) - 1))]
        found.append(of.pop(0))
        left = [one for one in left if one]
    return found


@st.composite
def replies(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A reply of chat completions: its body, and the same as chunks of a stream."""
    choices: list[Json] = []
    events: list[list[Json]] = []
    for index in range(draw(st.integers(1, 3))):
        choice, of_choice = draw(choices_of(index))
        choices.append(choice)
        events.append(of_choice)
    usage = {"prompt_tokens": 3, "completion_tokens": sum(len(c["token_ids"]) for c in choices)}
    head: Json = {"id": "c", "object": "chat.completion.chunk", "model": "m"}
    stream: list[Json] = [{**head, "choices": [one]} for one in merged(draw, events)]
    stream[0]["prompt_token_ids"] = PROMPT
    if draw(st.booleans()):
        stream.append({**head, "choices": [], "usage": usage})
    else:
        stream[-1]["usage"] = usage
    body = {"model": "m", "prompt_token_ids": PROMPT, "choices": choices, "usage": usage}
    return json.dumps(body).encode(), draw(chunks_of([*map(json.dumps, stream), "[DONE]"]))


@st.composite
def chunks_of(draw: st.DrawFn, documents: Sequence[str]) -> list[bytes]:
    events = [b"data: %b\n\n" % one.encode() for one in documents]
    if draw(st.booleans()):
        return events
    stream = b"".join(events)
    places = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    return [stream[begin:end] for begin, end in pairwise([0, *places, len(stream)])]


@st.composite
def choices_of(draw: st.DrawFn, index: int) -> tuple[Json, list[Json]]:
    """A whole choice, and its events."""
    texts = st.text("a b\n", min_size=1, max_size=12)
    said = {key: draw(texts) for key in ("content", "reasoning", "refusal") if draw(st.booleans())}
    transcript = draw(st.none() | texts)
    message: Json = {"role": "assistant", "content": None, "refusal": None, **said}
    older = draw(st.booleans())
    if older and "reasoning" in said:
        message["reasoning_content"] = message.pop("reasoning")
    parts: list[list[Json]] = [
        [{"reasoning_content" if older and key == "reasoning" else key: piece} for piece in pieces]
        for key, text in said.items()
        for pieces in [cut(draw, text)]
    ]
    if transcript is not None:
        message["audio"] = {"id": "au", "transcript": transcript}
        pieces = [{"transcript": piece} for piece in cut(draw, transcript)]
        parts.append([{"audio": {"id": "au", **pieces[0]}}, *({"audio": p} for p in pieces[1:])])
    if draw(st.booleans()):
        calls, of_calls = draw(tool_calls())
        message["tool_calls"] = calls
        parts += of_calls
    elif draw(st.booleans()):
        name, arguments = draw(st.sampled_from(NAMES)), draw(st.sampled_from(ARGUMENTS))
        message["function_call"] = {"name": name, "arguments": arguments}
        parts.append(
            [{"function_call": {"name": name}}]
            + [{"function_call": {"arguments": piece}} for piece in cut(draw, arguments)]
        )
    finish = draw(st.sampled_from(("stop", "length", "tool_calls", "function_call")))
    tokens = [10 * index + place for place in range(draw(st.integers(1, 4)))]
    entries = [{"token": draw(texts), "logprob": -0.25 * place} for place, _ in enumerate(tokens)]
    deltas = merged(draw, [*parts, [{}] * draw(st.integers(1, 2))])
    deltas.insert(0, {"role": "assistant", "content": ""})
    if draw(st.booleans()):
        deltas = [{"role": "assistant", **one} for one in deltas]
    of_stream: list[Json] = [{"index": index, "delta": delta} for delta in deltas]
    at = sorted(draw(st.integers(0, len(of_stream) - 1)) for _ in tokens)
    for place, event in enumerate(of_stream):
        own = [n for n, where in enumerate(at) if where == place]
        event["token_ids"] = [tokens[n] for n in own] or None
        event["logprobs"] = {"content": [entries[n] for n in own]} if own else None
        event["finish_reason"] = draw(st.sampled_from((None, "")))
    if draw(st.booleans()):
        of_stream.append({"index": index, "delta": {}, "finish_reason": finish})
    else:
        of_stream[-1]["finish_reason"] = finish
    choice = {
        "index": index,
        "message": message,
        "finish_reason": finish,
        "token_ids": tokens,
        "logprobs": {"content": entries},
    }
    return choice, of_stream


@st.composite
def tool_calls(draw: st.DrawFn) -> tuple[list[Json], list[list[Json]]]:
    """Calls of a whole message, and lists of deltas that may come in any order of the lists."""
    number = draw(st.integers(1, 3))
    said = [
        (f"call{n}", draw(st.sampled_from(NAMES)), draw(st.sampled_from(ARGUMENTS)))
        for n in range(number)
    ]
    whole = [
        {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
        for ident, name, arguments in said
    ]
    index = draw(st.sampled_from(("own", "from one", "shared", "missing")))
    if draw(st.booleans()):  # all calls in one delta
        together = [
            one if index == "missing" else {"index": 0 if index == "shared" else n, **one}
            for n, one in enumerate(whole)
        ]
        return whole, [[{"tool_calls": together}]]
    names = draw(st.sampled_from(("once", "repeated", "pieces")))
    ids = draw(st.sampled_from(("once", "repeated", "empty")))
    lists: list[list[Json]] = []
    for n, (ident, name, arguments) in enumerate(said):
        first = ["get_", name.removeprefix("get_")] if names == "pieces" else [name]
        pieces: list[Json] = [{"name": piece} for piece in first if name != "f" or piece == "f"]
        pieces += [
            {"arguments": piece, **({"name": name} if names == "repeated" else {})}
            for piece in cut(draw, arguments)
        ]
        deltas: list[Json] = [{"function": piece} for piece in pieces]
        for place, delta in enumerate(deltas):
            if place == 0 or ids == "repeated":
                delta["id"], delta["type"] = ident, "function"
            elif ids == "empty":
                delta["id"] = ""
            if index != "missing":
                delta["index"] = {"own": n, "from one": n + 1, "shared": 0}[index]
        lists.append([{"tool_calls": [delta]} for delta in deltas])
    if index in ("own", "from one"):
        return whole, lists
    return whole, [[delta for one in lists for delta in one]]


@settings(max_examples=60, derandomize=True)
@given(reply=replies())
def test_a_chat_reply_gives_one_record_however_it_is_cut(reply: tuple[bytes, list[bytes]]) -> None:
    body, chunks = reply

    same(record([body], streamed=False), record(chunks, streamed=True))


def _calls(*deltas: Json) -> list[Any]:
    events = [{"model": "m", "choices": [{"delta": {"tool_calls": [one]}}]} for one in deltas]
    chunks = [b"data: %b\n\n" % json.dumps(one).encode() for one in events]
    (choice,) = record(chunks, streamed=True).choices
    calls = json.loads(choice.message)["tool_calls"]
    return [(one["id"], *one["function"].values()) for one in calls]


def test_calls_under_one_index_are_told_apart_without_ids() -> None:
    rome, paris = '{"city": "Rome"}', '{"city": "Paris"}'
    first = {"index": 0, "function": {"name": "get_weather", "arguments": rome}}

    # another name behind arguments; the same name with arguments behind whole ones
    other = {"index": 0, "function": {"name": "get_time", "arguments": "{}"}}
    again = {"index": 0, "function": {"name": "get_weather", "arguments": paris}}
    assert _calls(first, other) == [(None, "get_weather", rome), (None, "get_time", "{}")]
    assert _calls(first, again) == [(None, "get_weather", rome), (None, "get_weather", paris)]
    # a brace too much, as a parser sends it, begins none
    assert _calls(first, {"index": 0, "function": {"arguments": "}"}}) == [
        (None, "get_weather", rome + "}")
    ]


def test_a_call_goes_on_under_its_id_when_another_came_between() -> None:
    def piece(ident: str, arguments: str, **named: str) -> Json:
        return {"index": 0, "id": ident, "function": {"arguments": arguments, **named}}

    calls = _calls(piece("a", "{", name="f"), piece("b", "{", name="f"), piece("a", "}"))

    assert calls == [("a", "f", "{}"), ("b", "f", "{")]


def test_calls_of_a_whole_message_are_never_merged() -> None:
    call = {"index": 0, "id": "x", "function": {"name": "f", "arguments": {"a": 1}}}
    body = {"model": "m", "choices": [{"message": {"tool_calls": [call, call]}}]}

    (choice,) = record([json.dumps(body).encode()], streamed=False).choices

    one = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [one, one]}
    assert json.loads(choice.message) == said


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ({}, ""),
        ({"content": ""}, ""),
        ({"content": None, "refusal": "", "tool_calls": [], "audio": None}, ""),
        ({"content": "", "refusal": "no"}, None),
        ({"content": "", "audio": {"transcript": "yes"}}, None),
        ({"reasoning": "hm"}, ""),
    ],
)
def test_content_is_null_beside_what_is_said_elsewhere(said: Json, content: str | None) -> None:
    body = {"model": "m", "choices": [{"message": said}]}

    (choice,) = record([json.dumps(body).encode()], streamed=False).choices

    assert json.loads(choice.message)["content"] == content


TOKENS = ["Let", " me", "<tool_call>", '{"name"', "<|im_end|>"]


@pytest.mark.parametrize(
    ("shown", "finish", "withheld"),
    [
        (2, "length", '<tool_call>{"name"<|im_end|>'),
        (2, "stop", '<tool_call>{"name"'),
        (0, "length", 'Let me<tool_call>{"name"<|im_end|>'),
        (4, "stop", None),
        (5, "length", None),
    ],
)
def test_what_a_parser_kept_back_is_judged(shown: int, finish: str, withheld: str | None) -> None:
    """As vLLM 47903: nothing of a cut call is streamed; in a whole reply it is content."""
    entries = [{"token": token, "logprob": -0.5} for token in TOKENS]
    choice = {
        "finish_reason": finish,
        "token_ids": [1, 2, 3, 4, 5],
        "logprobs": {"content": entries},
    }
    served = "".join(TOKENS[:shown])
    body = {
        "model": "m",
        "prompt_token_ids": PROMPT,
        "choices": [{**choice, "delta": {"content": served}}],
    }

    exchange = record([b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(body).encode()], streamed=True)

    message = json.loads(exchange.choices[0].message)
    assert exchange.untrainable_reason is None
    assert (message["content"], message.get("withheld")) == (served, withheld)
    assert read_said(message).digest() == read_said({"content": served}).digest()
    assert shown_answer(message) == {"content": served + (withheld or "")}


def test_a_refusal_in_a_cut_responses_stream_is_a_refusal() -> None:
    events = [
        {"type": "response.created", "response": {"model": "m"}},
        {"type": "response.refusal.delta", "output_index": 0, "delta": "I can"},
        {"type": "response.refusal.delta", "output_index": 0, "delta": "not."},
    ]
    chunks = [b"data: %b\n\n" % json.dumps(one).encode() for one in events]

    (choice,) = record(chunks, streamed=True, surface="responses").choices

    said = {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert json.loads(choice.message) == said
