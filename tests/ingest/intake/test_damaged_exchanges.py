"""One exchange that is damaged, among good ones."""

from __future__ import annotations

import pytest
from sqlalchemy import select, text

from ingest.intake.choose import choose_backlog, choose_new
from ingest.sampling.worker import SamplingWorker
from sidecar.settings import Groups
from sidecar.store.models import ExchangeRow
from support.ingest_kit import Kit
from support.planted import plant, repeated


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("exchange", "sampling"),
        ("exchange", "turn_id"),
        ("exchange", "exchange_id"),
        ("exchange", "selection"),
        ("choice", "finish_reason"),
    ],
)
def test_a_damaged_exchange_keeps_no_other_from_being_chosen(
    kit: Kit, table: str, column: str
) -> None:
    kit.store(*(kit.exchange(f"e{number}") for number in range(4)))
    plant(kit.database, table, column, "exchange_id = 'e1'")

    while repeated(
        lambda: choose_new(kit.database, kit.rules(), model="smollm", limit=100, now=2.0)
    ):
        continue

    with kit.database.read() as session:
        left = select(ExchangeRow.selection).where(ExchangeRow.exchange_id.in_(("e0", "e2", "e3")))
        assert list(session.scalars(left)) == ["chosen"] * 3


def test_a_damaged_exchange_leaves_the_backlog(kit: Kit) -> None:
    kit.store(*(kit.exchange(f"e{number}") for number in range(4)))
    choose_new(kit.database, kit.rules(max_pending_groups=0), model="smollm", limit=100, now=2.0)
    assert kit.counts("selection") == {"backlog": 4}
    with kit.database.write() as session:
        session.execute(text("UPDATE exchange SET request_body = x'00' WHERE exchange_id = 'e1'"))

    choose_backlog(kit.database, kit.rules(), model="smollm", now=3.0)

    assert kit.counts("selection") == {"chosen": 3, "unreadable": 1}


async def test_a_group_that_cannot_be_read_is_set_aside_with_its_reason(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
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
