"""Changes as server-sent events: each once, in order, and what a client missed meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from deploy.admin import events
from sidecar.lines import Line
from sidecar.store.models import AuditRow

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World


def told(text: str) -> list[dict[str, Any]]:
    blocks = [one for one in text.split("\n\n") if one.startswith("id: ")]
    fields = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    return [{**one, "data": json.loads(one["data"])} for one in fields]


async def test_a_stream_begins_now_or_after_the_last_event_that_was_seen(
    world: World, api: Api
) -> None:
    world.promote(world.register(1))
    await api.post("/learner/pause", {"reason": "caf\u00e9\nnew line"})
    rows = world.rows(AuditRow)

    fresh = await api.get("/events", for_s=0)
    missed = await api.client.get(
        "/admin/v1/events?for_s=0", headers={"last-event-id": str(rows[-3].seq)}
    )

    assert fresh.headers["content-type"].startswith("text/event-stream")
    assert told(fresh.text) == []
    found = told(missed.text)
    assert [int(one["id"]) for one in found] == [row.seq for row in rows[-2:]]
    assert found[-1]["event"] == "learner.pause"
    assert found[-1]["data"]["reason"] == "caf\u00e9\nnew line"


async def test_an_event_has_all_that_the_audit_shows_of_its_row(world: World, api: Api) -> None:
    world.line = Line(name="m@@shop")
    name = world.register(1)
    world.promote(name)

    stream = await api.client.get("/admin/v1/events?for_s=0", headers={"last-event-id": "0"})

    listed = (await api.get("/audit", limit=200)).json()["items"][::-1]
    found = [one["data"] for one in told(stream.text)]
    assert found == listed
    about = {(one["project"], one["candidate"]) for one in found if "canary." in one["action"]}
    assert about == {("shop", name)}


async def test_a_change_during_the_stream_is_told(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.05)
    stream = asyncio.create_task(api.get("/events", for_s=1.5))
    await asyncio.sleep(0.5)
    await api.post("/learner/pause")

    assert [one["event"] for one in told((await stream).text)] == ["learner.pause"]


async def test_streams_are_bounded_and_a_bad_id_is_refused(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = await api.client.get("/admin/v1/events", headers={"last-event-id": "x"})
    monkeypatch.setattr(events, "MAX_STREAMS", 0)
    full = await api.get("/events", for_s=0)

    assert (bad.status_code, full.status_code) == (422, 503)


async def test_a_burst_gets_no_more_streams_than_there_are(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_STREAMS", 3)

    replies = await asyncio.gather(*(api.get("/events", for_s=1.0) for _ in range(12)))

    assert sorted(one.status_code for one in replies) == [200] * 3 + [503] * 9


def test_an_open_stream_does_not_hold_up_a_stop(api: Api) -> None:
    """`control` stops while its client stays; an open stream never ends by itself."""
    import socket
    import threading

    from deploy.process import admin_server

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = admin_server(api.app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET /admin/v1/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert b"200 OK" in client.recv(65_536)
            server.should_exit = True
            thread.join(60)

    assert not thread.is_alive()
