"""Feedback over the wire: who may send it, what is answered, and what is on the disk then."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sidecar.capture.outbox import OutboxReader
from sidecar.feedback import Feedback, decode_feedback
from sidecar.store.keyring import BUS, Keyring, is_sealed
from support import api_keys
from support.fake_vllm import FakeVllm, whole_reply
from support.migrated_store import open_migrated
from support.proxy_kit import Running, StartProcess, StartProxy, Target, post, split

EXCHANGE = "ex_01ARZ3NDEKTSV4RRFFQ69G5FAV"
GOOD = {"exchange_id": EXCHANGE, "score": 1}
FEEDBACK, OUTCOMES = "/sidecar/v1/feedback", "/sidecar/v1/outcomes"


async def send(
    target: Target, body: Any, path: str = FEEDBACK, **headers: str
) -> tuple[int, dict[str, str], Any]:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    line, found, reply = split(await target.send(post(data, headers=lines, path=path)))
    return int(line.split()[1]), found, json.loads(reply)


def new_key(state_dir: Path, **values: Any) -> str:
    database = open_migrated(state_dir / "store.db")
    _, secret = api_keys.create(database, project="shop", **values)
    database.close()
    return secret


def written(state_dir: Path) -> list[Feedback]:
    reader = OutboxReader(state_dir / "outbox.db")
    try:
        return [decode_feedback(row.payload) for row in reader.read(0, 1_000)]
    finally:
        reader.close()


async def test_202_means_that_the_record_is_in_the_outbox(
    start_proxy: StartProxy, state_dir: Path
) -> None:
    running = await start_proxy()

    status, _, reply = await send(running, GOOD, x_sidecar_user="bob")
    _, _, second = await send(running, {"session_id": "s", "success": False}, OUTCOMES)

    first, outcome = written(state_dir)
    assert (status, reply) == (202, {"id": first.feedback_id, "status": "queued"})
    assert (first.target, first.score, first.source) == (EXCHANGE, 1.0, "user:bob")
    assert (outcome.feedback_id, outcome.target) == (second["id"], "h:s")
    assert outcome.success is False
    assert running.metric("sidecar_feedback_accepted_total", kind="feedback") == 1
    assert running.metric("sidecar_feedback_accepted_total", kind="outcome") == 1


async def test_a_client_cannot_name_its_project(start_proxy: StartProxy, state_dir: Path) -> None:
    running = await start_proxy()

    await send(running, GOOD, x_sidecar_project="other", x_sidecar_key_id="k9")

    (record,) = written(state_dir)
    assert (record.project, record.key_id) == ("default", "")


async def test_refusals_look_like_the_proxys_others_and_are_counted(
    start_proxy: StartProxy, state_dir: Path
) -> None:
    running = await start_proxy()

    bad, _, problem = await send(running, {**GOOD, "score": True})
    unreadable, _, _ = await send(running, b"{")
    long, _, _ = await send(running, b" " * 20_000)
    key, _, _ = await send(running, GOOD, Idempotency_Key="x" * 257)

    assert (bad, unreadable, long, key) == (422, 400, 413, 400)
    assert problem["error"]["code"] == 422
    assert problem["error"]["param"] == "score"
    for reason in ("invalid", "not_json", "too_large", "idempotency_key"):
        assert running.metric("sidecar_feedback_refused_total", reason=reason) == 1
    assert not (state_dir / "outbox.db").exists()


async def test_a_long_body_is_refused_before_it_is_here(start_proxy: StartProxy) -> None:
    running = await start_proxy()
    head = b"POST /sidecar/v1/feedback HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"

    line, _, body = split(await running.send(head + b" " * 70_000))

    assert line.startswith("HTTP/1.1 413 ")
    assert json.loads(body)["error"]["param"] == "comment"


async def test_other_methods_and_paths_are_refused(start_proxy: StartProxy) -> None:
    running = await start_proxy()
    get = b"GET /sidecar/v1/feedback HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    assert split(await running.send(get))[0] == "HTTP/1.1 405 Method Not Allowed"
    status, _, _ = await send(running, GOOD, "/sidecar/v1/other")
    assert status == 404


async def test_feedback_needs_a_key_and_has_the_project_of_the_key(
    start_proxy: StartProxy, state_dir: Path
) -> None:
    secret = new_key(state_dir)
    running = await start_proxy(access={"mode": "keys"})

    nobody, _, _ = await send(running, GOOD)
    wrong, _, _ = await send(running, b" " * 70_000, authorization="Bearer sk-wrong")
    known, _, _ = await send(running, GOOD, authorization=f"Bearer {secret}")

    (record,) = written(state_dir)
    assert (nobody, wrong, known) == (401, 401, 202)
    assert record.project == "shop"
    assert record.source == f"key:{record.key_id}"


async def test_feedback_counts_against_the_limits_of_the_key(
    start_proxy: StartProxy, state_dir: Path
) -> None:
    secret = new_key(state_dir, requests_per_minute=1)
    running = await start_proxy(access={"mode": "keys"})

    first, _, _ = await send(running, GOOD, authorization=f"Bearer {secret}")
    second, headers, _ = await send(running, GOOD, authorization=f"Bearer {secret}")

    assert (first, second) == (202, 429)
    assert "retry-after" in headers
    assert len(written(state_dir)) == 1


async def test_where_vllm_checks_the_keys_it_is_asked(
    start_proxy: StartProxy, fake_vllm: FakeVllm, state_dir: Path
) -> None:
    running = await start_proxy(access={"mode": "upstream"})
    fake_vllm.script = lambda seen: [
        whole_reply(b'{"data":[]}')
        if seen.headers.get("authorization") == "Bearer right"
        else whole_reply(b"{}", "401 Unauthorized")
    ]

    wrong, _, _ = await send(running, GOOD, authorization="Bearer wrong")
    right, _, _ = await send(running, GOOD, authorization="Bearer right")

    assert (wrong, right) == (401, 202)
    assert len(written(state_dir)) == 1


async def test_a_full_outbox_is_a_503_that_says_so(start_proxy: StartProxy) -> None:
    running = await start_proxy(proxy={"record_bytes": 10**12})

    first, _, _ = await send(running, GOOD)
    second, headers, reply = await send(running, GOOD)

    assert (first, second, headers["retry-after"]) == (202, 503, "1")
    assert "outbox_full" in reply["error"]["message"]
    assert running.metric("sidecar_feedback_refused_total", reason="outbox_full") == 1


async def test_a_locked_outbox_is_a_503_for_all_that_wait(
    start_proxy: StartProxy, state_dir: Path
) -> None:
    running: Running = await start_proxy()
    await send(running, GOOD)  # the file is there

    with closing(sqlite3.connect(state_dir / "outbox.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        replies = await asyncio.gather(*(send(running, GOOD) for _ in range(300)))
        other.execute("ROLLBACK")

    assert {status for status, _, _ in replies} == {503}
    assert {headers["retry-after"] for _, headers, _ in replies} == {"1"}
    assert (await send(running, GOOD))[0] == 202
    assert len(written(state_dir)) == 2


async def test_feedback_in_the_outbox_is_encrypted_with_the_stores_key(
    start_proxy: StartProxy, state_dir: Path
) -> None:
    key = base64.b64encode(b"k" * 32).decode()
    running = await start_proxy(store={"encryption_keys": f"k:{key}"})

    status, _, _ = await send(running, {**GOOD, "comment": "what a person wrote"})

    reader = OutboxReader(state_dir / "outbox.db")
    (row,) = reader.read(0, 10)
    reader.close()
    assert status == 202
    assert is_sealed(row.payload)
    opened = decode_feedback(Keyring({"k": b"k" * 32}).open(row.payload, BUS))
    assert opened.comment == "what a person wrote"


async def test_many_at_once_are_all_written(start_proxy: StartProxy, state_dir: Path) -> None:
    running: Running = await start_proxy()

    replies = await asyncio.gather(*(send(running, GOOD) for _ in range(50)))

    assert {reply["id"] for _, _, reply in replies} == {
        one.feedback_id for one in written(state_dir)
    }
    assert len(replies) == len({reply["id"] for _, _, reply in replies})


async def test_a_proxy_that_is_killed_after_202_has_the_record_on_disk(
    start_process: StartProcess, state_dir: Path
) -> None:
    child = await start_process()

    replies = await asyncio.gather(*(send(child, GOOD) for _ in range(8)))
    child.process.send_signal(signal.SIGKILL)
    await child.process.wait()

    assert {status for status, _, _ in replies} == {202}
    assert {reply["id"] for _, _, reply in replies} == {
        one.feedback_id for one in written(state_dir)
    }


@pytest.mark.parametrize("path", [FEEDBACK, OUTCOMES])
async def test_an_empty_body_is_a_400(start_proxy: StartProxy, path: str) -> None:
    running = await start_proxy()

    status, _, _ = await send(running, b"", path)

    assert status == 400
