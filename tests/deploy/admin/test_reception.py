"""Before any route: the caller is known before the body is read, and the body is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import uvicorn

from deploy.admin.auth import RefusalReason, UnauthorizedError, grant_of
from deploy.admin.reception import LOG_INTERVAL_S, MAX_BODY_BYTES, Reception, Refusals

if TYPE_CHECKING:
    from tests.deploy.conftest import MakeApi, World

TOKEN = "let-me-in"
AUTHORIZED = (b"authorization", f"Bearer {TOKEN}".encode())
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUIRK")
PATHS = ("/", "/nope", "/metrics", "/admin/v1/status", "/admin/v1/rollback", "/admin/v1/nope")


class BodyReadError(Exception):
    """The application asked for a body that it must not read."""


async def ask(
    app: Any,
    method: str,
    path: str,
    *,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    receive: Any = None,
    client: tuple[str, int] | None = ("10.1.2.3", 4711),
) -> tuple[int, dict[bytes, bytes], Any]:
    """One request to an ASGI application. Returns: status, headers, problem."""
    sent: list[dict[str, Any]] = []

    async def refuse() -> dict[str, Any]:
        raise BodyReadError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    named = {name for name, _ in headers}
    host = () if b"host" in named else ((b"host", b"127.0.0.1:8081"),)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*host, *headers],
        "client": client,
        "server": ("127.0.0.1", 8081),
    }
    await app(scope, receive or refuse, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    problem = json.loads(body) if body.startswith(b"{") else None
    return sent[0]["status"], dict(sent[0]["headers"]), problem


def parts(*bodies: bytes) -> Callable[[], Any]:
    """A `receive` of a chunked body; after its end the client is gone."""
    waiting = [
        {"type": "http.request", "body": body, "more_body": number < len(bodies) - 1}
        for number, body in enumerate(bodies)
    ]

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    return receive


async def test_the_token_is_asked_for_before_the_body_on_every_path_and_by_every_method(
    make_api: MakeApi,
) -> None:
    app = make_api(TOKEN).app

    for method, path in itertools.product(METHODS, PATHS):
        status, headers, problem = await ask(app, method, path)
        assert (status, headers[b"connection"]) == (401, b"close"), (method, path)
        assert problem["type"].endswith(":unauthorized"), (method, path)


async def test_the_probes_need_no_token_and_read_no_body(make_api: MakeApi) -> None:
    app = make_api(TOKEN).app
    with_body = ((b"content-length", b"150000000"),)

    for path in ("/healthz", "/readyz", "/admin/openapi.json"):
        assert (await ask(app, "GET", path, headers=with_body))[0] == 200
        assert (await ask(app, "POST", path))[0] == 401


async def test_without_tokens_a_foreign_host_is_refused_before_the_body(
    make_api: MakeApi,
) -> None:
    app = make_api().app

    foreign = await ask(app, "POST", "/admin/v1/rollback", headers=((b"host", b"evil.example"),))
    page = await ask(app, "POST", "/admin/v1/nope", headers=((b"origin", b"http://evil.example"),))

    assert (foreign[0], page[0]) == (403, 403)


async def test_an_announced_body_over_the_limit_is_refused_unread(make_api: MakeApi) -> None:
    length = (b"content-length", str(MAX_BODY_BYTES + 1).encode())
    left = parts()

    status, headers, problem = await ask(
        make_api().app, "POST", "/admin/v1/rollback", headers=(length,), receive=left
    )

    assert (status, headers[b"content-type"]) == (413, b"application/problem+json")
    assert headers[b"connection"] == b"close"
    assert problem["detail"] == "a body has at most 65536 bytes"


async def test_a_chunked_body_over_the_limit_is_refused_when_it_is_over(
    make_api: MakeApi, world: World
) -> None:
    given = 0

    async def endless() -> dict[str, Any]:
        nonlocal given
        given += 1
        assert given < 80, "it is read for ever"
        return {"type": "http.request", "body": b" " * 16_384, "more_body": True}

    status, _, problem = await ask(
        make_api().app,
        "POST",
        "/admin/v1/rollback",
        headers=((b"transfer-encoding", b"chunked"),),
        receive=endless,
    )

    assert (status, problem["type"]) == (413, "urn:learning-sidecar:problem:too-large")
    assert "rollback" not in world.actions()


async def test_a_body_in_pieces_that_is_not_too_long_is_read_whole(make_api: MakeApi) -> None:
    status, _, _ = await ask(
        make_api().app,
        "POST",
        "/admin/v1/rollback",
        headers=((b"content-type", b"application/json"),),
        receive=parts(b'{"to": ', b'"base"', b"}"),
    )

    assert status == 200


async def test_a_body_that_does_not_come_times_out(make_api: MakeApi) -> None:
    async def route(*_: Any) -> None:
        raise AssertionError("no route may see it")

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    refusals = Refusals()
    app = Reception(route, tokens=(), refusals=refusals, body_timeout_s=0.0)

    status, _, problem = await ask(app, "POST", "/admin/v1/rollback", receive=never)

    assert (status, problem["type"]) == (408, "urn:learning-sidecar:problem:too-slow")
    assert refusals.counts == {"too_slow": 1}


async def test_a_client_that_leaves_inside_its_body_changes_nothing(
    make_api: MakeApi, world: World
) -> None:
    async def left() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(IndexError):  # nothing was sent: there is nobody to answer
        await ask(make_api().app, "POST", "/admin/v1/rollback", receive=left)

    assert "rollback" not in world.actions()


async def test_a_refused_token_leaves_one_log_line_a_while_without_the_token(
    make_api: MakeApi,
) -> None:
    api = make_api(TOKEN)
    wrong = ((b"authorization", b"Bearer sesame-12345"),)

    with structlog.testing.capture_logs() as lines:
        for _ in range(50):
            await ask(api.app, "GET", "/admin/v1/status", headers=wrong)
        await ask(api.app, "POST", "/admin/v1/rollback")

    assert [
        (one["event"], one["reason"], one["source"], one["method"], one["path"]) for one in lines
    ] == [
        ("admin_refused", "unknown_token", "10.1.2.3", "GET", "/admin/v1/status"),
        ("admin_refused", "no_token", "10.1.2.3", "POST", "/admin/v1/rollback"),
    ]
    assert "sesame" not in json.dumps(lines)


def test_the_next_log_line_says_how_many_had_none() -> None:
    now = 100.0
    refusals = Refusals(clock=lambda: now)

    def note(reason: RefusalReason) -> None:
        refusals.note(reason, {"client": ("::1", 1), "method": "GET", "path": "/" + "x" * 5_000})

    with structlog.testing.capture_logs() as lines:
        for _ in range(4):
            note("unknown_token")
        now += LOG_INTERVAL_S
        note("unknown_token")

    assert [one["unlogged_before"] for one in lines] == [0, 3]
    assert max(len(one["path"]) for one in lines) == 200
    assert refusals.counts["unknown_token"] == 5


async def test_refusals_are_a_metric_by_reason(make_api: MakeApi) -> None:
    api = make_api(TOKEN)
    for headers in ((), ((b"authorization", b"Bearer x"),), ((b"authorization", b"Basic x"),)):
        await ask(api.app, "GET", "/admin/v1/status", headers=headers)

    shown = await api.client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})

    assert 'sidecar_admin_refused_total{reason="no_token"} 2.0' in shown.text
    assert 'sidecar_admin_refused_total{reason="unknown_token"} 1.0' in shown.text
    assert 'sidecar_admin_refused_total{reason="too_large"} 0.0' in shown.text


async def test_two_authorization_headers_are_refused(make_api: MakeApi) -> None:
    wrong = (b"authorization", b"Bearer wrong")

    status, _, _ = await ask(
        make_api(TOKEN).app, "GET", "/admin/v1/status", headers=(AUTHORIZED, wrong)
    )

    assert status == 400


def test_a_token_is_compared_by_its_bytes() -> None:
    digest = hashlib.sha256("schlüssel".encode()).hexdigest()

    assert grant_of("bearer  schlüssel ".encode(), [digest.upper()]).name == f"token:{digest[:8]}"
    for wrong in (None, b"", b"Bearer", b"Bearer ", b"Bearer \xff", b"Token schl"):
        with pytest.raises(UnauthorizedError):
            grant_of(wrong, [digest])


@contextlib.contextmanager
def served(app: Any) -> Iterator[tuple[str, int]]:
    """The application behind the server that control uses, with control's own configuration."""
    from deploy.process import admin_server

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server: uvicorn.Server = admin_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def answer_to(address: tuple[str, int], data: bytes) -> bytes:
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(data)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            received += part
    return received


