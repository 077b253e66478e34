"""A project with adapters of its own: what happens in one line leaves the others as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from sidecar.lines import line_name, lines_of, project_of, public_model
from sidecar.routing.table import RoutingTable, decode_table, encode_table
from sidecar.store.database import Database
from sidecar.store.models import BreakerTripRow, RoutingRow, TableTakenRow
from support import api_keys
from support.fake_vllm import FakeVllm
from support.migrated_store import open_migrated
from support.proxy_kit import FreePort, Running, StartProxy, Wire

MODEL = "smollm2-135m"
OWN = f"{MODEL}@@support"
DEFAULT_CHAMPION = f"{MODEL}--v7-0123456789ab"
OWN_CHAMPION = f"{OWN}--v1-0123456789ab"
OWN_CANARY = f"{OWN}--v2-0123456789ab"
PROJECTS = ("support", "shop", "default")


def test_the_name_of_a_line_says_which_model_and_project_it_is_of() -> None:
    default, own = lines_of("m", ["a.b-c", "a.b-c"])

    assert (default.name, default.model, default.project) == ("m", "m", None)
    assert (own.name, own.model, own.project) == ("m@@a.b-c", "m", "a.b-c")
    assert (public_model(own.name), project_of(own.name)) == ("m", "a.b-c")
    assert line_name("m", None) == "m"


def test_each_project_is_of_one_line() -> None:
    lines = lines_of("m", ["a", "b"])

    answering = {p: [line.name for line in lines if line.has(p)] for p in ("a", "b", "c", None)}

    assert answering == {"a": ["m@@a"], "b": ["m@@b"], "c": ["m"], None: ["m"]}


def test_a_proxy_of_before_reads_the_table_of_the_default_line() -> None:
    old = '{"model":"m","champion":"m--v1","canary":null,"canary_weight_bp":0,"salt":"",' + (
        '"generation":3}'
    )

    assert encode_table(RoutingTable(model="m", champion="m--v1", generation=3)) == old
    assert decode_table(old).public_model == "m"


@pytest.fixture
def database(state_dir: Path) -> Iterator[Database]:
    database = open_migrated(state_dir / "store.db")
    put(database, RoutingTable(model=MODEL, champion=DEFAULT_CHAMPION, generation=5))
    yield database
    database.close()


def put(database: Database, table: RoutingTable) -> None:
    with database.write() as session:
        session.merge(
            RoutingRow(
                model=table.model,
                generation=table.generation,
                body=encode_table(table),
                updated_at=0.0,
            )
        )


@pytest.fixture
def keys(database: Database) -> dict[str, str]:
    """Project -> a key of it, whose owner may name adapters."""
    scopes = frozenset({"infer", "operate"})
    return {
        project: api_keys.create(database, project=project, scopes=scopes)[1]
        for project in PROJECTS
    }


@pytest.fixture
def start(start_proxy: StartProxy, free_port: FreePort, fake_vllm: FakeVllm) -> StartProxy:
    """StartProxy a proxy whose project `support` has adapters of its own."""
    fake_vllm.models = [MODEL, DEFAULT_CHAMPION, OWN_CHAMPION, OWN_CANARY]

    async def run(**proxy: Any) -> Running:
        return await start_proxy(
            access={"mode": "keys"},
            serving={"own_adapters": ("support",)},
            proxy={"port": free_port(), "routing_poll_s": 60.0, **proxy},
        )

    return run


def reply(wire: Wire, text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return wire.whole_reply(json.dumps({"object": "chat.completion", "choices": [choice]}).encode())


async def ask(
    running: Running, wire: Wire, key: str, *, user: int = 0, more: str = ""
) -> tuple[str, str]:
    """Returns: the adapter that answered by the reply's header, and the status line."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    headers = f"Authorization: Bearer {key}\r\nx-sidecar-session: u{user}\r\n{more}"
    sent = wire.post(json.dumps(body).encode(), headers=headers)
    line, found, _ = wire.split(await running.send(sent))
    return found.get("x-sidecar-adapter", ""), line.partition(" ")[2]


async def answering(running: Running, wire: Wire, keys: dict[str, str]) -> dict[str, str]:
    return {project: (await ask(running, wire, key))[0] for project, key in keys.items()}


