"""Each agent of `examples/agents/` works on three tickets through a proxy, before a vLLM that plays
a script; what the proxy wrote is read from the store, as ingest fills it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from demo.stack import ROOT
from ingest.intake.bus import open_bus
from ingest.intake.choose import Sessions
from ingest.intake.consume import consume
from sidecar.proxy import Proxy
from sidecar.settings import Settings
from sidecar.store.models import ExchangeRow, FeedbackRow
from support.fake_vllm import FakeVllm, SeenRequest, whole_reply
from support.migrated_store import open_migrated
from tests.clients.conftest import CLIENTS_PYTHON

EXAMPLES = ROOT / "examples" / "agents"
NODE_PACKAGES = CLIENTS_PYTHON.parents[1] / "node_modules"
CUSTOMERS = ("ada", "bob", "eve")
MOST_TURNS = 6
MODEL = "support"


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": json.dumps(arguments)}


def script(request: SeenRequest) -> list[bytes]:
    """Refund ada's order, look for bob's again and again, and call a tool for eve that is none."""
    messages = json.loads(request.body)["messages"]
    customer = next(one for one in CUSTOMERS if one in str(messages))
    turn = sum(one["role"] == "tool" for one in messages)
    calls = {
        "ada": [call("find_order", customer="ada"), call("refund", order="A7")],
        "bob": [call("find_order", customer="bob")] * MOST_TURNS,
        "eve": [call("no_such_tool")] * MOST_TURNS,
    }[customer][turn : turn + 1]
    tools = [{"id": f"call_{turn}", "type": "function", "function": one} for one in calls]
    said = {"content": None, "tool_calls": tools} if tools else {"content": "Done."}
    choice = {
        "index": 0,
        "message": {"role": "assistant", **said},
        "finish_reason": "tool_calls" if tools else "stop",
    }
    reply = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    }
    return [whole_reply(json.dumps(reply).encode())]


@contextlib.asynccontextmanager
async def running_proxy(folder: Path) -> AsyncIterator[tuple[str, FakeVllm]]:
    """URL of a proxy with its defaults, and the vLLM behind it; at the end all is in the outbox."""
    vllm = FakeVllm(script=script, models=[MODEL])
    await vllm.start()
    settings = Settings(
        state_dir=folder,
        serving={"upstreams": (f"http://127.0.0.1:{vllm.port}",), "model": MODEL},
        proxy={"port": 0},
        bus={"url": f"sqlite:///{folder}/outbox.db"},
        store={"url": f"sqlite:///{folder}/store.db"},
    )
    proxy = Proxy(settings)
    try:
        yield f"http://127.0.0.1:{await proxy.start()}", vllm
    finally:
        await proxy.stop()
        await vllm.stop()


@contextlib.asynccontextmanager
async def watched_way_out() -> AsyncIterator[tuple[str, list[bytes]]]:
    """URL to name as the HTTPS proxy of a process, and what was asked of it: whom to connect to."""
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def command(example: str, folder: Path) -> tuple[str | Path, ...]:
    """How to run an example. Node looks for packages beside the script, so that is copied there."""
    if not example.endswith(".js"):
        return CLIENTS_PYTHON, EXAMPLES / example
    script = folder / example
    script.write_bytes((EXAMPLES / example).read_bytes())
    (folder / "package.json").write_bytes((EXAMPLES / "package.json").read_bytes())
    (folder / "node_modules").symlink_to(NODE_PACKAGES)
    return "node", script


async def run(example: str, folder: Path, url: str, way_out: str) -> list[str]:
    """What the example prints for the three customers."""
    own = {"PROXY_URL": url, "MODEL": MODEL, "OPENAI_API_KEY": "sk-test", "https_proxy": way_out}
    child = await asyncio.create_subprocess_exec(
        *command(example, folder),
        *CUSTOMERS,
        env={**os.environ, **own, "no_proxy": "127.0.0.1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()[-4000:]
    return said.decode().splitlines()


def stored(folder: Path) -> tuple[list[ExchangeRow], list[FeedbackRow]]:
    """Move the outbox into a new store, and read it."""
    with (
        closing(open_bus(f"sqlite:///{folder}/outbox.db")) as bus,
        closing(open_migrated(folder / "ingested.db")) as database,
    ):
        consume(bus, database, limit=1_000, sessions=Sessions(held_out_rate=0.0), now=2e9)
        with database.read() as session:
            exchanges = session.scalars(select(ExchangeRow).order_by(ExchangeRow.started_at)).all()
            outcomes = session.scalars(select(FeedbackRow).order_by(FeedbackRow.received_at)).all()
            return list(exchanges), list(outcomes)


@pytest.mark.parametrize(
    "example",
    [
        "openai_agents.py",
        "langgraph_agent.py",
        "pydantic_ai_agent.py",
        "openai_node.js",
        "vercel_ai.js",
    ],
)
async def test_an_agent_keeps_its_session_over_all_turns_and_reports_how_it_ended(
    example: str, tmp_path: Path
) -> None:
    if not CLIENTS_PYTHON.exists():
        pytest.skip(f"no {CLIENTS_PYTHON.relative_to(ROOT)} here: `make test` makes it")
    if example.endswith(".js") and not NODE_PACKAGES.exists():
        pytest.skip("no npm was here when scripts/setup made .venv-clients")

    async with running_proxy(tmp_path) as (url, vllm), watched_way_out() as (way_out, asked):
        said = await run(example, tmp_path, url, way_out)
    exchanges, outcomes = stored(tmp_path)

    assert (said[0], len(said)) == ("Done.", 3)
    turns = {name: [one for one in exchanges if one.task == f"refund-{name}"] for name in CUSTOMERS}
    assert sum(map(len, turns.values())) == len(exchanges) == len(vllm.requests)
    assert (len(turns["ada"]), len(turns["bob"])) == (3, MOST_TURNS)
    assert len(turns["eve"]) in range(1, MOST_TURNS + 1)
    names = [{one.session_key for one in turns[name]} for name in CUSTOMERS]
    assert [len(one) for one in names] == [1, 1, 1]
    assert all(key.startswith("h:ticket-") for (key,) in names)
    last_of_ada = json.loads(vllm.requests[2].body)["messages"]
    results = [one["content"] for one in last_of_ada if one["role"] == "tool"]
    assert results == ["A7", "refunded A7"]
    told = [(one.kind, one.target_kind, {one.target}, one.success) for one in outcomes]
    assert told == [
        ("outcome", "session", name, success)
        for name, success in zip(names, (True, False, False), strict=True)
    ]
    assert [one.session_id for one in outcomes] == [turns[name][0].session_id for name in CUSTOMERS]
    assert asked == []
