"""Rows that a faulty disk damaged: the gate and the admin API live with them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import String
from structlog.testing import capture_logs

from deploy.admin.metrics import StoreCollector, render
from deploy.admin.problems import TYPE_PREFIX
from deploy.engine.reconcile import EngineView
from deploy.registry import api_keys
from deploy.registry.lineage import render_lineage, trace_lineage
from deploy.registry.rollback import rollback
from learner.runs.publish import Sealed, register
from sidecar.routing.table import RoutingTable, encode_table
from sidecar.store.database import count
from sidecar.store.models import (
    AdapterRow,
    AliasRow,
    AnswerRow,
    ApiKeyRow,
    CanaryRow,
    ChoiceRow,
    CounterRow,
    ExchangeRow,
    GroupRow,
    RoutingRow,
    RunRow,
)
from support.finished_run import finished_run

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World

NO_UTF8 = "CAST(x'ff80c3' AS TEXT)"
TEXTS = [column.name for column in ExchangeRow.__table__.columns if isinstance(column.type, String)]


def damage(world: World, table: Any, column: str, where: str, value: str = NO_UTF8) -> None:
    with closing(world.database.engine.raw_connection()) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute(f'UPDATE {table.__table__.name} SET "{column}" = {value} WHERE {where}')
        raw.execute("PRAGMA foreign_keys=ON")


@pytest.mark.parametrize("column", [*TEXTS, "request_body"])
async def test_a_damaged_held_out_exchange_does_not_hold_the_gate(
    world: World, column: str
) -> None:
    name = world.register(1)
    world.hold_out(6)
    damage(world, ExchangeRow, column, "exchange_id = 'x6'")
    controller = world.controller()

    for _ in range(12):
        await controller.tick()
        world.clock.now += 1.0

    assert world.canary(name).phase == "ramping"
    assert world.evidence(name)["gate"]["scored"] == 4


async def test_a_damaged_request_is_set_aside_and_counted(world: World) -> None:
    world.register(1)
    world.hold_out(6)
    damage(world, ExchangeRow, "request_body", "exchange_id = 'x6'", "x'00'")
    controller = world.controller()

    for _ in range(12):
        await controller.tick()
        world.clock.now += 1.0

    counts = {row.reason: row.count for row in world.rows(CounterRow) if row.stage == "gate"}
    assert counts == {"scored": 4, "unreadable": 1}


async def test_the_admin_api_shows_text_that_is_no_utf8(world: World, api: Api) -> None:
    exchange_id = world.serve("s")
    with world.database.write() as session:
        session.add(
            GroupRow(
                group_id="g",
                exchange_id=exchange_id,
                session_key="s",
                adapter="base",
                status="scored",
                created_at=1.0,
            )
        )
        session.flush()
        session.add(
            AnswerRow(
                group_id="g",
                index=0,
                origin="served",
                message_body=b"x\x9cc\x00\x00\x00\x01\x00\x01",
                token_ids=b"",
                logprobs=b"",
                temperature=1.0,
            )
        )
    for column in ("session_key", "adapter", "reason", "detail", "judge_model", "run_id"):
        damage(world, GroupRow, column, "group_id = 'g'")
    for column in ("session_key", "adapter", "arm", "surface", "outcome", "user"):
        damage(world, ExchangeRow, column, f"exchange_id = '{exchange_id}'")
    damage(world, ChoiceRow, "finish_reason", f"exchange_id = '{exchange_id}'")

    listed = await api.get("/groups")
    found = await api.get(f"/exchanges/{exchange_id}")
    funnel = await api.get("/funnel")
    status = await api.get("/status")

    assert [one.status_code for one in (listed, found, funnel, status)] == [200] * 4
    assert listed.json()["items"][0]["reason"] == "\ufffd" * 3
    assert found.json()["session_key"] == "\ufffd" * 3


def put_group(world: World, name: str) -> None:
    exchange_id = world.serve(name)
    with world.database.write() as session:
        session.add(
            GroupRow(
                group_id=name,
                exchange_id=exchange_id,
                session_key="s",
                adapter="base",
                status="scored",
                created_at=1.0,
            )
        )


@pytest.mark.parametrize("column", ["created_at", "scored_at", "judge_attempts", "learn_attempts"])
async def test_text_in_a_number_column_of_a_group_costs_that_group_only(
    world: World, api: Api, column: str
) -> None:
    for name in ("a", "b", "c"):
        put_group(world, name)
    damage(world, GroupRow, column, "group_id = 'b'", "'soon'")

    with capture_logs() as lines:
        listed = await api.get("/groups")
        first = await api.get("/groups", limit=2)
        found = await api.get("/groups/b")

    assert [one["group_id"] for one in listed.json()["items"]] == ["c", "a"]
    (named,) = listed.json()["damaged"]
    assert named.startswith(f"group b is damaged in the store: {column}: Input should be a valid ")
    assert [one["group_id"] for one in first.json()["items"]] == ["c"]
    after = await api.get("/groups", limit=2, cursor=first.json()["next_cursor"])
    assert [one["group_id"] for one in after.json()["items"]] == ["a"]
    assert (found.status_code, found.json()["type"]) == (500, f"{TYPE_PREFIX}damaged-record")
    assert found.json()["detail"] == named
    assert [line["row"] for line in lines if line["event"] == "admin_row_unreadable"] == (
        ["group b"] * 3
    )


async def test_text_in_a_number_column_of_an_exchange_is_named(world: World, api: Api) -> None:
    exchange_id = world.serve("s")
    damage(world, ExchangeRow, "status", f"exchange_id = '{exchange_id}'", "'soon'")

    found = await api.get(f"/exchanges/{exchange_id}")

    assert found.status_code == 500
    assert found.json()["detail"] == (
        f"exchange {exchange_id} is damaged in the store: status: Input should be a valid integer, "
        "unable to parse string as an integer"
    )


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        (RoutingRow, "body", "'{'"),
        (RoutingRow, "generation", "'soon'"),
        (RunRow, "counts", "'{'"),
        (RunRow, "heartbeat_at", "'soon'"),
        (CounterRow, "count", "'soon'"),
        (CanaryRow, "step_started_at", "'soon'"),
        (CanaryRow, "evidence", "'[7]'"),
        (CanaryRow, "state", "'soon'"),
        (AdapterRow, "version", "'soon'"),
    ],
)
async def test_one_damaged_row_hides_no_page_of_the_admin_api(
    world: World, api: Api, table: Any, column: str, value: str
) -> None:
    world.promote(world.register(1))
    world.promote(world.register(2))
    with world.database.write() as session:
        count(session, "learn", "trained")
        session.add(finished_run("r"))
    damage(world, table, column, "rowid = 1", value)

    pages = ("/status", "/funnel", "/learner", "/adapters", "/canaries", "/runs")
    found = {page: (await api.get(page)).status_code for page in pages}
    collected = render(StoreCollector(world.database, "m", EngineView))

    assert found == dict.fromkeys(pages, 200)
    assert b"sidecar_routing_generation" in collected


async def test_an_active_canary_that_is_damaged_hides_no_status(world: World, api: Api) -> None:
    name = world.register(1)
    await world.controller().tick()
    damage(world, CanaryRow, "reason", f"candidate = '{name}'", "x'ff00'")

    with capture_logs() as lines:
        found = await api.get("/status")

    assert (found.status_code, found.json()["canary"]) == (200, None)
    assert [line["row"] for line in lines if line["event"] == "admin_row_unreadable"] == [
        f"canary {world.canary(name).canary_id}"
    ]


async def test_a_count_of_errors_that_is_damaged_ends_no_loop(world: World) -> None:
    name = world.register(1)
    controller = world.controller()
    await controller.tick()
    evidence = '{"steps": [5000], "tick_errors": {"count": "x", "at": []}, "loading": 7}'
    damage(world, CanaryRow, "evidence", f"candidate = '{name}'", f"'{evidence}'")

    for _ in range(3):
        await controller.tick()
        world.clock.now += 1.0

    assert world.canary(name).phase == "gating"


@pytest.mark.parametrize(
    ("table", "column", "where"),
    [
        (AliasRow, "adapter", "alias = 'champion'"),
        (AliasRow, "adapter", "alias = 'previous'"),
        (AliasRow, "generation", "alias = 'champion'"),
        (CanaryRow, "canary_id", "state = 'ramping'"),
        (CanaryRow, "candidate", "state = 'ramping'"),
        (CanaryRow, "champion", "state = 'ramping'"),
        (CanaryRow, "state", "state = 'ramping'"),
        (AdapterRow, "name", "version = 1"),
        (AdapterRow, "digest", "version = 1"),
    ],
)
async def test_a_blob_in_a_row_of_the_registry_costs_that_row_only(
    world: World, api: Api, table: Any, column: str, where: str
) -> None:
    old, champion = world.register(1), world.register(2)
    world.promote(old)
    world.promote(champion)
    tried = world.register(3)
    world.ramp(tried)
    damage(world, table, column, where, "x'00ff'")

    await api.reconciler.reconcile()
    await world.controller().tick()
    pages = ("/status", "/adapters", "/canaries", "/aliases", "/watch", "/audit", "/funnel")
    found = {page: (await api.get(page)).status_code for page in pages}

    assert found == dict.fromkeys(pages, 200)
    assert tried in world.control.adapters or (table, column) == (CanaryRow, "candidate")
    assert champion in world.control.adapters, "the table names it, whatever the alias says"
    if table is CanaryRow and column in ("canary_id", "candidate"):
        assert {row.state for row in world.rows(CanaryRow)} == {"promoted", "rolled_back"}
    table_now = world.table()
    assert table_now.champion == champion
    unguarded = table is CanaryRow and column in ("canary_id", "candidate", "state")
    assert table_now.canary == (None if unguarded else tried), "nobody could decide about it"
    done = rollback(world.database, "m", to="base", reason="x", actor="me", now=world.clock.now)
    assert (done.changed, world.table().champion, world.table().canary) == (True, "base", None)


async def test_a_damaged_alias_of_the_champion_moves_no_user(world: World, api: Api) -> None:
    champion, tried = world.register(1), world.register(2)
    world.promote(champion)
    world.ramp(tried)
    damage(world, AliasRow, "adapter", "alias = 'champion'", "x'00ff'")

    ended = await api.post(f"/canaries/{world.canary(tried).canary_id}/abort", {"reason": "x"})

    assert ended.status_code == 200
    assert (world.table().champion, world.table().canary) == (champion, None)


async def test_a_canary_whose_key_is_damaged_is_ended_and_counted(world: World, api: Api) -> None:
    tried = world.register(1)
    world.ramp(tried)
    damage(world, CanaryRow, "canary_id", "state = 'ramping'", "x'00ff'")

    await world.controller().tick()

    (row,) = world.rows(CanaryRow)
    assert (row.state, row.reason) == (
        "rolled_back",
        f"the canary of {tried} has a damaged canary_id: nothing can be decided about it",
    )
    assert world.adapter(tried).state == "rolled_back"
    assert world.actions()[-1] == "canary.rolled_back"
    assert {(one.stage, one.reason) for one in world.rows(CounterRow)} >= {("canary", "damaged")}


def put_key(world: World, key_id: str) -> None:
    with world.database.write() as session:
        session.add(
            ApiKeyRow(
                key_id=key_id,
                project="default",
                name="",
                secret_hash="0" * 64,
                scopes="infer",
                best_of_max=1,
                created_at=1.0,
                generation=1,
            )
        )


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("scopes", "'everything'"),
        ("expires_at", "'soon'"),
        ("created_at", "'soon'"),
        ("best_of_max", "'soon'"),
        ("name", NO_UTF8),
    ],
)
def test_a_damaged_key_hides_no_other_and_can_be_revoked(
    world: World, column: str, value: str
) -> None:
    for key_id in ("a", "b"):
        put_key(world, key_id)
    damage(world, ApiKeyRow, column, "key_id = 'a'", value)

    found, damaged = api_keys.all_keys(world.database)
    assert [one.key.key_id for one in found] == ["b"]
    (named,) = damaged
    assert named.startswith("key a is damaged in the store: ")
    for key_id in ("a", "b"):
        assert api_keys.revoke(world.database, key_id, reason="lost", actor="me", now=9.0) == 9.0
    assert [row.revoked_at for row in world.rows(ApiKeyRow)] == [9.0, 9.0]


@pytest.mark.parametrize("value", ["'soon'", str(2**63 - 1)])
def test_a_damaged_generation_of_a_key_keeps_no_key_from_being_revoked(
    world: World, value: str
) -> None:
    for key_id in ("a", "b"):
        put_key(world, key_id)
    damage(world, ApiKeyRow, "generation", "key_id = 'a'", value)

    api_keys.revoke(world.database, "b", reason="lost", actor="me", now=9.0)

    assert [row.generation for row in world.rows(ApiKeyRow) if row.key_id == "b"] == [2]


@pytest.mark.parametrize("action", ["", "/evidence", "/pause"])
async def test_a_canary_of_an_unknown_state_is_named_on_its_own_page(
    world: World, api: Api, action: str
) -> None:
    name = world.register(1)
    world.promote(name)
    canary_id = world.canary(name).canary_id
    damage(world, CanaryRow, "state", f"canary_id = '{canary_id}'", "'soon'")

    path = f"/canaries/{canary_id}{action}"
    found = await (api.post(path) if action == "/pause" else api.get(path))

    assert (found.status_code, found.json()["type"]) == (500, f"{TYPE_PREFIX}damaged-record")
    assert f"canary {canary_id} is damaged in the store: state: " in found.json()["detail"]


async def test_an_adapter_of_an_unknown_state_is_named_on_its_own_page(
    world: World, api: Api
) -> None:
    name = world.register(1)
    damage(world, AdapterRow, "state", f"name = '{name}'", "'soon'")

    found = await api.get("/adapters/v1")

    assert found.json()["type"] == f"{TYPE_PREFIX}damaged-record"
    assert f"adapter {name} is damaged in the store: state: " in found.json()["detail"]


async def test_a_damaged_alias_hides_no_other(world: World, api: Api) -> None:
    damage(world, AliasRow, "generation", "alias = 'previous'", "'soon'")

    found = (await api.get("/aliases")).json()
    alone = await api.get("/aliases/previous")

    assert (alone.status_code, alone.json()["detail"]) == (500, found["damaged"][0])

    assert [one["alias"] for one in found["items"]] == ["champion"]
    assert found["damaged"][0].startswith("alias previous is damaged in the store: generation: ")


async def test_a_number_without_end_is_a_damaged_one(world: World, api: Api) -> None:
    put_group(world, "a")
    damage(world, GroupRow, "created_at", "group_id = 'a'", "9e999")

    found = await api.get("/groups")

    assert "Infinity" not in found.text  # which no JSON reader but Python's takes
    assert found.json()["items"] == []
    assert found.json()["damaged"] == [
        "group a is damaged in the store: created_at: Input should be a finite number"
    ]


@pytest.mark.parametrize("generation", [2**63 - 1, 2**53, 2**40, 2**40 - 1, -1])
def test_a_huge_generation_holds_up_no_rollback(world: World, generation: int) -> None:
    world.promote(world.register(1))
    world.promote(world.register(2))
    body = encode_table(RoutingTable(model="m")).replace(
        '"generation":0', f'"generation":{generation}'
    )
    damage(world, RoutingRow, "body", "model = 'm'", f"'{body}'")
    damage(world, RoutingRow, "generation", "model = 'm'", str(generation))
    damage(world, AliasRow, "generation", "model = 'm'", str(generation))

    done = rollback(world.database, "m", reason="worse", actor="me", now=world.clock.now)

    assert done.changed
    table = world.table()
    assert table.champion == done.after
    assert table.generation == done.generation < 2**40


def test_a_version_that_is_no_number_holds_up_no_registration(world: World, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        world.register(number)
    damage(world, AdapterRow, "version", "version = 2", "'soon'")
    damage(world, AdapterRow, "version", "version = 3", str(2**63 - 1))
    sealed = Sealed(folder=tmp_path, digest="0" * 64, lineage_sha256="1" * 64, card_sha256="2" * 64)

    with world.database.write() as session:
        made = register(
            session, model="m", parent="base", run_id="r", sealed=sealed, path=tmp_path, now=1.0
        )

    assert made.version == 2


def trace(world: World) -> str:
    with world.database.read() as session:
        return render_lineage(trace_lineage(session, "m", "v1"))


async def test_damaged_evidence_costs_its_lines_of_the_lineage(world: World) -> None:
    name = world.register(1)
    world.promote(name)
    evidence = (
        '{"probe": {"live": true}, "gate": {"low": "x", "high": 1, "reason": "won"}, '
        '"step_0": 7, "step_1": {"weight_bp": 2000, "candidate": [], "champion": {}}}'
    )
    damage(world, CanaryRow, "evidence", f"candidate = '{name}'", f"'{evidence}'")

    assert [line for line in trace(world).splitlines() if "damaged in" in line] == [
        "    probe: damaged in the store",
        "    gate: damaged in the store",
        "    step 0: damaged in the store",
        "    step 1: damaged in the store",
    ]
    damage(world, CanaryRow, "evidence", f"candidate = '{name}'", "'{'")
    assert "    evidence: damaged in the store" in trace(world).splitlines()


def test_a_damaged_run_costs_its_lines_of_the_lineage(world: World) -> None:
    name = world.register(1)
    put_group(world, "g")
    with world.database.write() as session:
        session.add(finished_run("r"))
        session.add(
            AnswerRow(
                group_id="g",
                index=0,
                origin="served",
                message_body=b"",
                token_ids=b"",
                logprobs=b"",
                temperature=1.0,
                score=0.5,
            )
        )
    damage(world, AdapterRow, "run_id", f"name = '{name}'", "'r'")
    damage(world, GroupRow, "run_id", "group_id = 'g'", "'r'")
    damage(world, AnswerRow, "score", "group_id = 'g'", "'soon'")
    damage(world, RunRow, "counts", "run_id = 'r'", "'{'")
    damage(world, RunRow, "metrics", "run_id = 'r'", "'{}'")

    lines = trace(world).splitlines()

    assert "    settings steps=3" in lines
    assert "    damaged in the store: counts, metrics" in lines
    assert any("group g [scored]" in line and "scores (damaged)" in line for line in lines)
