"""One exchange whose row is damaged, among good ones: what becomes of the good ones?

The damage is written past the library, with foreign keys off, as a faulty disk would do it.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import JSON, LargeBinary, String, select, text

from ingest.grouping.selection import group_id_of
from ingest.intake.choose import choose_backlog, choose_new
from ingest.sampling.worker import SamplingWorker
from sidecar.settings import Groups
from sidecar.store.models import AnswerRow, ChoiceRow, ExchangeRow, GroupRow
from support.ingest_kit import Kit

NO_UTF8 = "CAST(x'ff80c3' AS TEXT)"
DAMAGED = "e1"
WHERE = {
    ExchangeRow: f"exchange_id = '{DAMAGED}'",
    ChoiceRow: f"exchange_id = '{DAMAGED}'",
    GroupRow: f"exchange_id = '{DAMAGED}'",
    AnswerRow: f"group_id = '{group_id_of(DAMAGED)}'",
}
KINDS = (String, JSON, LargeBinary)


def columns(*tables: Any) -> list[tuple[Any, str]]:
    return [
        (table, column.name)
        for table in tables
        for column in table.__table__.columns
        if isinstance(column.type, KINDS)
    ]


def damage(kit: Kit, table: Any, column: str) -> None:
    with closing(kit.database.engine.raw_connection()) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute(f'UPDATE {table.__tablename__} SET "{column}" = {NO_UTF8} WHERE {WHERE[table]}')
        raw.execute("PRAGMA foreign_keys=ON")


def new(kit: Kit) -> int:
    return choose_new(kit.database, kit.rules(), model="smollm", limit=100, now=2.0)


@pytest.mark.parametrize(("table", "column"), columns(ExchangeRow, ChoiceRow))
def test_a_damaged_exchange_keeps_no_other_from_being_chosen(
    kit: Kit, table: Any, column: str
) -> None:
    kit.store(*(kit.exchange(f"e{number}") for number in range(4)))
    damage(kit, table, column)

    while new(kit):
        assert sum(kit.counts("selection").values()) <= 4, "each is looked at once"

    with kit.database.read() as session:
        left = select(ExchangeRow.selection).where(ExchangeRow.seq != 2)
        assert set(session.scalars(left)) == {"chosen"}
    assert kit.counts("selection")["chosen"] >= 3


def test_a_damaged_exchange_leaves_the_queue_and_is_counted(kit: Kit) -> None:
    kit.store(*(kit.exchange(f"e{number}") for number in range(4)))
    damage(kit, ExchangeRow, "sampling")

    assert new(kit) == 3
    assert new(kit) == 0

    assert kit.counts("selection") == {"chosen": 3, "unreadable": 1}


def test_a_damaged_exchange_leaves_the_backlog(kit: Kit) -> None:
    kit.store(*(kit.exchange(f"e{number}") for number in range(4)))
    choose_new(kit.database, kit.rules(max_pending_groups=0), model="smollm", limit=100, now=2.0)
    assert kit.counts("selection") == {"backlog": 4}
    damage(kit, ExchangeRow, "request_body")

    choose_backlog(kit.database, kit.rules(), model="smollm", now=3.0)

    assert kit.counts("selection") == {"chosen": 3, "unreadable": 1}


@pytest.mark.parametrize(
    ("table", "column"), [*columns(GroupRow, AnswerRow, ExchangeRow), (AnswerRow, "temperature")]
)
async def test_a_damaged_group_keeps_no_other_from_its_candidates(
    kit: Kit, table: Any, column: str
) -> None:
    kit.choose(*(kit.exchange(f"e{number}") for number in range(4)))
    damage(kit, table, column)
    worker = SamplingWorker(
        kit.database,
        kit.FakeSampler(*(f"answer {number}" for number in range(9))),
        kit.FakeRoom(),
        Groups(size=4, concurrency=16),
        model="smollm",
        logprobs_mode="processed_logprobs",
        now=lambda: 1e6,
    )

    for _ in range(3):
        await worker.step()

    with kit.database.read() as session:
        others = select(GroupRow.status).where(GroupRow.seq != 2)
        assert set(session.scalars(others)) == {"sampled"}


async def test_a_group_that_cannot_be_read_is_set_aside_with_its_reason(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange(DAMAGED))
    with kit.database.engine.begin() as connection:
        connection.execute(text("UPDATE answer SET token_ids = x'010203'"))
    worker = SamplingWorker(
        kit.database,
        kit.FakeSampler(),
        kit.FakeRoom(),
        Groups(size=4, concurrency=16),
        model="smollm",
        logprobs_mode="processed_logprobs",
        now=lambda: 1e6,
    )

    assert await worker.step() == 0

    row = kit.row(group_id)
    assert (row.status, row.reason) == ("set_aside", "unreadable")
    assert row.detail
