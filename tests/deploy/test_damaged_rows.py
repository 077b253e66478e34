"""Rows that a faulty disk damaged: the gate and the admin API live with them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import String
from structlog.testing import capture_logs

from deploy.admin.metrics import StoreCollector, render
from deploy.admin.problems import TYPE_PREFIX
from deploy.engine.reconcile import EngineView
from deploy.registry import api_keys
from sidecar.store.database import count
from sidecar.store.models import (
    AdapterRow,
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
        session.add(
            RunRow(
                run_id="r",
                model="m",
                status="finished",
                started_at=1.0,
                heartbeat_at=1.0,
                parent="base",
                settings={},
                counts={},
                metrics=[],
            )
        )
    damage(world, table, column, "rowid = 1", value)

    pages = ("/status", "/funnel", "/learner", "/adapters", "/canaries", "/runs")
    found = {page: (await api.get(page)).status_code for page in pages}
    collected = render(StoreCollector(world.database, "m", EngineView))

    assert found == dict.fromkeys(pages, 200)
    assert b"sidecar_routing_generation" in collected


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


def test_a_damaged_key_hides_no_other_and_keeps_no_key_from_being_revoked(world: World) -> None:
    with world.database.write() as session:
        for key_id in ("a", "b"):
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
    damage(world, ApiKeyRow, "scopes", "key_id = 'a'", "'everything'")
    damage(world, ApiKeyRow, "generation", "key_id = 'a'", "'soon'")

    assert [one.key.key_id for one in api_keys.all_keys(world.database)] == ["b"]
    revoked = api_keys.revoke(world.database, "b", reason="lost", actor="me", now=9.0)
    assert revoked.revoked_at == 9.0
