"""Read requests, and remember what their parts say. Pure.

Each request of a conversation repeats the bytes of the messages before, and of the tools. What was
read of these bytes is remembered, so that a request costs what is new in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

import msgspec

from ingest.sessions.messages import (
    LIST_KEYS,
    MESSAGE_KEYS,
    TOOL_KEYS,
    Conversation,
    Message,
    join,
    read_item,
    read_messages,
    read_tools,
)

MESSAGE_BYTES: Final = 24 * 2**20
"""Memory of the messages remembered: some 25,000 of ordinary size."""
TOOL_BYTES: Final = 4 * 2**20
"""Memory of the names of tools."""
ENTRY_BYTES: Final = 600
"""Memory of an entry besides its texts."""
DIGESTED: Final = 1_024
"""Bytes of a part from which its digest stands for it: short ones are compared as they are."""
Part = TypeVar("Part")
_decode_parts: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Memory(Generic[Part]):
    """What parts of requests say, by their bytes; the least recently used are dropped first."""

    def __init__(
        self,
        read: Callable[[Any], Iterable[Part]],  # Any: decoded JSON
        size_of: Callable[[Part], int],
        max_bytes: int,
    ) -> None:
        self._read, self._size_of, self._max_bytes = read, size_of, max_bytes
        self._found: dict[bytes, tuple[tuple[Part, ...], int]] = {}
        self._bytes = 0

    def __call__(self, written: bytes) -> tuple[Part, ...]:
        """Read JSON. Raises: what `msgspec.json.decode` raises; RecursionError."""
        key = written
        if len(written) > DIGESTED:
            key = blake2b(written, digest_size=32).digest()
        entry = self._found.pop(key, None)
        if entry is None:
            parts = tuple(self._read(msgspec.json.decode(written)))
            entry = parts, ENTRY_BYTES + len(key) + sum(map(self._size_of, parts))
            self._bytes += entry[1]
        self._found[key] = entry  # now the most recently used
        while self._bytes > self._max_bytes:
            self._bytes -= self._found.pop(next(iter(self._found)))[1]
        return entry[0]


class RequestReader:
    """Reads the conversations of requests. For one thread."""

    def __init__(self, max_bytes: int = MESSAGE_BYTES) -> None:
        self._messages = Memory(read_item, _message_bytes, max_bytes)
        self._tools = Memory(read_tools, len, TOOL_BYTES)

    def read(self, request: bytes) -> Conversation:
        """Read the body of a request, JSON.

        Raises: msgspec.MsgspecError, ValueError or RecursionError when this is no JSON object that
            `msgspec` reads.
        """
        parts = _decode_parts(request)
        tools = [
            name for key in TOOL_KEYS if key in parts for name in self._tools(bytes(parts[key]))
        ]
        return join(self._found(parts), tools)

    def read_reply(self, message: bytes) -> Message | None:
        """Read an answer, JSON: many clients send it again in the same bytes. None: the bytes do
        not say whose message it is. Raises: as `read`."""
        found = self._messages(message)
        return found[0] if len(found) == 1 and found[0].role == "assistant" else None

    def _found(self, parts: dict[str, msgspec.Raw]) -> Iterator[Message]:
        for key in MESSAGE_KEYS:
            if key not in parts:
                continue
            if key in LIST_KEYS and bytes(parts[key])[:1] == b"[":
                for item in _decode_list(parts[key]):
                    yield from self._messages(bytes(item))
            else:
                yield from read_messages(key, msgspec.json.decode(parts[key]))


def _message_bytes(message: Message) -> int:
    return 100 + message.length
