"""The judge ranks whole sessions, alone or among equal outcomes."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from ingest.errors import JudgeUnavailableError
from ingest.judge_watch import JudgeState, write_judge_state
from ingest.tasks.judging import ATTEMPTS, TaskJudging, mixed_rewards, with_evidence
from ingest.trajectories.recorded import RecordedTrajectory
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.models import JudgeCallRow
from support.fake_judge import FakeJudge
from support.ingest_kit import Kit, make_choice
from support.task_kit import TaskKit
from support.trajectory_judge import RankingJudge


def test_outcomes_decide_and_the_score_ranks_equal_outcomes() -> None:
    assert mixed_rewards([0.0, 1.0, 1.0], [1.0, 0.0, 0.5]) == [0.25, 0.75, 0.875]
    assert mixed_rewards([1.0, 1.0], [0.3, 0.9]) == [0.3, 0.9]
    close = mixed_rewards([0.5, 0.6, 0.5], [1.0, 0.0, 0.0])
    assert close[2] < close[0] < close[1]


def test_the_judge_is_told_what_is_known_of_the_tools_in_three_states() -> None:
    outcome: dict[str, Any] = {"success": None, "signals": [], "tools": "3 ok, 1 failed, 2 unknown"}
    found = RecordedTrajectory(
        session_id="s", project="default", messages=(), tools=(), exchanges=1, outcome=outcome
    )

    (note,) = with_evidence(found)

    assert note["content"] == "known of how it ended: tools: 3 ok, 1 failed, 2 unknown"


class Sessions(TaskKit):
    def works(self, state: str = "works") -> None:
        with self.database.write() as session:
            write_judge_state(session, JudgeState(state=state, since=0.0), now=self.now)  # type: ignore[arg-type]

    def told_apart(self, name: str, said: str, success: bool | None = None) -> None:
        turn = self.turn(name, choices=(make_choice(said),))
        self.told(turn, success=success, done=True)

    def judging(self, judge: object) -> TaskJudging:
        settings = JudgeSettings(model="m", passes=1)
        return TaskJudging(self.database, judge, settings, now=lambda: self.now)  # type: ignore[arg-type]


async def test_the_judge_sees_whole_sessions_twice_with_what_is_known(kit: Kit) -> None:
    tasks = Sessions(kit.database, size=3, learn="mixed")
    for name, said, success in (("a", "good", True), ("b", "better", True), ("c", "bad", False)):
        tasks.told_apart(name, said, success)
    tasks.follow()
    known = "known of how it ended: success: "
    judge = RankingJudge({f"{known}True": 0.5, f"{known}False": 0.5})
    tasks.works()

    assert await tasks.judging(judge).step()
    assert len(judge.prompts) == 2
    (group,) = tasks.groups()
    members = tasks.members(group.group_id)
    assert (group.status, group.judge_model) == ("scored", "ranking")
    assert {name: (one.reward, one.source) for name, one in members.items()} == {
        "a": (0.875, "mixed"),
        "b": (0.875, "mixed"),
        "c": (0.125, "mixed"),
    }
    with kit.database.read() as session:
        assert session.scalars(select(JudgeCallRow.group_id)).all() == [group.group_id] * 2
    assert not await tasks.judging(judge).step()


async def test_sessions_without_outcomes_are_ranked_by_the_judge_alone(kit: Kit) -> None:
    tasks = Sessions(kit.database, size=2, learn="ruler")
    tasks.told_apart("a", "good")
    tasks.told_apart("b", "bad")
    tasks.follow()
    tasks.works()

    assert await tasks.judging(RankingJudge({"good": 0.9, "bad": 0.2})).step()
    (group,) = tasks.groups()
    found = {name: (one.reward, one.source) for name, one in tasks.members().items()}
    assert group.status == "scored"
    assert found == {"a": (0.9, "ruler"), "b": (0.2, "ruler")}


async def test_only_a_judge_that_works_is_asked_and_sets_aside(kit: Kit) -> None:
    tasks = Sessions(kit.database, size=2, learn="ruler")
    tasks.told_apart("a", "good")
    tasks.told_apart("b", "bad")
    tasks.follow()
    judging = tasks.judging(FakeJudge(JudgeUnavailableError("away")))
    tasks.works("away")

    assert not await judging.step()
    assert tasks.groups()[0].judge_attempts == 0

    tasks.works()
    for _ in range(ATTEMPTS):
        assert await judging.step()
    (group,) = tasks.groups()
    assert (group.status, group.reason) == ("set_aside", "judge_unavailable")


@pytest.mark.parametrize("learn", ["ruler", "mixed"])
async def test_different_tasks_are_not_ranked_by_the_judge(kit: Kit, learn: str) -> None:
    tasks = Sessions(kit.database, size=2, learn=learn, key="template")
    for name, success in (("a", True), ("b", False)):
        body = {"messages": [{"role": "user", "content": f"Order {ord(name)}?"}]}
        turn = tasks.turn(name, task="", request=body, prompt_token_ids=(ord(name),))
        tasks.told(turn, success=success)

    tasks.follow()

    found = [(group.status, group.key_kind) for group in tasks.groups()]
    assert found == ([("scored", "template")] if learn == "mixed" else [])
