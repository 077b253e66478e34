"""What passes between the two connections, and what does not."""

from __future__ import annotations

from sidecar.relay.heads import reply_head, request_head, text_header


def test_a_request_head_keeps_order_and_spelling_and_drops_what_is_the_connections() -> None:
    headers = (
        (b"Host", b"proxy:8080"),
        (b"AUTHORIZATION", b"Bearer secret"),
        (b"Connection", b"keep-alive, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Length", b"99"),
        (b"Expect", b"100-continue"),
        (b"X-Sidecar-Session", b"s"),
        (b"traceparent", b"00-1-2-01"),
        (b"x-dup", b"1"),
        (b"x-dup", b"2"),
    )

    head = request_head(b"POST", b"/v1/x?y", headers, host=b"vllm:8000", content_length=7)

    assert head == (
        b"POST /v1/x?y HTTP/1.1\r\nHost: vllm:8000\r\nAUTHORIZATION: Bearer secret\r\n"
        b"traceparent: 00-1-2-01\r\nx-dup: 1\r\nx-dup: 2\r\nContent-Length: 7\r\n\r\n"
    )


def test_a_reply_that_must_be_edited_is_asked_for_uncompressed() -> None:
    head = request_head(
        b"GET",
        b"/",
        ((b"Accept-Encoding", b"gzip"),),
        host=b"h",
        content_length=None,
        accept_plain_only=True,
    )

    assert head == b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


def test_a_reply_head_gets_our_headers_and_the_framing() -> None:
    headers = (
        (b"server", b"uvicorn"),
        (b"content-length", b"12"),
        (b"transfer-encoding", b"chunked"),
        (b"x-sidecar-adapter", b"forged"),
    )

    head = reply_head(
        200,
        b"OK",
        headers,
        own=((b"x-sidecar-adapter", b"base"),),
        content_length=None,
        chunked=True,
        close=True,
    )

    assert head == (
        b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\nx-sidecar-adapter: base\r\n"
        b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )


def test_headers_are_read_without_regard_to_case_and_never_raise() -> None:
    headers = ((b"X-Sidecar-User", b" \xff "),)

    assert text_header(headers, b"x-sidecar-user") == "\\xff"
    assert text_header(headers, b"x-other") == ""
