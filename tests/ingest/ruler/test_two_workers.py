"""Two judging workers on one store: each group is scored once."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ingest.store.groups import claim_groups
from sidecar.store.database import Database
from support.clock import Clock

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit

GROUPS = 24


@pytest.mark.both_stores
async def test_two_workers_score_each_group_once(
    judge_kit: JudgeKit, database: Database, clock: Clock
) -> None:
    names = [f"g{number}" for number in range(GROUPS)]
    for name in names:
        judge_kit.put_group(database, name, "good", "bad")
    scores = {"good": 0.9, "bad": 0.1}
    with closing(Database(database.url)) as other:
        judges = [judge_kit.FakeJudge(judge_kit.score_by_content(scores)) for _ in range(2)]
        workers = [
            judge_kit.worker(store, judge, clock, passes=1)
            for store, judge in zip((database, other), judges, strict=True)
        ]
        for _ in range(GROUPS):
            await asyncio.gather(*(worker.step() for worker in workers))
            if judge_kit.counts(database, "judging").get("scored") == GROUPS:
                break

    assert judge_kit.counts(database, "judging") == {"scored": GROUPS}
    assert {judge_kit.status(database, name)[0] for name in names} == {"scored"}
    calls = judge_kit.calls(database)
    assert sorted(call.group_id for call in calls) == sorted(names)


@pytest.mark.parametrize("store_kind", ["postgres"], indirect=True)
def test_a_worker_passes_over_what_another_is_claiming(
    judge_kit: JudgeKit, database: Database
) -> None:
    for name in ("a", "b"):
        judge_kit.put_group(database, name, "good", "bad")

    with database.write(alone=False) as one, database.write(alone=False) as two:
        first = claim_groups(one, "sampled", limit=1, now=1.0, lease_s=60.0)
        second = claim_groups(two, "sampled", limit=5, now=1.0, lease_s=60.0)

    assert (first, second) == (["a"], ["b"])
    with database.write(alone=False) as session:
        assert claim_groups(session, "sampled", limit=5, now=60.0, lease_s=60.0) == []
        assert claim_groups(session, "sampled", limit=5, now=61.0, lease_s=60.0) == ["a", "b"]
