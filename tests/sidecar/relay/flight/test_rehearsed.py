"""Requests with the ticket of a rehearsal: the pinned adapter answers, no user's figure moves."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sidecar.rehearsals import FILE, Attempt, attempt_headers, make_secret, read_ticket
from sidecar.routing.table import RoutingTable
from support import api_keys
from support.fake_vllm import FakeVllm
from support.migrated_store import open_migrated
from support.proxy_kit import FreePort, Running, StartProxy, Wire

MODEL = "smollm2-135m"
CHAMPION, CANARY = f"{MODEL}--v9-0123456789ab", f"{MODEL}--v10-ba9876543210"
ALL_TO_THE_CANARY = RoutingTable(
    model=MODEL,
    champion=CHAMPION,
    canary=CANARY,
    canary_weight_bp=10_000,
    salt="one",
    generation=1,
)
NOW = 1_000_000.0
ATTEMPT = Attempt(
    session="rehearsal-1", task="ex_1", project="shop", adapter=CHAMPION, expires_at=int(NOW) + 60
)
OF_REHEARSALS = "sidecar_rehearsal_requests"
OF_NO_USER = (
    OF_REHEARSALS,
    "sidecar_captures_kept",
    "sidecar_capture_pending_bytes",
    "sidecar_event_loop_lag",
    "sidecar_own_fields",
    "sidecar_replica_",
)


def lines(headers: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def figures(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(map(str, sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.startswith(OF_NO_USER) and sample.value
    }


async def guarded(start_proxy: StartProxy, port: int) -> Running:
    running = await start_proxy(
        clock=lambda: NOW,
        access={"mode": "keys"},
        serving={"api_key": "vllm-own-key"},
        proxy={"port": port},
        capture={"sample_rate": 0.0},
    )
    running.proxy.routing.table = ALL_TO_THE_CANARY
    return running


async def test_the_pinned_adapter_answers_and_no_users_figure_moves(
    state_dir: Path, free_port: FreePort, start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    database = open_migrated(state_dir / "store.db")
    key = api_keys.create(database, project="shop", requests_per_minute=1)[1]
    database.close()
    running = await guarded(start_proxy, free_port())
    item = wire.recording("chat.plain")
    answer = wire.recording("chat.asked").body.replace(MODEL.encode(), CHAMPION.encode())
    fake_vllm.play(wire.whole_reply(answer))
    sent = attempt_headers(make_secret(state_dir), ATTEMPT)
    own = f"Authorization: Bearer {key}\r\nx-sidecar-capture: off\r\nx-sidecar-adapter: base\r\n"
    before = figures(running.proxy.metrics.registry)

    for headers in (lines(sent), lines(sent) + own, lines(sent) + own):
        reply = wire.split(await running.send(wire.post(item.request, headers=headers)))
        assert reply[0] == "HTTP/1.1 200 OK"
        assert reply[1]["x-sidecar-adapter"] == CHAMPION

    exchanges = await running.captured(3)  # although nothing of users is recorded
    for one in exchanges:
        assert (one.origin, one.task, one.session_key) == (
            "rehearsal",
            "ex_1",
            "h:shop/rehearsal-1",
        )
        assert (one.arm, one.adapter, one.project, one.key_id) == (
            "rehearsal",
            CHAMPION,
            "shop",
            "",
        )
    asked = [json.loads(request.body)["model"] for request in fake_vllm.requests]
    assert asked == [CHAMPION] * 3
    assert {one.headers["authorization"] for one in fake_vllm.requests} == {"Bearer vllm-own-key"}
    assert running.metric(f"{OF_REHEARSALS}_total", outcome="ok") == 3
    assert figures(running.proxy.metrics.registry) == before
    user = wire.post(item.request, headers=f"Authorization: Bearer {key}\r\n")
    assert wire.split(await running.send(user))[0] == "HTTP/1.1 200 OK"  # its one request a minute


@pytest.mark.parametrize(
    "change",
    [
        {"x-sidecar-session": "another"},
        {"x-sidecar-task": "ex_2"},
        {"x-sidecar-session": ""},
        {"x-sidecar-rehearsal": "1"},
        {"x-sidecar-rehearsal": f"{int(NOW) + 60}:shop:{'0' * 32}:{CHAMPION}"},
        {"x-sidecar-rehearsal": "\xff:\xff:\xff:\xff"},
    ],
)
async def test_a_ticket_serves_for_its_own_session_and_task_alone(
    change: dict[str, str],
    state_dir: Path,
    free_port: FreePort,
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
) -> None:
    open_migrated(state_dir / "store.db").close()
    running = await guarded(start_proxy, free_port())
    sent = attempt_headers(make_secret(state_dir), ATTEMPT) | change
    request = wire.post(wire.recording("chat.plain").request, headers=lines(sent))

    status, _, body = wire.split(await running.send(request))

    assert status == "HTTP/1.1 403 Forbidden"
    assert "x-sidecar-rehearsal" in json.loads(body)["error"]["message"]
    assert not fake_vllm.requests
    assert running.metric("sidecar_access_denied_total", reason="rehearsal") == 1


@pytest.mark.parametrize("kind", ["outcomes", "feedback"])
async def test_a_ticket_tells_of_nobodys_session(
    kind: str,
    state_dir: Path,
    free_port: FreePort,
    start_proxy: StartProxy,
    wire: Wire,
) -> None:
    open_migrated(state_dir / "store.db").close()
    running = await guarded(start_proxy, free_port())
    sent = lines(attempt_headers(make_secret(state_dir), ATTEMPT))
    body = json.dumps({"session_id": "a-users-session", "success": False})
    request = (
        f"POST /sidecar/v1/{kind} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\n{sent}Content-Length: {len(body)}\r\n\r\n{body}"
    )

    status, _, _ = wire.split(await running.send(request.encode()))

    assert status == "HTTP/1.1 403 Forbidden"
    assert running.metric("sidecar_access_denied_total", reason="rehearsal") == 1


def test_a_ticket_ends_with_its_time_and_with_its_secret(tmp_path: Path) -> None:
    secret = make_secret(tmp_path)
    assert make_secret(tmp_path) == secret
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600

    def read(headers: dict[str, str], of: bytes = secret, now: float = NOW) -> Attempt | None:
        shown = {name.encode(): value.encode() for name, value in headers.items()}
        return read_ticket(of, shown, now)

    sent = attempt_headers(secret, ATTEMPT)
    assert read(sent) == ATTEMPT
    assert read(sent, now=NOW + 60) is None
    assert read(sent, of=os.urandom(32)) is None
    other = attempt_headers(secret, replace(ATTEMPT, project="another"))["x-sidecar-rehearsal"]
    assert read({**sent, "x-sidecar-rehearsal": other.replace("another", "shop")}) is None
