"""Write the head of a request to vLLM and of a reply to the client. Pure.

Headers pass both ways as they came, spelling and order included, except those that belong to one
connection (RFC 9110 section 7.6.1) and the sidecar's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]

CONNECTION_HEADERS = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
_NOT_FORWARDED = frozenset({b"host", b"content-length", b"expect"})
OWN_PREFIX = b"x-sidecar-"


def header(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first value of a header; `name` in lower case."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def text_header(headers: Iterable[Header], name: bytes) -> str:
    """The same as text; empty when absent. Bytes that are not UTF-8 stay apart (backslashes)."""
    value = header(headers, name)
    return "" if value is None else value.decode("utf-8", "backslashreplace").strip()


def request_head(
    method: bytes,
    target: bytes,
    headers: Sequence[Header],
    *,
    host: bytes,
    content_length: int | None,
    accept_plain_only: bool = False,
) -> bytes:
    """The head of a request to an upstream, blank line included.

    accept_plain_only: a compressed reply could not be edited, so none is asked for.
    """
    dropped = _connection_names(headers) | _NOT_FORWARDED
    if accept_plain_only:
        dropped |= {b"accept-encoding"}
    lines = [b"%b %b HTTP/1.1" % (method, target), b"Host: " + host]
    lines += (
        b"%b: %b" % (key, value)
        for key, value in headers
        if (name := key.lower()) not in dropped and not name.startswith(OWN_PREFIX)
    )
    if content_length is not None:
        lines.append(b"Content-Length: %d" % content_length)
    return b"\r\n".join((*lines, b"\r\n"))


def reply_head(
    status: int,
    reason: bytes,
    headers: Sequence[Header],
    *,
    own: Sequence[Header],
    content_length: int | None,
    chunked: bool,
    close: bool,
) -> bytes:
    """The head of a reply to the client, blank line included.

    content_length: None leaves the header out (chunked, no body, or ended by the close).
    """
    dropped = _connection_names(headers) | {b"content-length"}
    lines = [b"HTTP/1.1 %d %b" % (status, reason)]
    lines += (
        b"%b: %b" % (key, value)
        for key, value in headers
        if (name := key.lower()) not in dropped and not name.startswith(OWN_PREFIX)
    )
    lines += (b"%b: %b" % pair for pair in own)
    if content_length is not None:
        lines.append(b"content-length: %d" % content_length)
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    if close:
        lines.append(b"connection: close")
    return b"\r\n".join((*lines, b"\r\n"))


def _connection_names(headers: Sequence[Header]) -> frozenset[bytes]:
    """Headers of this connection only: the known ones and those that `Connection` names."""
    named = [value for key, value in headers if key.lower() == b"connection"]
    if not named:
        return CONNECTION_HEADERS
    extra = {name.strip().lower() for value in named for name in value.split(b",")}
    return CONNECTION_HEADERS | extra