def test_a_head_without_end_is_bounded(make_api: MakeApi) -> None:
    with (
        served(make_api(TOKEN).app) as address,
        socket.create_connection(address, timeout=60) as connection,
    ):
        connection.sendall(b"GET /admin/v1/status HTTP/1.1\r\nhost: x\r\nx-long: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 * 2**20:
                sent += connection.send(b"a" * 65_536)
        reply = read_all(connection)

    assert sent < 64 * 2**20, "the server took it all"
    assert reply == b"" or reply.startswith(b"HTTP/1.1 4")


def test_a_source_that_a_header_claims_is_not_believed(make_api: MakeApi, world: World) -> None:
    body = b'{"to": "base", "reason": "x"}'
    head = (
        b"POST /admin/v1/rollback HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        b"x-forwarded-for: 8.8.8.8\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s"
    )
    world.promote(world.register(1))

    with served(make_api().app) as address:
        assert answer_to(address, head % (len(body), body)).startswith(b"HTTP/1.1 200 ")

    from sidecar.store.models import AuditRow

    assert world.rows(AuditRow)[-1].source == "127.0.0.1"


@pytest.mark.parametrize("sent", [0, 500_000])
def test_a_stranger_reads_the_reply_whether_he_sends_his_body_or_not(
    make_api: MakeApi, sent: int
) -> None:
    head = b"POST /admin/v1/rollback HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n"

    with served(make_api(TOKEN).app) as address:
        reply = answer_to(address, head + b"x" * sent)

    assert reply.startswith(b"HTTP/1.1 401 ")
    assert b"application/problem+json" in reply
