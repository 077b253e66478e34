"""Replies as they are recorded: whole and streamed say the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from msgspec.json import Decoder

from sidecar.replies import choices as reply_choices, choices as reply_runs
from sidecar.replies.choices import read_stream, read_whole
from sidecar.replies.parts import Document, UnreadableReplyError, decode, message_json

Recorded = Callable[[str], bytes]
RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.mark.parametrize("name", ["whole", "two"])
def test_a_stream_reads_like_the_whole_reply(name: str, recorded: Recorded) -> None:
    whole = read_whole(recorded(f"{name}_reply_asked.json"))
    stream = read_stream([recorded(f"{name}_stream_asked.sse")])

    assert stream.models == whole.models == {"smollm2-135m"}
    assert stream.prompt_ids == whole.prompt_ids != b""
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
    assert (reply.prompt_ids, reply.completion_tokens) == (b"[1,2,3]", 2)
    assert message_json(choice.message) == b'{"role":"assistant","content":"ok"}'


@given(
    st.lists(st.lists(st.integers(0, 10**6), max_size=5), max_size=3),
    st.text(st.sampled_from('"\\[]:, prompt_token_ids1'), max_size=40),
)
def test_prompts_are_cut_out_without_being_read(prompts: list[list[int]], text: str) -> None:
    """The same as with the keys spelled so that the cut does not find them, whatever the texts."""
    said = {"index": 0, "message": {"content": text + '"prompt_token_ids":[1'}}
    choices = [{**said, "prompt_token_ids": ids, "token_ids": [7]} for ids in prompts]
    reply = {"model": "m", "x": text, "choices": choices or [said]}

    cut = read_whole(json.dumps(reply, separators=(",", ":")).encode())
    read = read_whole(json.dumps(reply).encode())

    assert cut == read
    different = {tuple(ids) for ids in prompts if ids}
    assert cut.several_prompts == (len(different) > 1)
    assert (cut.prompt_ids == b"") == (not different)


@pytest.mark.parametrize("ids", ["[[1],2]", "[1"])
def test_prompts_that_are_no_list_of_numbers_make_the_reply_unreadable(ids: str) -> None:
    with pytest.raises(UnreadableReplyError):
        read_whole(b'{"model":"m","choices":[],"prompt_token_ids":%b}' % ids.encode())


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


def test_arguments_that_hold_two_objects_are_of_one_call_unless_a_name_begins_another() -> None:
    def calls(*pieces: str) -> list[str]:
        events = [
            _event(f'{{"tool_calls":[{{"index":0,"function":{{{one}}}}}]}}') for one in pieces
        ]
        message = json.loads(message_json(read_stream(events).choices[0].message))
        return [one["function"]["arguments"] for one in message["tool_calls"]]

    first, second = '"arguments":"{\\"a\\":1}"', '"arguments":"{\\"b\\":2}"'
    assert calls('"name":"f"', first, second) == ['{"a":1}{"b":2}']
    assert calls(f'"name":"f",{first}', f'"name":"f",{second}') == ['{"a":1}', '{"b":2}']


def test_a_stream_has_ended_only_with_done(recorded: Recorded) -> None:
    stream = recorded("whole_stream_asked.sse")

    assert read_stream([stream]).ended
    assert not read_stream([stream.replace(b"data: [DONE]\n\n", b"")]).ended


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"choices":3}', b'{"model":1}'])
def test_what_is_no_chat_reply_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(UnreadableReplyError):
        read_whole(body)


# -- many events at once, and one after the other

HEAD = b'data: {"id":"c","model":"m","choices":[{'
USUAL = (
    b'"index":0,"delta":{"content":"u"},"logprobs":{"content":[{"token":"u","logprob":-0.25}]},'
    b'"token_ids":[5]'
)
CHANGES = b'"index" "delta" "content" "text" "logprobs" "token_ids" "model"'.split()
CHANGES += b'null {} [] 0 "" NaN \\ud800 \xff " { } [ ] , }{ },{'.split()
CHANGES += [b"\n", b"\r", b"}\n{", b"}]}\n\n", b"}]}\n\n" + HEAD, HEAD]

_recorded_events = st.sampled_from(
    [
        event + b"\n\n"
        for path in sorted(RECORDED.glob("*.sse"))
        if not path.name.startswith(("messages", "responses"))
        for event in path.read_bytes().split(b"\n\n")
        if event
    ]
)
_usual_events = st.builds(
    b'data: {"id":"c","model":"m","choices":[{"index":%d,"delta":{"content":%b},"logprobs":'
    b'{"content":[{"token":%b,"logprob":-0.5}]},"finish_reason":null,"token_ids":[%d]}]}\n\n'.__mod__,
    st.tuples(
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from([b'"a"', b'" b"', b'"\xf0\x9f\x8c\xb1"', b'""', b"null"]),
        st.sampled_from([b'"a"', b'" b"', b'"\\n"', b'""', b"null"]),
        st.integers(0, 9),
    ),
)
ODD_EVENTS = [
    b": keep-alive\n\n",
    b": cut",
    b'data: {"model":"cut',
    b"data: [DONE]\n\n",
    b"\n",
    b"\r\n",
    b'data: {"error":{"type":"x"}}\n\n',
    HEAD + b'}],"usage":{"completion_tokens":3}}\n\n',
    HEAD + b'}],"model":"n"}\n\n',
    HEAD + b'"delta":{"reasoning":"r"}}]}\r\n\r\n',
    HEAD + b'"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}]}\n\n',
    HEAD + b'"text":"t","prompt_token_ids":[1,2]}]}\n\n',
    HEAD + b'"text":"t","finish_reason":"stop","stop_reason":5}]}\n\n',
    # Nearly usual ones.
    HEAD + USUAL + b"}]}\n\n",
    HEAD + USUAL + b',"prompt_token_ids":[5]}]}\n\n',
    HEAD + USUAL + b',"finish_reason":"stop","stop_reason":"u"}]}\n\n',
    HEAD + USUAL + b',"token_ids":[5,6]}]}\n\n',
    HEAD + USUAL + b',"token_ids":null}]}\n\n',
    HEAD + USUAL + b',"logprobs":null}]}\n\n',
    HEAD + USUAL + b',"logprobs":{"content":[]}}]}\n\n',
    HEAD + USUAL + b',"logprobs":{"content":[{"logprob":-1},{"logprob":-2}]}}]}\n\n',
    HEAD + USUAL + b',"logprobs":{"content":[{"logprob":-1}],"tokens":0}}]}\n\n',
    HEAD + USUAL + b',"logprobs":{"content":[{"logprob":NaN}]}}]}\n\n',
    HEAD + USUAL + b',"delta":{"content":"a","reasoning":"r"}}]}\n\n',
    HEAD + USUAL + b',"delta":{},"message":{"content":"m"}}]}\n\n',
    HEAD + USUAL + b',"delta":{},"text":"t"}]}\n\n',
    HEAD + USUAL + b',"message":0}]}\n\n',
    HEAD + USUAL + b',"text":0}]}\n\n',
    # Joined by nothing but commas or line ends, these would read as something.
    HEAD + USUAL + b',"x":[{}]}\n\n' + HEAD + b"}]}}]}\n\n",
    HEAD + USUAL + b'},{"index":1}]}\n\n',
    HEAD + USUAL + b"}{" + USUAL + b"}]}\n\n",
    HEAD + USUAL + b',\n"stop_reason":5}]}\n\n',
    HEAD + USUAL + b'}]}\n\ndata: {"choices":[{}]}\n\n',
]


def _said(chunks: Sequence[bytes]) -> tuple[object, ...]:
    try:
        reply = read_stream(chunks)
    except UnreadableReplyError:
        return ("unreadable",)
    return (
        reply.models,
        repr(reply.choices),
        repr(reply)[repr(reply).index("prompt_ids=") :],
    )


@st.composite
def _changed(draw: st.DrawFn, events: st.SearchStrategy[bytes]) -> bytes:
    """An event into which something was put, perhaps in the place of something else."""
    event = draw(events)
    at, length = draw(st.integers(0, len(event))), draw(st.integers(0, 12))
    return event[:at] + draw(st.sampled_from(CHANGES)) + event[at + length :]


_streams = st.tuples(
    st.integers(0, 8),
    st.lists(_usual_events, min_size=6, max_size=40),
    st.lists(st.sampled_from(ODD_EVENTS) | _recorded_events | _changed(_usual_events), max_size=2),
).map(lambda parts: [*parts[1][: parts[0]], *parts[2], *parts[1][parts[0] :]])


@pytest.fixture(params=[100, 1_000, 32_768])
def short_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one event, of a few, and of many."""
    for module in (reply_choices, reply_runs):
        monkeypatch.setattr(module, "RUN_BYTES", request.param)
    monkeypatch.setattr(reply_choices, "FEW", 1)


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("odd", ODD_EVENTS)
def test_an_odd_event_among_usual_ones_reads_as_one_by_one(odd: bytes) -> None:
    events = [HEAD + USUAL + b"}]}\n\n"] * 9
    events[4:4] = [odd]

    # a stream in one piece is read one by one
    assert _said(events) == _said([b"".join(events)])


