"""Events are found wherever the network cut the stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from sidecar.relay.reply_parser import EventSplitter


def _feed(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return events, splitter.rest()


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n"])
def test_every_cut_in_two_gives_the_same_events(ending: bytes) -> None:
    stream = (
        b'data: {"a":"\xe2\x9c\xa8"}' + ending + b": comment" + ending + b"data: [DONE]" + ending
    )
    whole = [part + ending for part in stream.split(ending)[:-1]]

    for cut in range(len(stream) + 1):
        assert _feed([stream[:cut], stream[cut:]]) == (whole, b"")


@given(st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"data: x", b":", b"\n\n"]), max_size=30))
def test_the_pieces_do_not_matter_and_no_byte_is_lost(pieces: list[bytes]) -> None:
    stream = b"".join(pieces)

    events, rest = _feed(pieces)

    assert (events, rest) == _feed([stream])
    assert b"".join(events) + rest == stream


def test_a_recorded_stream_byte_by_byte(recorded: Callable[[str], bytes]) -> None:
    stream = recorded("tools_stream_asked.sse")

    events, rest = _feed([bytes([byte]) for byte in stream])

    assert events == [part + b"\n\n" for part in stream.split(b"\n\n")[:-1]]
    assert rest == b""


def test_what_has_not_ended_is_pending() -> None:
    splitter = EventSplitter()

    assert splitter.feed(b"data: 1\n\ndata: 2") == [b"data: 1\n\n"]
    assert splitter.pending_bytes == 7
    assert splitter.rest() == b"data: 2"
    assert splitter.pending_bytes == 0
