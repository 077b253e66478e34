"""How many tokens a reply cost, read from its bytes as they pass. Pure.

vLLM writes the usage wherever it likes: in front of the prompt's token ids, which capture asks for,
or of a `user` as long as the client wants. So the whole reply is looked through, but only for where
strings and brackets begin and end, which C does a read at a time: what is held is a usage at most.
"""

from __future__ import annotations

from typing import Final

from sidecar.errors import UNREADABLE_JSON
from sidecar.relay.fields import USAGE
from sidecar.relay.request_edit import value_end

BYTES_PER_TOKEN: Final = 4
"""A rule of thumb, for replies without a usage."""
MAX_USAGE_BYTES: Final = 16 * 1024
"""A longer object is not a usage."""
_KEY: Final = b'"usage":{'
_WHOLE: Final = 1
"""The usage is a member of the reply, and not of what a client's own words are repeated in."""
_EVENTS: Final = 2
"""It is a member of the event, or of the response or message that is the event's one member."""
_UNKNOWN: Final = 0


class UsageMeter:
    """Takes a reply's body, cut anywhere, and knows the last usage in it."""

    def __init__(self) -> None:
        self._deepest = _UNKNOWN
        """How deep in brackets the usage may stand; it says too whether the reply is events."""
        self._depth = 0
        self._in_string = False
        self._rest = b""
        """The end of what was fed: what may be the beginning of a usage, and was not walked."""
        self._total: int | None = None
        self.events = 0
        self.prompt: int | None = None
        self.completion: int | None = None

    @property
    def told(self) -> int | None:
        """Prompt and completion tokens together, of any surface; None when the reply did not say.
        Of a stream that goes on it is what was told so far."""
        if self._total is not None:
            return self._total
        if self.prompt is None and self.completion is None:
            return None
        return (self.prompt or 0) + (self.completion or 0)

    def at_least(self, request_bytes: int, pieces: int) -> int:
        """Return the least cost, in tokens, of a reply that was cut or that reported no usage: the
        prompt as vLLM reported it, else by its length, and a token for each event or piece."""
        prompt = self.prompt if self.prompt is not None else request_bytes // BYTES_PER_TOKEN
        return max(self.told or 0, prompt + max(pieces, self.events))

    def feed(self, data: bytes) -> None:
        if self._deepest == _UNKNOWN:
            first = data.lstrip()[:1]
            if not first:
                return
            self._deepest = _WHOLE if first in (b"{", b"[") else _EVENTS
        in_events = self._deepest == _EVENTS
        if in_events:
            self.events += data.count(b"\n\n")
            if not self._rest and data.endswith(b"\n") and data.find(_KEY) < 0:
                return  # whole lines without a usage: nearly every read of a stream
        text = self._rest + data if self._rest else data
        if text.find(b"\\") >= 0:  # escaped quotes delimit nothing; all places stay as they are
            text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        walked, found = 0, text.find(_KEY)
        while found >= 0:
            self._walk(text, walked, found)
            walked, value = found, found + len(_KEY) - 1
            if not self._in_string and 0 < self._depth <= self._deepest:
                usage = text[value : value + MAX_USAGE_BYTES]
                if not self._take(usage) and len(usage) < MAX_USAGE_BYTES:
                    self._rest = text[found:]
                    return
            found = text.find(_KEY, value)
        # No key is cut by a line's end, behind which everything begins anew.
        held = 0 if in_events and text.endswith(b"\n") else len(_KEY) - 1
        stop = max(walked, len(text) - held)
        self._walk(text, walked, stop)
        self._rest = text[stop:]

    def _walk(self, text: bytes, start: int, stop: int) -> None:
        """Go on to `stop`, and know how deep in brackets that is. text: without escaped quotes."""
        if self._deepest == _EVENTS:
            line_end = text.rfind(b"\n", start, stop)
            if line_end >= 0:  # no string holds one
                start = line_end + 1
                self._depth, self._in_string = 0, False
        parts = text[start:stop].split(b'"')
        outside = b"".join(parts[1::2] if self._in_string else parts[::2])
        if len(parts) % 2 == 0:
            self._in_string = not self._in_string
        self._depth += outside.count(b"{") + outside.count(b"[")
        self._depth -= outside.count(b"}") + outside.count(b"]")

    def _take(self, begins: bytes) -> bool:
        """Read the object that `begins` so. False: it does not end here."""
        try:
            end = value_end(begins, 0)
        except (ValueError, IndexError):
            return False
        try:
            usage = USAGE.decode(begins[:end])
        except UNREADABLE_JSON:
            return True  # some other object of that name
        prompt = usage.prompt_tokens
        if prompt is None and usage.input_tokens is not None:
            # Anthropic's input leaves out what the cache had.
            cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
            prompt = usage.input_tokens + cached
        completion = usage.completion_tokens
        if completion is None:
            completion = usage.output_tokens
        if prompt is not None:
            self.prompt = prompt
        if completion is not None:
            self.completion = completion
        if usage.total_tokens is not None:
            self._total = usage.total_tokens
        return True
