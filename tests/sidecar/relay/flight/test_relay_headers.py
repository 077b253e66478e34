"""What single headers do: naming an adapter, switching capture off, retries, traces."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.routing.table import RoutingTable
from support import api_keys
from support.fake_vllm import FakeVllm
from support.migrated_store import open_migrated
from support.proxy_kit import FreePort, Running, StartProxy, Wire

BASE = "smollm2-135m"
CHAMPION, CANARY = f"{BASE}--v12-0123456789ab", f"{BASE}--v13-ba9876543210"
OLD = f"{BASE}--v1-000000000000"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def ask(
    running: Running,
    wire: Wire,
    headers: str = "",
    name: str = "chat.plain",
) -> Any:
    item = wire.recording(name)
    sent = wire.post(item.request, path=item.path, headers=headers)
    return wire.split(await running.send(sent))


@pytest.fixture
async def operated(start_proxy: StartProxy, fake_vllm: FakeVllm) -> Any:
    """A proxy on the loopback without keys, where everybody operates; a champion and a canary."""
    fake_vllm.models = [BASE, CHAMPION, CANARY, OLD]
    running = await start_proxy()
    url = f"http://127.0.0.1:{fake_vllm.port}"
    await running.metric_reaches(1, "sidecar_replica_up", replica=url)
    running.proxy.routing.table = RoutingTable(
        model=BASE, champion=CHAMPION, canary=CANARY, canary_weight_bp=5_000, generation=1
    )
    return running


@pytest.mark.parametrize(
    ("named", "adapter", "surface"),
    [
        ("base", "base", "chat"),
        ("champion", CHAMPION, "completions"),
        ("canary", CANARY, "responses"),
        ("v12", CHAMPION, "messages"),
        ("v1", OLD, "chat"),
        (OLD, OLD, "messages"),
    ],
)
async def test_an_operator_names_who_answers_and_the_exchange_is_not_captured(
    named: str, adapter: str, surface: str, operated: Running, fake_vllm: FakeVllm, wire: Wire
) -> None:
    item = wire.recording(f"{surface}.plain")

    line, headers, _ = await ask(
        operated, wire, f"x-sidecar-adapter: {named}\r\n", f"{surface}.plain"
    )

    assert (line, headers["x-sidecar-adapter"]) == ("HTTP/1.1 200 OK", adapter)
    [seen] = fake_vllm.requests
    asked = BASE if adapter == "base" else adapter
    assert seen.body == item.request.replace(BASE.encode(), asked.encode(), 1)
    assert "x-sidecar-adapter" not in seen.headers
    assert operated.metric("sidecar_captures_skipped_total", reason="pinned") == 1
    assert operated.sink.exchanges == []


async def test_an_adapter_that_is_not_there_is_refused_and_nobody_answers_for_it(
    operated: Running, fake_vllm: FakeVllm, wire: Wire
) -> None:
    for named in ("v2", "v", "v1x", "", BASE + "--v12", BASE, "../x", "Champion", "other--v1-0"):
        line, _, body = await ask(operated, wire, f"x-sidecar-adapter: {named}\r\n")

        assert line == "HTTP/1.1 404 Not Found", named
        assert json.loads(body)["error"]["param"] == "x-sidecar-adapter"
    assert fake_vllm.requests == []


async def test_a_named_adapter_that_vllm_lost_is_not_answered_for_by_another(
    operated: Running, fake_vllm: FakeVllm, wire: Wire
) -> None:
    gone = wire.recording("chat_unknown_model.plain")
    fake_vllm.script = lambda _: [gone.reply]

    line, headers, body = await ask(operated, wire, f"x-sidecar-adapter: {OLD}\r\n")

    assert (line, body) == ("HTTP/1.1 404 Not Found", gone.body)
    assert (headers["x-sidecar-adapter"], len(fake_vllm.requests)) == (OLD, 1)


async def test_only_a_key_with_the_scope_may_name_an_adapter(
    state_dir: Path, start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    database = open_migrated(state_dir / "store.db")
    presented = [
        api_keys.create(database, project="p", scopes=frozenset(scopes))[1]
        for scopes in (("infer",), ("infer", "operate"))
    ]
    database.close()
    running = await start_proxy(access={"mode": "keys"})

    answers = [
        await ask(
            running,
            wire,
            f"Authorization: Bearer {key}\r\nx-sidecar-adapter: base\r\n",
            f"{surface}.plain",
        )
        for key in presented
        for surface in ("chat", "messages")
    ]

    assert [line.split()[1] for line, _, _ in answers] == ["403", "403", "200", "200"]
    assert json.loads(answers[0][2])["error"]["code"] == "insufficient_permissions"
    assert json.loads(answers[1][2])["error"]["type"] == "permission_error"
    assert len(fake_vllm.requests) == 2
    assert running.metric("sidecar_access_denied_total", reason="scope_operate") == 2


async def test_who_is_only_known_to_vllm_may_not_name_an_adapter(
    start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    running = await start_proxy(access={"mode": "upstream"})

    line, _, _ = await ask(running, wire, "x-sidecar-adapter: base\r\n")

    assert (line, fake_vllm.requests) == ("HTTP/1.1 403 Forbidden", [])


@pytest.mark.parametrize(
    ("capture", "headers", "name", "reason"),
    [
        ({}, "x-sidecar-capture:  OFF \r\n", "messages", "header"),
        ({"surfaces": {"messages": 0.0}}, "", "messages", "surface"),
        ({"surfaces": {"messages": 0.0}}, "", "chat", None),
        ({"projects": {"default": 0.0}}, "", "chat", "project"),
        ({"sample_rate": 0.0}, "", "completions", "not_sampled"),
        ({}, "x-sidecar-capture: offline\r\n", "chat", None),
    ],
)
async def test_what_is_captured_follows_header_surface_and_project(
    capture: dict[str, Any],
    headers: str,
    name: str,
    reason: str | None,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
) -> None:
    item = wire.recording(f"{name}.plain")
    fake_vllm.script = lambda _: [item.reply]
    running = await start_proxy(capture=capture)

    await ask(running, wire, headers, f"{name}.plain")

    if reason is None:
        assert (await running.captured(1))[0].surface == name
    else:
        assert running.metric("sidecar_captures_skipped_total", reason=reason) == 1
        assert fake_vllm.requests[0].body == item.request
        assert running.sink.exchanges == []


async def test_a_request_and_the_retries_that_its_sdk_counts_are_one_turn(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    item = wire.recording("chat.asked")
    replies = iter([wire.whole_reply(b"{}", "500 Internal Server Error")] * 4 + [item.reply] * 2)
    fake_vllm.script = lambda _: [next(replies)]
    running = await start_proxy()

    for count in (0, 1, 2):
        await ask(running, wire, f"x-stainless-retry-count: {count}\r\n")
    await ask(running, wire, "x-stainless-retry-count: 0\r\n")

    first, second, third, another = await running.captured(4)
    assert [item.retry_count for item in (first, second, third, another)] == [0, 1, 2, 0]
    assert first.turn_id == second.turn_id == third.turn_id
    assert another.turn_id == another.exchange_id
    # Each that failed was asked twice: with our fields, and without.
    sent = [seen.headers["x-stainless-retry-count"] for seen in fake_vllm.requests]
    assert sent == ["0", "0", "1", "1", "2", "0"]


async def test_an_idempotency_key_names_the_turn_also_in_another_proxy(
    fake_vllm: FakeVllm, start_proxy: StartProxy, free_port: FreePort, wire: Wire
) -> None:
    item = wire.recording("chat.asked")
    fake_vllm.script = lambda _: [item.reply]
    two = [await start_proxy(proxy={"port": free_port()}) for _ in range(2)]

    for running in two:
        await ask(running, wire, "Idempotency-Key: order-7\r\n")
    await ask(two[0], wire, "Idempotency-Key: order-8\r\n")

    [one], [two_a, two_b] = await two[1].captured(1), await two[0].captured(2)
    assert one.turn_id == two_a.turn_id != two_b.turn_id
    assert fake_vllm.requests[0].headers["idempotency-key"] == "order-7"


async def test_a_traceparent_goes_on_as_it_came_when_nobody_takes_spans(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    await ask(running, wire, f"TraceParent: {TRACE}\r\ntracestate: a=1\r\n")
    await ask(running, wire)

    first, second = fake_vllm.requests
    assert (first.headers["traceparent"], first.headers["tracestate"]) == (TRACE, "a=1")
    assert "traceparent" not in second.headers
    exchanges = await running.captured(2)
    assert [item.trace_id for item in exchanges] == ["4bf92f3577b34da6a3ce929d0e0e4736", ""]


@pytest.mark.parametrize("surface", ["chat", "messages"])
async def test_over_the_most_in_flight_a_request_is_refused_in_its_surfaces_shape(
    surface: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [go_on, wire.whole_reply(b"{}")]
    running = await start_proxy(proxy={"max_in_flight": 1})
    first = asyncio.create_task(ask(running, wire))
    await fake_vllm.asked()

    line, headers, body = await ask(running, wire, name=f"{surface}.plain")
    go_on.set()

    assert (line, headers["retry-after"]) == ("HTTP/1.1 503 Service Unavailable", "1")
    assert ("type" in json.loads(body)) is (surface == "messages")
    assert (await first)[0] == "HTTP/1.1 200 OK"
    assert (await ask(running, wire))[0] == "HTTP/1.1 200 OK"


async def test_vllm_away_and_a_wrong_header_are_told_in_the_shape_of_messages_there(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    await fake_vllm.stop()

    for header, status, kind in (
        ("", "502 Bad Gateway", "BadGatewayError"),
        ("x-sidecar-adapter: v99\r\n", "404 Not Found", "NotFoundError"),
        ("x-sidecar-best-of: 3\r\n", "400 Bad Request", "BadRequestError"),
    ):
        line, _, body = await ask(running, wire, header, "messages.plain")

        told = json.loads(body)
        assert line == f"HTTP/1.1 {status}"
        assert (told["type"], told["error"]["type"]) == ("error", kind)
        assert set(told["error"]) == {"type", "message"}
