"""Runs that learn from whole sessions: from stored exchanges and outcomes to a lineage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from learner.adapter_folder import LINEAGE
from learner.errors import NothingToLearnError
from learner.replay import SAME, replay
from sidecar.records import Sampling
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import GroupRow, TaskGroupRow
from support.ingest_kit import make_choice
from support.task_kit import TaskKit
from tests.learner.conftest import FakeTrainer, NewRun

NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
FIRST, ANSWER, MORE = (1, 2, 3), (10, 11), (20, 21)


@pytest.fixture
def kit(database: Database) -> TaskKit:
    return TaskKit(database, size=2)


def attempt(kit: TaskKit, name: str, success: bool, **changes: Any) -> list[str]:
    """A session of two turns, the second of which continues the first token for token."""
    sampling = Sampling(**{**NEUTRAL, **changes})
    answer = make_choice(token_ids=(*ANSWER,), logprobs=(-1.0, -1.0))
    first = kit.turn(name, sampling=sampling, prompt_token_ids=FIRST, choices=(answer,))
    last = make_choice(token_ids=(12 if success else 13,), logprobs=(-0.5,))
    second = kit.turn(
        name,
        parent=first,
        sampling=sampling,
        choices=(last,),
        prompt_token_ids=(*FIRST, *ANSWER, *MORE),
    )
    kit.told(second, success=success)
    return [first, second]


def statuses(database: Database) -> list[tuple[str, str | None]]:
    with database.read() as session:
        return [
            (row.status, row.reason)
            for row in session.scalars(select(TaskGroupRow).order_by(TaskGroupRow.seq))
        ]


def test_a_run_learns_from_sessions_and_says_so(
    kit: TaskKit, new_run: NewRun, fake_trainer: FakeTrainer
) -> None:
    good, bad = attempt(kit, "a", True), attempt(kit, "b", False)
    assert kit.follow() == 1
    (stored,) = kit.groups()

    candidate = new_run(min_groups=1).start()

    (job,) = fake_trainer.jobs
    (group,) = job.groups
    assert (group.group_id, group.adapter, group.prompt_token_ids) == (
        stored.group_id,
        "base",
        FIRST,
    )
    by_session = dict(zip(group.sessions, group.rows, strict=True))
    assert sorted(row.token_ids for row in group.rows) == [
        (*ANSWER, *MORE, 12),
        (*ANSWER, *MORE, 13),
    ]
    assert {row.kept for row in group.rows} == {(True, True, False, False, True)}
    assert sorted(row.advantage for row in by_session.values()) == [-1.0, 1.0]
    assert statuses(kit.database) == [("trained", None)]
    lineage = json.loads((Path(candidate.path) / LINEAGE).read_text())
    (named,) = lineage["task_groups"]
    assert {one["session_id"]: one["exchange_ids"] for one in named["sessions"]} == {
        "a": good,
        "b": bad,
    }
    assert {one["session_id"]: one["reward"] for one in named["sessions"]} == {"a": 1.0, "b": 0.0}


def learned_from(kit: TaskKit, exchange_id: str, *, run_id: str) -> None:
    """A run has trained on a group of answers to this exchange."""
    with kit.database.write() as session:
        session.add(
            GroupRow(
                group_id=f"gr-{run_id}",
                exchange_id=exchange_id,
                session_key="k",
                adapter="base",
                status="trained",
                created_at=1.0,
                run_id=run_id,
            )
        )


def test_a_replay_trains_on_the_steps_of_the_run_whatever_later_runs_learned_from(
    kit: TaskKit, settings: Settings, new_run: NewRun, fake_trainer: FakeTrainer
) -> None:
    (first, _), (other, _) = attempt(kit, "a", True), attempt(kit, "b", False)
    kit.follow()
    learned_from(kit, first, run_id="r0")
    candidate = new_run(min_groups=1).start()
    learned_from(kit, other, run_id="r2")

    found = replay(settings, kit.database, candidate.adapter, trainer=lambda _: fake_trainer)

    assert found == SAME
    before, again = fake_trainer.jobs
    assert again.groups == before.groups


def test_a_step_that_another_run_learned_from_is_context(
    kit: TaskKit, new_run: NewRun, fake_trainer: FakeTrainer
) -> None:
    (first, _), _ = attempt(kit, "a", True), attempt(kit, "b", False)
    kit.follow()
    learned_from(kit, first, run_id="r0")

    new_run(min_groups=1).start()

    ((group,),) = [job.groups for job in fake_trainer.jobs]
    kept = {row.token_ids[-1]: row.kept for row in group.rows}
    assert kept[12] == (False, False, False, False, True)
    assert kept[13] == (True, True, False, False, True)


def test_answers_that_are_not_exact_are_never_learned_from(kit: TaskKit, new_run: NewRun) -> None:
    attempt(kit, "a", True, top_p=0.5), attempt(kit, "b", False, top_p=0.5)
    kit.follow()

    with pytest.raises(NothingToLearnError):
        new_run(min_groups=1).start()

    assert statuses(kit.database) == [("dropped", "too_few_trainable")]


def test_a_failed_run_gives_its_sessions_back_and_at_last_drops_them(
    kit: TaskKit, new_run: NewRun, fake_trainer: FakeTrainer
) -> None:
    attempt(kit, "a", True), attempt(kit, "b", False)
    kit.follow()
    fake_trainer.error = ValueError("bad")

    for number, after in enumerate([("scored", None), ("dropped", "failed_runs")]):
        with pytest.raises(ValueError, match="bad"):
            new_run(f"r{number}", min_groups=1).start()
        assert statuses(kit.database) == [after]


def test_a_session_that_is_too_long_costs_its_group(
    kit: TaskKit, new_run: NewRun, fake_trainer: FakeTrainer
) -> None:
    attempt(kit, "a", True), attempt(kit, "b", False)
    kit.follow()

    with pytest.raises(NothingToLearnError):
        new_run(min_groups=1, pack_tokens=5).start()

    assert statuses(kit.database) == [("dropped", "too_long")]
