"""One request over a bare socket, and the bytes that came back, taken apart at their framing."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 60.0
CONNECTION_HEADERS = frozenset({"connection", "transfer-encoding"})
"""They belong to one connection, and a proxy has two."""
OWN_HEADERS = frozenset({"x-sidecar-exchange-id", "x-sidecar-adapter"})


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is sent, byte for byte, apart from the host."""

    method: str = "POST"
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came."""

    line: str
    headers: list[tuple[str, str]]
    """As they came, in lower case."""
    body: bytes
    ended: bool
    """The body came to the end that its framing promised."""

    def kept_headers(self, *more: str) -> list[tuple[str, str]]:
        """Those that must be vLLM's. Their order says nothing (RFC 9110, 5.3), so it is sorted."""
        left_out = CONNECTION_HEADERS | OWN_HEADERS | {"date", *more}
        return sorted(pair for pair in self.headers if pair[0] not in left_out)


def asking(path: str, **body: Any) -> Request:
    """A POST of JSON."""
    return Request(
        path=path,
        body=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )


def send(url: str, request: Request, request_id: str = "same-id-for-all") -> Reply:
    """Ask and read until the server closes.

    request_id: vLLM makes the reply's id of it, so two servers may give the same.
    """
    where = urlsplit(url)
    assert where.hostname
    assert where.port
    lines = [f"{request.method} {request.path} HTTP/1.1", "host: vllm.test", "connection: close"]
    lines.append(f"x-request-id: {request_id}")
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    if request.body is not None:
        lines.append(f"content-length: {len(request.body)}")
    with socket.create_connection((where.hostname, where.port), TIMEOUT_S) as sock:
        sock.sendall("\r\n".join((*lines, "", "")).encode() + (request.body or b""))
        received = b"".join(iter(lambda: sock.recv(65_536), b""))
    return take_apart(received, bodiless=request.method == "HEAD")


def take_apart(received: bytes, *, bodiless: bool) -> Reply:
    """Head and body of one reply; a chunked body is put together."""
    head, _, rest = received.partition(b"\r\n\r\n")
    line, *fields = head.decode("latin-1").split("\r\n")
    headers = [
        (name.lower(), value.strip()) for name, _, value in (f.partition(":") for f in fields)
    ]
    named = dict(headers)
    if bodiless:
        return Reply(line=line, headers=headers, body=rest, ended=rest == b"")
    if named.get("transfer-encoding") == "chunked":
        body, ended = _joined(rest)
        return Reply(line=line, headers=headers, body=body, ended=ended)
    ended = len(rest) == int(named.get("content-length", -1))
    return Reply(line=line, headers=headers, body=rest, ended=ended)


def _joined(chunks: bytes) -> tuple[bytes, bool]:
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return body, chunks == b"\r\n"
        body += chunks[:length]
        chunks = chunks[length + 2 :]
    return body, False
