"""W3C trace context: read the `traceparent` of a request and make the one sent to vLLM. Pure.

Source: https://www.w3.org/TR/trace-context/ (level 1, with the forward compatibility it asks for).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

SAMPLED = 0x01
_PARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.DOTALL,
)
_VERSION = b"00"


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The fields of a `traceparent`: trace, parent span, flags."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


def parse(header: bytes | None) -> TraceParent | None:
    """Return None when the header is absent or malformed: a new trace begins here then."""
    found = _match(header)
    if found is None:
        return None
    return TraceParent(int(found[2], 16), int(found[3], 16), int(found[4], 16))


class Propagation:
    """Makes the `traceparent` that is sent to vLLM, in about a microsecond.

    A request that belongs to a trace stays in it: same trace id, same sampled flag, our span as the
    parent. For other requests a new trace begins, and `sample_rate` of those are sampled.
    """

    def __init__(
        self, sample_rate: float, randbits: Callable[[int], int] = random.getrandbits
    ) -> None:
        """sample_rate: share of the new traces that are sampled, 0..1."""
        self._bound = round(sample_rate * 2**64)
        self._randbits = randbits

    def outgoing(self, header: bytes | None) -> bytes:
        """Return the header to send. header: as the client sent it."""
        span_id = self._randbits(64) or 1
        found = _match(header)
        if found is not None:
            # This version defines only the `sampled` flag; other flags are not passed on.
            flags = int(found[4], 16) & SAMPLED
            return b"00-%b-%016x-%02x" % (found[2], span_id, flags)
        trace_id = self._randbits(128) or 1
        flags = SAMPLED if trace_id & 0xFFFFFFFFFFFFFFFF < self._bound else 0
        return b"00-%032x-%016x-%02x" % (trace_id, span_id, flags)


def _match(header: bytes | None) -> re.Match[bytes] | None:
    if not header:
        return None
    found = _PARENT.fullmatch(header)
    # Version 00 has four fields; a later one may have more.
    if found is None or (found[5] is not None and found[1] == _VERSION):
        return None
    return found
