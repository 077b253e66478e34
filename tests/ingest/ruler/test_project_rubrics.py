"""Each group is judged by the rubric of its project, and its scores say by which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingest.errors import JudgeRejectedError
from ingest.judges.replies import CachedJudge, ContentSeeds, KeptReplies, ReplyStore
from ingest.ruler.group import SUBJECT
from ingest.ruler.judging import JudgingWorker
from ingest.ruler.prompt import rubric_hash
from ingest.store.groups import load_group
from sidecar.settings import Judge, ProjectRubric
from sidecar.store.database import Database
from support.clock import Clock

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit

RUBRICS = {"shop": "Sell politely.", "desk": "Close tickets.", "default": "Be good."}
"""Project -> its rubric; `default` has none of its own."""
SETTINGS = Judge(
    model="scripted",
    rubric="Be good.",
    passes=2,
    projects={name: ProjectRubric(rubric=RUBRICS[name]) for name in ("shop", "desk")},
)


def asked_by(conversations: list[list[dict[str, str]]]) -> list[str]:
    """The project whose rubric stands in each conversation, and no other rubric does."""
    texts = ["".join(message["content"] for message in talk) for talk in conversations]
    found = [[name for name, rubric in RUBRICS.items() if rubric in text] for text in texts]
    assert all(len(names) == 1 for names in found), found
    return [names[0] for names in found]


@pytest.mark.both_stores
async def test_the_judge_is_given_the_rubric_of_each_groups_project(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge = judge_kit.FakeJudge()
    for project in RUBRICS:
        judge_kit.put_group(database, f"g-{project}", "a", "b", project=project)
    worker = JudgingWorker(database, judge, SETTINGS, clock=clock)

    assert await worker.step() == 3

    assert sorted(asked_by(judge.conversations)) == sorted([*RUBRICS, *RUBRICS])
    for project, rubric in RUBRICS.items():
        row = judge_kit.group_row(database, f"g-{project}")
        assert (row.status, row.rubric_hash) == ("scored", rubric_hash(rubric))
        calls = [one for one in judge_kit.calls(database) if one.group_id == f"g-{project}"]
        assert [one.rubric_hash for one in calls] == [rubric_hash(rubric)] * 2


async def test_the_probe_at_the_start_has_the_default_rubric(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "a", "b", project="shop")
    judge = judge_kit.FakeJudge()
    worker = JudgingWorker(database, judge, SETTINGS, clock=clock)
    await worker.begin()

    await worker.step()
    await worker.step()

    assert asked_by(judge.conversations) == ["default", "shop", "shop"]
    by_subject = {one.group_id: one.rubric_hash for one in judge_kit.calls(database)}
    assert by_subject == {
        SUBJECT: rubric_hash(RUBRICS["default"]), "g1": rubric_hash(RUBRICS["shop"]),
    }  # fmt: skip


async def test_a_probe_with_an_earlier_group_has_the_rubric_of_its_project(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    good = judge_kit.FakeJudge()
    judge_kit.put_group(database, "g1", "a", "b", project="shop")
    await JudgingWorker(database, good, SETTINGS, clock=clock).step()
    judge_kit.put_group(database, "g2", "c", "d", project="desk")
    judge = judge_kit.FakeJudge(JudgeRejectedError("400"), judge_kit.score_by_content({}, 0.5))

    await JudgingWorker(database, judge, SETTINGS, clock=clock).step()

    assert asked_by(judge.conversations) == ["desk", "shop"]
    stored = [one.rubric_hash for one in judge_kit.calls(database) if one.group_id == SUBJECT]
    assert stored == [rubric_hash(RUBRICS["shop"])]


async def test_a_kept_reply_to_one_rubric_answers_no_other(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    """Two groups of the same words, of two projects; then the first one's again."""
    real = judge_kit.FakeJudge()
    kept = KeptReplies(ReplyStore(database, max_bytes=2**20, max_age_s=1e9))
    seeds = ContentSeeds(kept.store)
    cached = CachedJudge(real, SETTINGS, kept)

    async def judge(*groups: tuple[str, str]) -> int:
        """Judge groups one after the other. Returns: how many calls were made."""
        before = len(real.conversations)
        for name, project in groups:
            judge_kit.put_group(database, name, "a", "b", project=project)
            worker = JudgingWorker(database, cached, SETTINGS, clock=clock, draw_seed=seeds)
            assert await worker.step() == 1
        return len(real.conversations) - before

    assert await judge(("g1", "shop"), ("g2", "desk")) == 4
    assert await judge(("g3", "shop"), ("g4", "desk"), ("g5", "default")) == 2
    assert asked_by(real.conversations) == ["shop"] * 2 + ["desk"] * 2 + ["default"] * 2
    await kept.aclose()


async def test_a_group_is_read_with_its_project(database: Database, judge_kit: JudgeKit) -> None:
    judge_kit.put_group(database, "g1", "a", "b", project="shop")

    with database.read() as session:
        found: Any = load_group(session, "g1")

    assert found.project == "shop"
