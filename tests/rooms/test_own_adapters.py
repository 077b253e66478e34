"""Two keys, two lines of adapters: what control decides for one project reaches that one alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from demo.ports import free_port
from deploy.registry import audit, canaries, routing_writer, transitions
from deploy.registry.canary_rule import Move
from deploy.registry.rollback import rollback
from sidecar.proxy import Proxy
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow
from support import api_keys
from support.fake_vllm import FakeVllm, whole_reply
from support.migrated_store import open_migrated
from support.proxy_kit import MemorySink, post, split

MODEL, OWN = "m", "m@@support"
SHARED_V1, OWN_V1 = "m--v1-aaaaaaaaaaaa", "m@@support--v1-bbbbbbbbbbbb"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = open_migrated(tmp_path / "store.db")
    with database.write() as session:
        for line in (MODEL, OWN):
            routing_writer.initialise(session, line, now=0.0, actor=audit.CONTROL)
    yield database
    database.close()


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    message = {"role": "assistant", "content": "Hello."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
    fake = FakeVllm(script=lambda _: [whole_reply(body)])
    fake.models = [MODEL, SHARED_V1, OWN_V1]
    await fake.start()
    yield fake
    await fake.stop()


def register(database: Database, line: str, name: str) -> None:
    with database.write() as session:
        session.add(
            AdapterRow(
                name=name,
                model=line,
                version=1,
                digest=name[-12:] * 5,
                path="/nowhere",
                parent="base",
                state="registered",
                created_at=1.0,
            )
        )


def promote(database: Database, line: str, name: str) -> None:
    """Take a version through a canary that passes."""
    with database.write() as session:
        begun = transitions.begin(
            session, model=line, candidate=name, steps=(5000,), now=1.0, actor="t"
        )
        for move in (
            Move(to="gating", candidate_state="gating", reason="gating"),
            Move(to="ramping", candidate_state="ramping", reason="ramping"),
            Move(to="promoted", candidate_state="champion", reason="good"),
        ):
            canary = canaries.to_canary(canaries.find_row(session, begun.canary_id))
            transitions.apply(session, canary, move, evidence={}, now=2.0)


async def test_a_promotion_and_a_rollback_reach_the_users_of_their_line_alone(
    database: Database, vllm: FakeVllm, tmp_path: Path
) -> None:
    keys = {
        project: api_keys.create(database, project=project)[1] for project in ("support", "shop")
    }
    port = free_port()
    proxy = Proxy(
        Settings(
            state_dir=tmp_path,
            serving={
                "upstreams": (f"http://127.0.0.1:{vllm.port}",),
                "model": MODEL,
                "own_adapters": ("support",),
            },
            access={"mode": "keys"},
            proxy={"port": port, "drain_timeout_s": 1.0},
            bus={"url": f"sqlite:///{tmp_path}/outbox.db"},
            store={"url": f"sqlite:///{tmp_path}/store.db"},
        ),
        sink=MemorySink(),
    )
    await proxy.start()

    async def answering() -> dict[str, str]:
        proxy.lines.source.poll()
        found = {}
        for project, key in keys.items():
            body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(body.encode(), headers=f"Authorization: Bearer {key}\r\n"))
            line, headers, _ = split(await reader.read())
            writer.close()
            assert line == "HTTP/1.1 200 OK"
            found[project] = headers["x-sidecar-adapter"]
        return found

    try:
        assert await answering() == {"support": "base", "shop": "base"}

        register(database, MODEL, SHARED_V1)
        promote(database, MODEL, SHARED_V1)
        assert await answering() == {"support": "base", "shop": SHARED_V1}

        register(database, OWN, OWN_V1)
        promote(database, OWN, OWN_V1)
        assert await answering() == {"support": OWN_V1, "shop": SHARED_V1}

        rollback(database, OWN, reason="rude", actor="me", now=3.0)
        assert await answering() == {"support": "base", "shop": SHARED_V1}

        rollback(database, OWN, to=OWN_V1, reason="it was good", actor="me", now=4.0)
        rollback(database, MODEL, reason="rude", actor="me", now=5.0)
        assert await answering() == {"support": OWN_V1, "shop": "base"}
    finally:
        await proxy.stop()
