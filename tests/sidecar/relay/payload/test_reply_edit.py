"""Taking our own fields back out, against what vLLM really sends when they are not asked for."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import example, given, strategies as st

from sidecar.relay import reply_edit
from sidecar.relay.reply import EventBody, HeldBody, PassedBody, reply_body
from sidecar.relay.reply_edit import STRIP_NOTHING, Strip, strip_event, strip_reply

ALL = Strip(token_ids=True, logprobs=True)
Recorded = Callable[[str], bytes]


@pytest.mark.parametrize("name", ["whole", "tools", "two"])
def test_a_whole_reply_becomes_byte_for_byte_the_one_not_asked_for(
    name: str, recorded: Recorded
) -> None:
    assert strip_reply(recorded(f"{name}_reply_asked.json"), ALL) == recorded(
        f"{name}_reply_plain.json"
    )


@pytest.mark.parametrize("name", ["whole", "tools", "two"])
@pytest.mark.parametrize("size", [1, 64, 100_000])
def test_a_stream_becomes_byte_for_byte_the_one_not_asked_for(
    name: str, size: int, recorded: Recorded
) -> None:
    body = EventBody(ALL)
    sent = recorded(f"{name}_stream_asked.sse")

    out = [body.feed(sent[at : at + size]) for at in range(0, len(sent), size)]

    assert _by_choice(b"".join([*out, body.end()])) == _by_choice(
        recorded(f"{name}_stream_plain.sse")
    )


def _by_choice(stream: bytes) -> dict[bytes, list[bytes]]:
    """Events in order within each choice: two runs interleave their choices differently."""
    events: dict[bytes, list[bytes]] = {}
    for event in stream.split(b"\n\n"):
        key = event[event.find(b'"index":') :][:9]
        events.setdefault(key, []).append(event)
    return events


def test_each_field_is_cut_on_its_own() -> None:
    reply = b'{"prompt_token_ids":[1],"choices":[{"token_ids":[2],"logprobs":{"content":[]}}]}'

    assert strip_reply(reply, Strip(token_ids=True, logprobs=False)) == (
        b'{"prompt_token_ids":null,"choices":[{"token_ids":null,"logprobs":{"content":[]}}]}'
    )
    assert strip_reply(reply, Strip(token_ids=False, logprobs=True)) == (
        b'{"prompt_token_ids":[1],"choices":[{"token_ids":[2],"logprobs":null}]}'
    )
    assert strip_reply(reply, STRIP_NOTHING) == reply


def test_the_same_names_elsewhere_stay() -> None:
    reply = (
        b'{"choices":[{"message":{"content":"\\"logprobs\\":[1]","logprobs":[1],"token_ids":[2]},'
        b'"logprobs":[3]}],"logprobs":[4],"metrics":{"prompt_token_ids":[5]}}'
    )

    assert strip_reply(reply, ALL) == reply.replace(b'"logprobs":[3]', b'"logprobs":null')


@pytest.mark.parametrize("name", [b'"token_ids" ', b'"token\\u005fids"'], ids=["space", "escape"])
def test_a_name_that_is_spelled_oddly_is_not_taken_for_the_same_name_deeper_down(
    name: bytes,
) -> None:
    reply = b'{"choices":[{%b:[1],"message":{"token_ids":[1]}}]}' % name

    expected = b'{"choices":[{%b:null,"message":{"token_ids":[1]}}]}' % name
    assert strip_reply(reply, ALL) == expected
    assert strip_event(b"data: %b\n\n" % reply, ALL) == b"data: %b\n\n" % expected


@pytest.mark.parametrize(
    "event",
    [
        b"data: [DONE]\n\n",
        b": keep-alive\n\n",
        b"event: ping\ndata: {}\n\n",
        b'data: {"choices":[{"delta":{}\n\n',
        b'data: {"choices":\ndata: [{"delta":{},"finish_reason":null,"logprobs":[1]}]}\n\n',
        b'data: {"error":{"message":"x","code":500}}\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n',
    ],
)
def test_events_of_another_shape_pass(event: bytes) -> None:
    assert strip_event(event, ALL) == event


HELD_BACK = (
    b'data: {"choices":[{"index":0,"delta":{},"logprobs":{"content":[]},'
    b'"finish_reason":null,"token_ids":[3]}]}\n\n'
)


def test_an_event_that_exists_only_because_of_us_is_left_out() -> None:
    assert strip_event(HELD_BACK, ALL) == b""
    asked = strip_event(HELD_BACK, Strip(token_ids=True, logprobs=False))
    assert asked == HELD_BACK.replace(b"[3]", b"null")
    ended = HELD_BACK.replace(b'"finish_reason":null', b'"finish_reason":"stop"')
    assert json.loads(strip_event(ended, ALL)[6:])["choices"][0]["finish_reason"] == "stop"


PIECES = (
    b"{", b"}", b"[", b"]", b",", b'"', b"\\", b"1", b"null", b"{}", b"[1]", b'{"choices":[{',
    b'"choices":', b'"delta":', b'"token_ids":[1]', b'"logprobs":[1]', b'"prompt_token_ids":[1]',
)  # fmt: skip
"""Pieces of replies: bytes made of them are nearly a reply."""


IDS = st.lists(st.integers(0, 150_000), max_size=3).map(lambda few: few * 2_000)
KEYS = st.sampled_from(["prompt_token_ids", "token_ids", "logprobs", "other"])
ODD = st.one_of(
    IDS,
    st.none(),
    st.just([[1], [2]]),
    st.just(["]", '"prompt_token_ids":[1]']),
    st.dictionaries(KEYS, IDS, max_size=2),
    st.text(max_size=5).map(lambda text: text + '"prompt_token_ids":[1,2]'),
)
MEMBERS = st.dictionaries(KEYS, ODD, max_size=3)


@given(
    first=MEMBERS,
    choice=MEMBERS,
    last=MEMBERS,
    strip=st.sampled_from([ALL, Strip(token_ids=True, logprobs=False)]),
)
@example(first={}, choice={}, last={"prompt_token_ids": list(range(9_000))}, strip=ALL)
@example(first={"other": {"prompt_token_ids": [7] * 9_000}}, choice={}, last={}, strip=ALL)
def test_long_ids_of_a_prompt_are_taken_out_as_member_by_member(
    first: dict[str, object], choice: dict[str, object], last: dict[str, object], strip: Strip
) -> None:
    reply = {**first, "choices": [{"index": 0, **choice}], **last}
    body = json.dumps(reply, separators=(",", ":")).encode()
    event = b"data: %s\n\n" % body

    assert strip_reply(body, strip) == reply_edit._strip_any_reply(body, strip)
    assert strip_event(event, strip) == reply_edit._strip_any_event(event, strip)


def is_no_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return True
    return False


@given(
    (st.binary(max_size=80) | st.lists(st.sampled_from(PIECES), max_size=14).map(b"".join)).filter(
        is_no_json
    )
)
@example(b'{\x00prompt_token_ids"\x00\x00}')
@example(b'\x00{"prompt_token_ids":[1]}')
@example(b'{"prompt_token_ids":[1],}')
@example(b'{"prompt_token_ids":}')
@example(b'{"choices":[{"logprobs":[1]}')
def test_bytes_that_are_no_reply_come_back_as_they_are(data: bytes) -> None:
    assert strip_reply(data, ALL) == data
    assert strip_event(b"data: " + data, ALL) == b"data: " + data


def test_a_held_reply_that_grows_too_long_goes_on_unedited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sidecar.relay.reply.MAX_HELD_BYTES", 10)
    body = HeldBody(ALL)

    out = [body.feed(b"12345"), body.feed(b"678901"), body.feed(b"2"), body.end()]

    assert out == [b"", b"12345678901", b"2", b""]
    assert (body.holds, body.length) == (False, "kept")


def test_an_event_that_grows_too_long_goes_on_unedited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.relay.reply.MAX_HELD_BYTES", 10)
    body = EventBody(ALL)

    out = [body.feed(b"data: 12345"), body.feed(b"\n\n"), body.end()]

    assert out == [b"data: 12345", b"\n\n", b""]


@pytest.mark.parametrize(
    ("status", "content_type", "encoded", "strip", "expected"),
    [
        (200, "application/json", False, ALL, HeldBody),
        (200, "text/event-stream; charset=utf-8", False, ALL, EventBody),
        (200, "application/json", False, STRIP_NOTHING, PassedBody),
        (400, "application/json", False, ALL, PassedBody),
        (200, "application/json", True, ALL, PassedBody),
        (200, "text/plain", False, ALL, PassedBody),
    ],
)
def test_only_what_must_be_edited_is_held(
    status: int, content_type: str, encoded: bool, strip: Strip, expected: type
) -> None:
    body = reply_body(
        status=status, content_type=content_type.encode(), encoded=encoded, strip=strip
    )

    assert type(body) is expected
