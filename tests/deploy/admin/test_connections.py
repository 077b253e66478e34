"""Clients that never finish a request do not keep others out."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from deploy.admin import wire
from deploy.admin.context import AdminContext
from deploy.engine.reconcile import Fleet
from support.served_admin import served_admin

if TYPE_CHECKING:
    from tests.deploy.conftest import World

STATIC = b"GET /static/htmx.min.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HALF = b"GET /admin/v1/status HTTP/1.1\r\nHost: 127"


@pytest.fixture
def port(world: World) -> Iterator[int]:
    context = AdminContext(
        database=world.database, model="m", rules=world.rules, fleet=Fleet({}), clock=world.clock
    )
    with served_admin(context) as port:
        yield port


def connect(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(sent)
    return client


def never_read(port: int, request: bytes, times: int = 400) -> socket.socket:
    """Ask for more than the system keeps of it, and read nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    with suppress(BlockingIOError):
        client.send(request * times)
    return client


def closed(client: socket.socket) -> bool:
    """Wait until the other side closes, without reading anything."""
    waits = select.poll()
    waits.register(client, 0)
    return bool(waits.poll(30_000))


def ended(client: socket.socket) -> bool:
    """Wait until the other side closes. Returns: False when it says something instead."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half a head"])
def test_a_head_that_never_ends_is_given_up(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.2)
    with connect(port, sent) as client:
        assert ended(client)


def test_half_a_head_after_a_whole_request_is_given_up_too(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.2)
    with connect(port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as client:
        found = b""
        while not found.endswith(b"}"):
            found += client.recv(65_536)
        client.sendall(HALF)
        assert ended(client)


def test_a_head_that_comes_in_time_is_answered_however_slow_its_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.5)
    with connect(port, HALF) as client:
        client.sendall(b".0.0.1\r\n\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 200")
    url = f"http://127.0.0.1:{port}/admin/v1/events?for_s=1"
    with httpx.stream("GET", url, timeout=30) as stream:
        assert b"".join(stream.iter_raw()).startswith(b":")


def test_a_client_that_reads_nothing_is_given_up(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STUCK_S", 0.2)
    with never_read(port, STATIC) as client:
        assert closed(client)


def test_the_last_of_what_a_closing_connection_sends_is_given_up_too(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STUCK_S", 0.2)
    last = STATIC.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with never_read(port, STATIC * 200 + last, times=1) as client:
        assert closed(client)


def test_who_reads_slowly_is_served_and_who_stops_is_dropped() -> None:
    """By hand: 100 bytes wait, 60 are left, then 60 still."""
    unsent = [100, 60, 60, 60]
    calls: list[str] = []

    class Transport:
        def get_write_buffer_size(self) -> int:
            return unsent.pop(0)

        def get_extra_info(self, name: str) -> None:
            return None

        def abort(self) -> None:
            calls.append("abort")

    class Loop:
        def call_later(self, after_s: float, _: object) -> None:
            calls.append(f"look again in {after_s:g} s")

    one: Any = wire.AdminConnection.__new__(wire.AdminConnection)
    one.transport, one.loop = Transport(), Loop()

    one._watch_writing()
    one._has_read()
    one._has_read()

    assert calls == ["look again in 20 s", "look again in 20 s", "abort"]


def test_those_that_read_nothing_make_room_for_those_that_ask(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.AdminConnection, "most", 5)
    monkeypatch.setattr(wire, "STUCK_S", 3_600.0, raising=False)
    stuck = [never_read(port, STATIC) for _ in range(5)]
    try:
        answered = sum(_answers(port) for _ in range(20))
        assert answered > 0
        assert any(not _is_open(one) for one in stuck), "one of them was closed for it"
    finally:
        for one in stuck:
            one.close()


def _answers(port: int) -> bool:
    """False while none of the others counts as stuck yet."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30).status_code == 200
    except httpx.TransportError:
        time.sleep(0.1)
        return False


def test_those_that_ask_nothing_make_room_for_those_that_ask(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.AdminConnection, "most", 5)
    waiting = [connect(port, HALF) for _ in range(12)]
    deadline = time.monotonic() + 30
    try:
        assert ended(waiting[0])
        for _ in range(3):
            reply = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30)
            assert reply.status_code == 200
        still = [one for one in waiting if _is_open(one)]
        assert len(still) <= 5
        assert time.monotonic() < deadline
    finally:
        for one in waiting:
            one.close()


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    waits = select.poll()
    waits.register(client, 0)
    if waits.poll(0):
        return False  # reset, whatever of its replies is unread
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