async def test_the_line_of_the_keys_project_answers(
    database: Database, keys: dict[str, str], fake_vllm: FakeVllm, start: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [reply(wire, "Hello.")]
    running = await start()
    shared = {"shop": DEFAULT_CHAMPION, "default": DEFAULT_CHAMPION}

    assert await answering(running, wire, keys) == {**shared, "support": "base"}
    assert json.loads(fake_vllm.requests[0].body)["model"] == MODEL

    put(database, RoutingTable(model=OWN, champion=OWN_CHAMPION, generation=1))
    running.proxy.lines.source.poll()

    assert await answering(running, wire, keys) == {**shared, "support": OWN_CHAMPION}
    asked = {json.loads(one.body)["model"] for one in fake_vllm.requests}
    assert asked == {MODEL, DEFAULT_CHAMPION, OWN_CHAMPION}
    exchanges = await running.captured(6)
    assert {one.public_model for one in exchanges} == {MODEL}
    own = [one.adapter for one in exchanges if one.project == "support"]
    assert sorted(own) == ["base", OWN_CHAMPION]


async def test_a_change_of_one_line_leaves_the_other_and_is_told_for_each(
    database: Database, keys: dict[str, str], fake_vllm: FakeVllm, start: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [reply(wire, "Hello.")]
    put(database, RoutingTable(model=OWN, champion=OWN_CHAMPION, generation=9))
    running = await start()
    put(database, RoutingTable(model=MODEL, champion="base", generation=6))
    running.proxy.lines.source.poll()

    found = await answering(running, wire, keys)

    assert found == {"shop": "base", "default": "base", "support": OWN_CHAMPION}
    assert running.metric("sidecar_routing_generation") == 6
    assert running.metric("sidecar_project_routing_generation", project="support") == 9
    async with asyncio.timeout(60):
        while (taken := told(database)) != {(MODEL, 6), (OWN, 9)}:
            await asyncio.sleep(0.01)
    assert len(taken) == 2


def told(database: Database) -> set[tuple[str, int]]:
    with database.read() as session:
        return {(row.model, row.generation) for row in session.scalars(select(TableTakenRow))}


async def test_a_trip_takes_the_canary_of_one_line_out_and_no_other(
    database: Database, keys: dict[str, str], fake_vllm: FakeVllm, start: StartProxy, wire: Wire
) -> None:
    canary = f"{MODEL}--v8-0123456789ab"
    fake_vllm.models = [MODEL, DEFAULT_CHAMPION, OWN_CHAMPION, OWN_CANARY, canary]

    def script(request: Any) -> Sequence[bytes]:
        silent = json.loads(request.body)["model"] == OWN_CANARY
        return [reply(wire, "" if silent else "Hello.")]

    fake_vllm.script = script
    for line, champion, tried in (
        (OWN, OWN_CHAMPION, OWN_CANARY),
        (MODEL, DEFAULT_CHAMPION, canary),
    ):
        put(
            database,
            RoutingTable(
                model=line,
                champion=champion,
                canary=tried,
                canary_weight_bp=5_000,
                salt="one",
                generation=7,
            ),
        )
    running = await start()

    for user in range(80):
        await ask(running, wire, keys["support"], user=user)
    own = {(await ask(running, wire, keys["support"], user=user))[0] for user in range(80)}
    shared = {(await ask(running, wire, keys["shop"], user=user))[0] for user in range(40)}

    assert own == {OWN_CHAMPION}
    assert shared == {DEFAULT_CHAMPION, canary}
    assert running.metric("sidecar_project_breaker_open", project="support") == 1
    assert running.metric("sidecar_breaker_open") == 0
    async with asyncio.timeout(60):
        while not (trips := stored_trips(database)):
            await asyncio.sleep(0.01)
    assert trips == [(OWN, OWN_CANARY)]
    # Another proxy obeys the row in that line, and in that line alone.
    other = await start()
    again = {(await ask(other, wire, keys["support"], user=user))[0] for user in range(40)}
    apart = {(await ask(other, wire, keys["shop"], user=user))[0] for user in range(40)}
    assert (again, apart) == ({OWN_CHAMPION}, {DEFAULT_CHAMPION, canary})


def stored_trips(database: Database) -> list[tuple[str, str]]:
    with database.read() as session:
        return [(row.model, row.canary) for row in session.scalars(select(BreakerTripRow))]


async def test_an_operator_names_versions_of_the_own_line(
    database: Database, keys: dict[str, str], fake_vllm: FakeVllm, start: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [reply(wire, "Hello.")]
    put(database, RoutingTable(model=OWN, champion=OWN_CHAMPION, generation=1))
    running = await start()
    async with asyncio.timeout(60):
        while not any(replica.models for replica in running.proxy._watch._replicas.all):
            await asyncio.sleep(0.01)

    async def named(project: str, name: str) -> tuple[str, str]:
        more = f"x-sidecar-adapter: {name}\r\n"
        return await ask(running, wire, keys[project], more=more)

    assert await named("support", "v1") == (OWN_CHAMPION, "200 OK")
    assert await named("shop", "v7") == (DEFAULT_CHAMPION, "200 OK")
    assert (await named("shop", "v1"))[1] == "404 Not Found"
    assert await named("support", "base") == ("base", "200 OK")
    assert await named("support", OWN_CHAMPION) == (OWN_CHAMPION, "200 OK")
    assert (await named("shop", OWN_CHAMPION))[1] == "404 Not Found"
    assert (await named("support", DEFAULT_CHAMPION))[1] == "404 Not Found"


async def test_readiness_names_the_lines(
    database: Database, keys: dict[str, str], start: StartProxy, wire: Wire
) -> None:
    put(database, RoutingTable(model=OWN, champion=OWN_CHAMPION, generation=4))
    running = await start()

    _, _, body = wire.split(
        await running.send(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    )

    state = json.loads(body)
    assert state["routing"] == {"model": MODEL, "generation": 5}
    assert state["project_routing"] == {"support": {"generation": 4}}
