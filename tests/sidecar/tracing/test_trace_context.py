"""`traceparent`, in and out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidecar.tracing.spans import Propagation, TraceParent, parse

TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = b"00f067aa0ba902b7"
SAMPLED = b"00-" + TRACE + b"-" + SPAN + b"-01"


def given(*values: int) -> Callable[[int], int]:
    """Random numbers that are known."""
    left = list(values)
    return lambda bits: left.pop(0)


def test_a_traceparent_is_read() -> None:
    assert parse(SAMPLED) == TraceParent(
        0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 0x01
    )
    unsampled = parse(b"00-" + TRACE + b"-" + SPAN + b"-00")
    assert unsampled is not None
    assert unsampled.sampled is False
    # A later version may have more fields; what we know of it stands where it stood.
    assert parse(b"cc-" + TRACE + b"-" + SPAN + b"-01-what-comes") == parse(SAMPLED)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"rubbish",
        SAMPLED.upper(),
        SAMPLED + b"-more",
        SAMPLED[:-1],
        b"ff-" + TRACE + b"-" + SPAN + b"-01",
        b"00-" + b"0" * 32 + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
        b"00-" + TRACE + b"-" + SPAN + b"-0g",
        b"cc-" + TRACE + b"-" + SPAN + b"-01more",
        SAMPLED + b"," + SAMPLED,
    ],
)
def test_a_malformed_one_is_none_and_a_new_trace_begins(header: bytes | None) -> None:
    assert parse(header) is None

    made = Propagation(given(0xABC, 0xDEF)).outgoing(header)

    assert made == b"00-%032x-%016x-01" % (0xDEF, 0xABC)


@pytest.mark.parametrize("flags", [b"00", b"01"])
def test_a_trace_goes_on_with_our_span_and_the_clients_flags(flags: bytes) -> None:
    header = b"00-" + TRACE + b"-" + SPAN + b"-" + flags

    made = Propagation(given(0x1234)).outgoing(header)

    assert made == b"00-" + TRACE + b"-0000000000001234-" + flags


def test_flags_that_we_do_not_know_are_not_repeated() -> None:
    made = Propagation(given(1)).outgoing(SAMPLED[:-2] + b"ff")

    assert made.endswith(b"-0000000000000001-01")


def test_ids_are_never_zero() -> None:
    made = Propagation(given(0, 0)).outgoing(None)

    assert parse(made) == TraceParent(1, 1, 1)
