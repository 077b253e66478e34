"""An event that the template edits becomes what reading it as JSON would make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from sidecar.relay.reply import LESSONS, EventBody
from sidecar.relay.reply_edit import STRIP_USUAL, _cuts, _replace, strip_event, strip_reply
from sidecar.relay.reply_parser import EventSplitter
from sidecar.relay.template import EventShape, learn_shape

Recorded = Callable[[str], bytes]
DONE = b"data: [DONE]\n\n"


def member_by_member(reply: bytes) -> bytes:
    """A whole reply, edited the slow way."""
    return _replace(reply, _cuts(reply, 0, len(reply), STRIP_USUAL)[0])


def each_carefully(stream: bytes) -> bytes:
    """A stream, edited event by event."""
    splitter = EventSplitter()
    events = splitter.feed(stream)
    return b"".join(strip_event(event, STRIP_USUAL) for event in events) + splitter.rest()


# -- as vLLM writes them

MARKS = (
    *(',"logprobs":{"content":[', '"top_logprobs":[]}]},"finish_reason":null,"token_ids":['),
    *('"top_logprobs":[]}]}', ',"token_ids":[1,2]', ',"prompt_token_ids":[3]', '"delta":{}'),
    *('"', "\\", '\\"', "]", "}]}", "{", "]}]}\n\ndata: ", "\n\n", "\r\n", "null", "\0", "é", "🌱"),
)
TEXTS = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=4)), max_size=5).map("".join)
IDS = st.lists(st.integers(0, 200_000), max_size=4)


def token(text: str, top: bool = False) -> dict[str, Any]:
    written = {"token": text, "logprob": -1.5e-05, "bytes": [*text.encode()[:4]]}
    others = [{"token": text, "logprob": -0.5, "bytes": None}] if top else []
    return {**written, "top_logprobs": others}


TWIN = "#2"
"""Behind the name of a member that comes a second time; it is not written."""


def written(value: Any, ascii_only: bool = False) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only)
    return text.replace(f'{TWIN}":', '":').encode()


OURS_AGAIN: list[dict[str, Any]] = [
    {f"logprobs{TWIN}": {"content": [token("a")]}},
    {f"logprobs{TWIN}": {"content": [token("a")], "refusal": None}},
    {f"logprobs{TWIN}": {"content": []}},
    {f"logprobs{TWIN}": [1]},
    {f"logprobs{TWIN}": None},
    {"prompt_token_ids": [4, 5]},
    {"prompt_token_ids": None},
    {f"token_ids{TWIN}": [6]},
    {f"token_ids{TWIN}": "6"},
    {"x": 1},
    {"x": {"logprobs": {"content": [token("a")]}, "finish_reason": None, "token_ids": [5]}},
]
"""What may stand between a choice's text and its log-probabilities, or behind them."""
INSIDE: list[dict[str, Any]] = [
    {"refusal": None},
    {"refusal": [token("a")]},
    {"refusal": []},
    {"x": {"content": [token("a")]}},
]
"""What may stand behind the list in the log-probabilities."""


