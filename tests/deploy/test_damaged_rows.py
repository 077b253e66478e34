"""Rows that a faulty disk damaged: the gate and the admin API live with them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import String

from sidecar.store.models import AnswerRow, ChoiceRow, CounterRow, ExchangeRow, GroupRow

NO_UTF8 = "CAST(x'ff80c3' AS TEXT)"
World = Any
TEXTS = [column.name for column in ExchangeRow.__table__.columns if isinstance(column.type, String)]


def damage(world: World, table: Any, column: str, where: str, value: str = NO_UTF8) -> None:
    with closing(world.database.engine.raw_connection()) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute(f'UPDATE {table.__tablename__} SET "{column}" = {value} WHERE {where}')
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


async def test_the_admin_api_shows_text_that_is_no_utf8(world: World, api: Any) -> None:
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
