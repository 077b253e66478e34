"""One exchange that is damaged, among good ones."""

from __future__ import annotations

from sqlalchemy import text

from ingest.sampling.worker import SamplingWorker
from sidecar.settings import Groups
from support.ingest_kit import Kit


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