@pytest.mark.usefixtures("short_runs")
@settings(
    max_examples=60,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],  # it is the same for all
)
@given(events=_streams | st.lists(_recorded_events | _changed(_recorded_events), max_size=40))
def test_events_read_the_same_at_once_and_one_by_one(events: list[bytes]) -> None:
    assert _said(events) == _said([b"".join(events)])


@settings(max_examples=150, derandomize=True)
@given(events=_streams, cuts=st.lists(st.integers(0, 6_000), max_size=6), joined=st.integers(0, 40))
def test_a_stream_reads_the_same_however_it_was_cut(
    events: list[bytes], cuts: list[int], joined: int
) -> None:
    whole = b"".join(events)
    ends = [sum(map(len, events[: at + 1])) for at in range(len(events))]
    del ends[joined : joined + 1]  # two events in one chunk
    places = sorted({0, *ends, *[cut % (len(whole) + 1) for cut in cuts], len(whole)})
    chunks = [whole[begin:end] for begin, end in pairwise(places)]

    assert _said(chunks) == _said([whole])


@pytest.mark.parametrize("index", [b"0", b"1"])
def test_usual_events_are_not_decoded_one_by_one(
    index: bytes, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [
        event + b"\n\n" for event in recorded("whole_stream_asked.sse").split(b"\n\n") if event
    ]
    chunks = [events[0], *(events[1:-2] * 100), *events[-2:]]
    chunks[5] = chunks[5].replace(b'"index":0', b'"index":' + index)
    one_by_one = _said([b"".join(chunks)])
    decoded: list[bytes] = []

    def noted(decoder: Decoder[Document], data: bytes) -> Document:
        decoded.append(data)
        return decode(decoder, data)

    monkeypatch.setattr(reply_choices, "decode", noted)

    assert _said(chunks) == one_by_one
    assert len(chunks) == 703
    assert len(decoded) == 2  # the first event, which says the prompt, and the last
