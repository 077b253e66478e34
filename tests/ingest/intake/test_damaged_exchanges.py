"""One exchange that is damaged, among good ones."""

from __future__ import annotations

from sqlalchemy import text

from ingest.intake.choose import choose_backlog, choose_new
from ingest.sampling.worker import SamplingWorker
from sidecar.settings import Groups
from support.ingest_kit import Kit


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
