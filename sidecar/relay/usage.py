"""How many tokens a reply cost, read from the last of its bytes. Pure."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from sidecar.relay.reply_fields import USAGE

TAIL_BYTES: Final = 8192
"""vLLM tells the usage at the end of a reply; this much of it is looked at."""
BYTES_PER_TOKEN: Final = 4
"""A rule of thumb, for replies that never told."""
_USAGE: Final = re.compile(rb'"usage":(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


def usage_tokens(tail: bytes) -> int | None:
    """Prompt and completion tokens together, of any surface; None when the reply does not say.

    tail: the end of the reply's body. Quotes inside strings are escaped, so text cannot pretend.
    """
    found = None
    for match in _USAGE.finditer(tail):
        try:
            found = USAGE.decode(match[1])
        except msgspec.MsgspecError:
            continue
    if found is None:
        return None
    if found.total_tokens is not None:
        return found.total_tokens
    if found.input_tokens is None and found.output_tokens is None:
        return None
    return (found.input_tokens or 0) + (found.output_tokens or 0)


def estimated_tokens(request_bytes: int, pieces: int) -> int:
    """The cost of a reply that was cut before it told: its prompt by length, and a token for each
    piece that was streamed."""
    return request_bytes // BYTES_PER_TOKEN + pieces
