"""Read a captured reply of any surface. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidecar.records import Surface
from sidecar.replies import blocks, choices, items
from sidecar.replies.parts import ReadReply, UnreadableReplyError

WHOLE: dict[Surface, Callable[[bytes], ReadReply]] = {
    "chat": choices.read_whole,
    "completions": choices.read_whole,
    "responses": items.read_whole,
    "messages": blocks.read_whole,
}
STREAM: dict[Surface, Callable[[Sequence[bytes]], ReadReply]] = {
    "chat": choices.read_stream,
    "completions": choices.read_stream,
    "responses": items.read_stream,
    "messages": blocks.read_stream,
}


def read_reply(surface: Surface, chunks: Sequence[bytes], *, streamed: bool) -> ReadReply:
    """Read a reply. Raises: UnreadableReplyError, also when the body has another surface's form.

    chunks: the body as vLLM sent it, cut anywhere.
    streamed: the body is a stream of events.
    """
    if surface not in WHOLE:
        raise UnreadableReplyError(f"replies of {surface} are not captured")
    if streamed:
        return STREAM[surface](chunks)
    return WHOLE[surface](chunks[0] if len(chunks) == 1 else b"".join(chunks))
