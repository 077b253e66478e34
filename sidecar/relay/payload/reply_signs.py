"""Tell from a reply's bytes, as they pass, whether it says anything and how it ended. Pure.

It works on every surface and without parsing: a quotation mark inside a JSON string is escaped, so
`"content":"` cannot come from what a model wrote. It looks while a canary runs, at both arms, and
does not depend on what is captured.
"""

from __future__ import annotations

import re
from typing import Final

_FIELD: Final = (
    rb'("(?:content|text|delta|arguments|partial_json|refusal)"\s*:\s*")(?:\s|\\[nrtbf])*+'
)
"""A field with what a model says, up to its first character that is not white space. Reasoning
alone is no answer; its fields have other names in chat (`reasoning_content`) and messages."""
_SAYS: Final = re.compile(
    _FIELD + rb'[^"\\]|' + _FIELD + rb"\\[^nrtbf]"
    rb'|"type"\s*:\s*"(?:tool_use|function_call)"|"tool_calls"\s*:\s*\[\s*\{'
)
"""A text of more than white space, or the call of a tool."""
_BEGINS: Final = re.compile(_FIELD + rb"(\\?)\Z")
"""The piece ends inside a field that holds nothing but white space so far."""
_FAILS: Final = re.compile(rb'(?:^|\n)(?:data: \{"error"|event: error|event: response\.failed)')
"""vLLM's events for a failure after a stream's head went out. JSON strings hold no line feed."""
_LIMIT: Final = re.compile(
    rb'"(?:finish_reason|stop_reason|status)"\s*:\s*"(?:length|max_tokens|incomplete)"'
)
_OVERLAP: Final = 64
"""Bytes of a piece that are looked at again with the next one: a field may be cut in two."""


class ReplySigns:
    """Feed it the body of one reply, piece by piece."""

    __slots__ = ("_rest", "cut_short", "failed", "says_something", "slow")

    def __init__(self) -> None:
        self._rest = b""
        self.says_something = False
        self.cut_short = False
        """The token limit ended it."""
        self.failed = False
        """A stream ended with an error event."""
        self.slow = False
        """It was silent for too long; that is counted."""

    def feed(self, data: bytes) -> None:
        seen = self._rest + data
        self._rest = seen[-_OVERLAP:]
        if not self.says_something:
            self.says_something = _SAYS.search(seen) is not None
            begun = _BEGINS.search(seen)
            if begun is not None:  # however long the white space is
                self._rest = begun[1] + begun[2]
        if not self.cut_short:
            self.cut_short = _LIMIT.search(seen) is not None
        if not self.failed:
            self.failed = _FAILS.search(seen) is not None