def one_of(members: list[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly nothing."""
    return st.one_of(st.just({}), st.just({}), st.sampled_from(members))


def event(value: Any, ascii_only: bool = False) -> bytes:
    return b"data: " + written(value, ascii_only) + b"\n\n"


def delta_event(
    delta: Any = None,
    *,
    tokens: tuple[str, ...] = ("a",),
    ids: tuple[int, ...] = (7,),
    finish: str | None = None,
    before: dict[str, Any] | None = None,
    inside: dict[str, Any] | None = None,
    between: dict[str, Any] | None = None,
    behind: dict[str, Any] | None = None,
    index: int = 0,
) -> dict[str, Any]:
    """One event of a chat stream, as vLLM writes it. before: members before the log-probabilities.
    inside: in them. between: behind them. behind: members behind the choices."""
    choice: dict[str, Any] = {
        "index": index,
        "delta": {"content": "a"} if delta is None else delta,
        **(before or {}),
        "logprobs": {"content": [token(text) for text in tokens], **(inside or {})},
        **(between or {}),
        "finish_reason": finish,
        **({} if finish is None else {"stop_reason": None}),
        "token_ids": [*ids],
    }
    return {"id": "1", "model": "m", "choices": [choice], **(behind or {})}


USUAL_EVENT = event(delta_event())


def learned(sample: bytes = USUAL_EVENT) -> EventShape:
    shape = learn_shape(sample, strip_event(sample, STRIP_USUAL))
    assert shape is not None
    return shape


# -- events


ODD_EVENTS = {
    "finish": delta_event(finish="stop"),
    "held back": delta_event(delta={}),
    "empty ids": delta_event(ids=()),
    "no log-probabilities": delta_event(tokens=()),
    "usage": delta_event(behind={"usage": {"total_tokens": 3}}),
    "usage alone": {"id": "1", "model": "m", "choices": [], "usage": {"total_tokens": 3}},
    "prompt ids": delta_event(behind={"prompt_token_ids": [1, 2]}),
    "a member between": delta_event(between={"x": 1}),
    "a list between": delta_event(between={"x": [{"top_logprobs": []}]}),
    "the same end between": delta_event(between={"x": {"y": [{"top_logprobs": []}]}}),
    "another choice": delta_event(index=1),
    "another id": {**delta_event(), "id": "2"},
    "ids of no numbers": delta_event(ids=("1",)),  # type: ignore[arg-type]
    **{f"again {number}": delta_event(before=said) for number, said in enumerate(OURS_AGAIN)},
    **{f"inside {number}": delta_event(inside=said) for number, said in enumerate(INSIDE)},
    "in the delta": delta_event({"content": "a", "logprobs": {"content": [token("a")]}}),
    "prompt ids in the delta": delta_event({"content": "a", "prompt_token_ids": [1]}),
}


@pytest.mark.parametrize("name", ODD_EVENTS)
def test_an_odd_event_is_left_to_the_careful_way(name: str) -> None:
    assert learned().strip(event(ODD_EVENTS[name])) is None


@st.composite
def events(draw: st.DrawFn) -> bytes:
    if not draw(st.integers(0, 6)):
        odd = [*map(event, ODD_EVENTS.values()), DONE, b": ping\n\n", b"data: {}\r\n\r\n"]
        return draw(st.sampled_from(odd))
    text = draw(TEXTS)
    call = {"index": 0, "function": {"arguments": text}}
    value = delta_event(
        draw(
            st.sampled_from(
                [{"content": text}, {"reasoning": text}, {"content": None, "tool_calls": [call]}]
            )
        ),
        tokens=tuple(draw(st.lists(TEXTS, min_size=1, max_size=2))),
        ids=tuple(draw(IDS)),
        before=draw(one_of(OURS_AGAIN)),
        inside=draw(one_of(INSIDE)),
        between=draw(one_of(OURS_AGAIN)),
        behind=draw(one_of([*OURS_AGAIN, {"usage": {"total_tokens": 1}}])),
    )
    if not draw(st.integers(0, 4)):
        another = delta_event({"content": text}, inside=draw(one_of(INSIDE)), index=1)
        value["choices"].insert(draw(st.integers(0, 1)), another["choices"][0])
    return event(value, draw(st.booleans()))


@settings(max_examples=100)
@given(st.lists(events(), min_size=2, max_size=5))
def test_whatever_is_said_in_events_the_short_way_gives_what_the_careful_one_gives(
    sent: list[bytes],
) -> None:
    shapes = [learn_shape(one, strip_event(one, STRIP_USUAL)) for one in sent]

    for shape in [learned(), *(shape for shape in shapes if shape is not None)]:
        for first, second in pairwise(sent):
            assert shape.strip(first) in (None, strip_event(first, STRIP_USUAL))
            assert shape.strip(first + second) in (None, each_carefully(first + second))


@settings(max_examples=80)
@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3), IDS.filter(len), st.booleans())
def test_whatever_is_said_a_usual_event_is_a_usual_one(
    text: str, tokens: list[str], ids: list[int], ascii_only: bool
) -> None:
    value = delta_event({"content": text}, tokens=tuple(tokens), ids=tuple(ids))
    sent = event(value, ascii_only)

    assert learned().strip(sent) == strip_event(sent, STRIP_USUAL)
    assert learned(sent).strip(USUAL_EVENT) == strip_event(USUAL_EVENT, STRIP_USUAL)


# -- streams


def fed(body: EventBody, pieces: list[bytes]) -> bytes:
    return b"".join([*map(body.feed, pieces), body.end()])


@pytest.mark.parametrize("name", ["whole", "tools", "two"])
@settings(max_examples=40, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_a_recorded_stream_cut_anywhere_is_the_stream_edited_event_by_event(
    name: str, data: st.DataObject, recorded: Recorded
) -> None:
    stream = recorded(f"{name}_stream_asked.sse")
    ends, at = [0], 0
    for one in EventSplitter().feed(stream):
        at += len(one)
        ends.append(at)
    kept = data.draw(st.lists(st.booleans(), min_size=len(ends), max_size=len(ends)))
    cuts = {end for end, keep in zip(ends, kept, strict=True) if keep}
    cuts.update(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    pieces = [stream[a:b] for a, b in pairwise([0, *sorted(cuts), len(stream)]) if a < b]

    assert fed(EventBody(STRIP_USUAL), pieces) == each_carefully(stream)


@pytest.mark.parametrize("name", ["whole", "tools", "two"])
def test_with_every_event_a_read_most_are_usual_ones(name: str, recorded: Recorded) -> None:
    sent = EventSplitter().feed(recorded(f"{name}_stream_asked.sse"))
    body = EventBody(STRIP_USUAL)

    out = [body.feed(one) for one in sent]

    assert out == [strip_event(one, STRIP_USUAL) for one in sent]
    shape = body._shape
    assert shape is not None
    assert sum(shape.strip(one) is not None for one in sent) >= 3  # of one choice


@settings(max_examples=100)
@given(st.lists(events(), max_size=6), st.lists(st.integers(0, 5000), max_size=6))
def test_any_stream_cut_anywhere_is_the_stream_edited_event_by_event(
    sent: list[bytes], places: list[int]
) -> None:
    stream = b"".join([USUAL_EVENT, *sent, DONE])
    cuts = {0, len(USUAL_EVENT), len(stream), *(place for place in places if place < len(stream))}
    pieces = [stream[a:b] for a, b in pairwise(sorted(cuts))]

    assert fed(EventBody(STRIP_USUAL), pieces) == each_carefully(stream)


def test_a_stream_of_another_kind_is_looked_at_a_few_times_only() -> None:
    body = EventBody(STRIP_USUAL)
    odd = event(ODD_EVENTS["finish"])
    for _ in range(LESSONS):
        body.feed(odd)

    body.feed(USUAL_EVENT)

    assert body._shape is None
    assert body.feed(USUAL_EVENT) == strip_event(USUAL_EVENT, STRIP_USUAL)


# -- replies


@settings(max_examples=100)
@given(events().filter(lambda one: one.startswith(b"data: {")))
def test_whatever_is_said_in_a_reply_it_is_edited_as_it_would_be_member_by_member(
    one: bytes,
) -> None:
    sent = one[6:-2]  # what an event says stands in a whole reply too

    assert strip_reply(sent, STRIP_USUAL) == member_by_member(sent)
