"""Clients that never finish a request do not keep others out."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from deploy.admin.context import AdminContext
from deploy.admin.wire import connections
from deploy.engine.fleet import Fleet
from support.served_admin import served_admin

if TYPE_CHECKING:
    from tests.deploy.conftest import World

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
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    with connect(port, sent) as client:
        assert ended(client)


def test_half_a_head_after_a_whole_request_is_given_up_too(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    with connect(port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as client:
        found = b""
        while not found.endswith(b"}"):
            found += client.recv(65_536)
        client.sendall(HALF)
        assert ended(client)


def test_a_head_that_comes_in_time_is_answered_however_slow_its_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with connect(port, HALF) as client:
        client.sendall(b".0.0.1\r\n\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 200")
    url = f"http://127.0.0.1:{port}/admin/v1/events?for_s=1"
    with httpx.stream("GET", url, timeout=30) as stream:
        assert b"".join(stream.iter_raw()).startswith(b":")


def test_those_that_ask_nothing_make_room_for_those_that_ask(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST", 5)
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
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
