"""Write one reply to a client: its head, and its body in the framing that the client can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sidecar.relay.flight.client_request import ClientRequest
from sidecar.relay.flight.reply_body import ReplyBody
from sidecar.relay.http1.heads import reply_head, reply_lines
from sidecar.relay.http1.reply_parser import NO_BODY_STATUSES, ReplyHead
from sidecar.relay.ports import ClientSide

_CRLF: Final = b"\r\n"
_CHUNK_BEGINS: Final = tuple([b"%x\r\n" % length for length in range(1024)])


class ClientReply:
    """One reply on its way to one client."""

    __slots__ = ("_chunked", "_client", "_request", "begun", "keep_alive")

    def __init__(self, client: ClientSide, request: ClientRequest, *, keep_alive: bool) -> None:
        self.begun = False
        """The head is written: what happens now cannot be answered with another status."""
        self.keep_alive = keep_alive
        self._client = client
        self._request = request
        self._chunked = False

    @property
    def in_chunks(self) -> bool:
        """The head is written, and the body goes out in chunks."""
        return self.begun and self._chunked

    def write(
        self, head: ReplyHead, body: ReplyBody, out: bytes, own: Sequence[bytes], *, complete: bool
    ) -> None:
        """Write what may go out now. own: header lines of ours. complete: `out` is the last."""
        if not self.begun:
            begin = self._begin(head, body, len(out) if complete else None, own)
        elif not complete and self._chunked:  # nearly every event of a stream
            if out:
                self._client.write(_chunk(out))
            return
        else:
            begin = b""
        if not self._chunked:
            piece = begin + out
        else:
            chunk = _chunk(out) if out else b""
            piece = begin + chunk + (b"0\r\n\r\n" if complete else b"")
        if piece:
            self._client.write(piece)

    def _begin(
        self, head: ReplyHead, body: ReplyBody, whole_length: int | None, own: Sequence[bytes]
    ) -> bytes:
        self.begun = True
        bodyless = self._request.head.head_only or head.status in NO_BODY_STATUSES
        length = head.content_length
        if not bodyless and body.length != "kept":
            length = whole_length if body.length == "whole" else None
        self._chunked = length is None and not bodyless and self._request.head.http_1_1
        if length is None and not self._chunked and not bodyless:
            self.keep_alive = False  # HTTP/1.0 has no other way to end a body of unknown length
        headers = head.headers
        if not headers.written:
            headers.written = reply_lines(head.status, head.reason, headers.lines)
        return reply_head(
            headers.written,
            own=own,
            content_length=length,
            chunked=self._chunked,
            close=not self.keep_alive,
        )


def _chunk(body: bytes) -> bytes:
    length = len(body)
    begin = _CHUNK_BEGINS[length] if length < len(_CHUNK_BEGINS) else b"%x\r\n" % length
    return b"".join((begin, body, _CRLF))
