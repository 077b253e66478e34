"""A damaged row hides no other one, and moves no user from the champion."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from deploy.registry.rollback import rollback
from sidecar.errors import StoreBusyError
from sidecar.store.models import QuarantineRow
from support.planted import plant

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World

PAGES = ("/status", "/adapters", "/canaries", "/aliases", "/watch", "/audit", "/funnel", "/groups")


@pytest.mark.parametrize("column", ["session_id", "sampling", "outcome", "exchange_id"])
async def test_a_damaged_held_out_exchange_does_not_hold_the_gate(
    world: World, column: str
) -> None:
    name = world.register(1)
    world.hold_out(6)
    plant(world.database, "exchange", column, "exchange_id = 'x6'")
    controller = world.controller()

    for _ in range(14):
        with suppress(StoreBusyError):
            await controller.tick()
        world.clock.now += 1.0

    assert world.canary(name).phase == "ramping"


@pytest.mark.parametrize(
    ("table", "column", "where"),
    [
        ("alias", "adapter", "alias = 'champion'"),
        ("alias", "alias", "alias = 'previous'"),
        ("routing_table", "body", "1"),
        ("canary", "canary_id", "state = 'ramping'"),
        ("canary", "candidate", "state = 'ramping'"),
        ("canary", "evidence", "state = 'ramping'"),
        ("adapter_version", "reason", "version = 2"),
        ("adapter_version", "digest", "version = 1"),
        ("audit", "before", "seq = 1"),
        ("counter", "reason", "1"),
    ],
)
async def test_a_damaged_row_of_the_registry_hides_no_page_and_moves_no_user(
    world: World, api: Api, table: str, column: str, where: str
) -> None:
    champion = world.register(2)
    world.promote(world.register(1))
    world.promote(champion)
    world.ramp(world.register(3))
    plant(world.database, table, column, where)

    for _ in range(3):
        with suppress(StoreBusyError):
            await world.controller().tick()
    for page in PAGES:
        await api.get(page)
    found = {page: (await api.get(page)).status_code for page in PAGES}

    assert found == dict.fromkeys(PAGES, 200)
    assert world.table().champion == champion
    assert {row.table_name for row in world.rows(QuarantineRow)} == {table}
    done = rollback(world.database, "m", to="base", reason="x", actor="me", now=world.clock.now)
    assert (done.changed, world.table().champion, world.table().canary) == (True, "base", None)
