"""Events are found wherever the network cut the stream."""

from __future__ import annotations

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
