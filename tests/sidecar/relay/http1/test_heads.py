"""What passes between the two connections, and what does not."""

from __future__ import annotations

from sidecar.relay.context import ClientRequest
from sidecar.relay.heads import RequestHeaders, request_lines
from sidecar.relay.request_parser import RequestParser


def sorted_request(*headers: tuple[bytes, bytes]) -> RequestHeaders:
    lines = (name + b": " + value for name, value in ((b"Host", b"proxy:8080"), *headers))
    parser = RequestParser(max_body_bytes=1000)
    chunked = any(name == b"Transfer-Encoding" for name, _ in headers)
    end = b"\r\n0\r\n\r\n" if chunked else b"\r\n"
    parser.feed(b"\r\n".join((b"POST / HTTP/1.1", *lines, end)))
    request = parser.ready.popleft()
    assert isinstance(request, ClientRequest)
    return request.head.headers


def test_of_the_names_of_a_session_the_one_of_the_lowest_rank_counts_and_all_are_passed_on() -> (
    None
):
    sent = [
        (b"X-Acme-Session-Id", b"of any client"),
        (b"X-Session-Id", b"child"),
        (b"X-Session-Affinity", b"child"),
        (b"x-parent-session-id", b"parent"),
        (b"X-Parent-Session-Id", b"again"),
        (b"session-id", b""),
    ]

    headers = [sorted_request(*sent[:count]) for count in range(len(sent) + 1)]

    names = [b"", b"of any client", b"child", b"child", b"parent", b"parent", b"parent"]
    assert [one.session_name for one in headers] == names
    assert headers[-1].lines == [name + b": " + value for name, value in sent]
    assert sorted_request((b"session-id", b" ")).session_name == b""
    assert sorted_request((b"x-request-id", b"r")).session_name == b""


def test_a_request_head_keeps_order_and_spelling_and_drops_what_is_the_connections() -> None:
    headers = sorted_request(
        (b"User-AGENT", b"me"),
        (b"Connection", b"keep-alive, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Expect", b"100-continue"),
        (b"X-Sidecar-Session", b"s"),
        (b"idempotency-key", b"k"),
        (b"x-dup", b"1"),
        (b"x-dup", b"2"),
    )

    head = request_lines(b"POST", b"/v1/x?y", headers.lines, host=b"vllm:8000")

    assert head == (
        b"POST /v1/x?y HTTP/1.1\r\nHost: vllm:8000\r\nUser-AGENT: me\r\nidempotency-key: k\r\n"
        b"x-dup: 1\r\nx-dup: 2"
    )
    assert headers.text(b"idempotency-key") == "k"


def test_headers_about_which_somebody_decides_are_kept_aside_and_a_doubled_key_shows() -> None:
    headers = sorted_request(
        (b"AUTHORIZATION", b"Bearer a"),
        (b"authorization", b"Bearer b"),
        (b"Accept-Encoding", b"gzip"),
        (b"X-Api-Key", b"k"),
        (b"traceparent", b"00-1-2-01"),
    )

    assert headers.lines == []
    assert headers.aside == {
        b"host": b"proxy:8080",
        b"authorization": b"Bearer a,Bearer b",
        b"accept-encoding": b"gzip",
        b"x-api-key": b"k",
        b"traceparent": b"00-1-2-01",
    }


def test_headers_are_read_without_regard_to_case_and_never_raise() -> None:
    headers = sorted_request((b"X-Sidecar-User", b" \xff "))

    assert headers.text(b"x-sidecar-user") == "\\xff"
    assert headers.text(b"x-other") == ""
