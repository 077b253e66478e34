"""Whole tasks in place of single answers: what an attempt proves, and what a failed one costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from sqlalchemy import select, update

from deploy.canary.exam import TaskExam, value_of
from deploy.canary.gate import Gate
from deploy.canary.gate_store import held_out_prompts
from ingest.sampling.round import REHEARSED
from ingest.store.listing import day_of
from ingest.tasks import attempts
from ingest.tasks.runner import Answer, Scenario
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings
from sidecar.settings import Settings
from sidecar.store.database import count
from sidecar.store.models import CounterRow, ExchangeRow, RehearsalRow, TaskMemberRow

if TYPE_CHECKING:
    from tests.deploy.conftest import World

Plays = Callable[[str], Any]


@pytest.fixture
def rules() -> CanarySettings:
    return CanarySettings(
        promote_on="quick",
        gate_prompts=3,
        gate_answers=2,
        gate_min_prompts=2,
        gate_margin=0.02,
        steps=(2_000,),
        turn_wait_s=0.0,
    )


class Site:
    """A world whose gate has a runner. It says `ends(adapter)`, after one request to the model."""

    def __init__(self, world: World, folder: Path, **rehearsals: Any) -> None:
        settings = Settings(
            state_dir=folder,
            serving={"model": "m"},
            tasks={"learn": "outcome"},
            rehearsals={
                "runner": "http://runner:1",
                "tokens_per_day": 1_000,
                "timeout_s": 5.0,
                **rehearsals,
            },
        )
        assert settings.tasks_are_examined
        self.world = world
        self.asked: list[Scenario] = []
        self.ends: Plays = lambda adapter: {"success": True}
        self.answers: Callable[[str], str | None] = lambda adapter: adapter
        """Adapter whose answer is stored for an attempt; None: nothing is asked."""
        exam = TaskExam(
            world.database,
            settings,
            world.room,
            now=world.clock,
            transport=httpx.MockTransport(self._play),
        )
        self.gate = Gate(
            database=world.database,
            sampler=world.sampler,
            judge=world.judge,
            rules=world.rules,
            judging=world.judging,
            room=world.room,
            parallel=2,
            clock=world.clock,
            exam=exam,
            line=world.line,
        )
        self.controller = world.controller(gate=self.gate)

    async def _play(self, request: httpx.Request) -> httpx.Response:
        ask = msgspec.json.decode(request.content, type=Scenario)
        self.asked.append(ask)
        adapter = ask.headers["x-sidecar-rehearsal"].split(":", 3)[3]
        if (by := self.answers(adapter)) is not None:
            await asyncio.to_thread(self._store, ask, by)
        said = self.ends(adapter)
        return httpx.Response(200, content=json.dumps(said).encode())

    def _store(self, ask: Scenario, adapter: str) -> None:
        key = f"h:{ask.session_id}"
        self.world.serve(
            key, adapter=adapter, arm="rehearsal", origin="rehearsal", project=ask.project
        )

    def adapter_of(self, ask: Scenario) -> str:
        return ask.headers["x-sidecar-rehearsal"].split(":", 3)[3]

    async def gated(self) -> str:
        """Play until the gate is left, or nothing more happens. Returns: the candidate."""
        name = self.world.register(1)
        for _ in range(20):
            await self.controller.tick()
            self.world.clock.now += 100.0
            if self.world.canary(name).phase not in ("loading", "gating"):
                break
        return name


@pytest.fixture
def site(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(attempts, "ARRIVE_S", 0.2)
    return Site(world, tmp_path)


@pytest.mark.both_stores
async def test_a_candidate_whose_tasks_end_well_passes_though_the_judge_dislikes_its_answers(
    site: Site,
) -> None:
    world = site.world
    world.hold_out(3)
    site.ends = lambda adapter: {"success": adapter != BASE}

    candidate = await site.gated()

    assert world.canary(candidate).phase == "ramping"
    assert (world.judge.prompts, world.sampler.requests) == ([], [])
    assert [one.difference for one in world.comparisons()] == [1.0] * 3
    by_task: dict[str, list[str]] = {}
    for ask in site.asked:
        by_task.setdefault(ask.task_id, []).append(site.adapter_of(ask))
    assert sorted(map(sorted, by_task.values())) == [sorted([BASE, BASE, candidate, candidate])] * 3
    assert len({tuple(one) for one in by_task.values()}) > 1  # in random order
    with world.database.read() as session:
        results = session.execute(select(RehearsalRow.result, RehearsalRow.success)).all()
        members = set(session.scalars(select(TaskMemberRow.excluded)))
    assert sorted(map(tuple, results)) == [("exam", False)] * 6 + [("exam", True)] * 6
    assert members == {"exam"}  # nothing is learned from held-out tasks


async def test_a_candidate_whose_tasks_fail_is_rejected(site: Site) -> None:
    site.world.hold_out(3)
    site.ends = lambda adapter: {"outcome": 0.9 if adapter == BASE else 0.25}

    candidate = await site.gated()

    assert site.world.canary(candidate).phase == "rolled_back"
    assert [one.difference for one in site.world.comparisons()] == pytest.approx([-0.65] * 3)


async def test_an_attempt_that_did_not_ask_its_adapter_proves_nothing(site: Site) -> None:
    """A runner that talks to another model ends alike with every adapter."""
    site.world.hold_out(3)
    site.answers = lambda adapter: None

    candidate = await site.gated()

    assert site.world.canary(candidate).phase == "gating"
    assert site.world.comparisons() == []
    assert "the runner fails" in (site.gate.away(site.world.canary(candidate)) or "")


async def test_a_runner_that_another_adapter_answers_proves_nothing(site: Site) -> None:
    site.world.hold_out(3)
    site.answers = lambda adapter: "m--v9-other"

    candidate = await site.gated()

    assert site.world.canary(candidate).phase == "gating"
    assert site.world.comparisons() == []


async def test_attempts_that_fail_with_the_candidate_alone_count_against_it(site: Site) -> None:
    site.world.hold_out(6)
    site.ends = lambda adapter: (
        {"success": True} if adapter == BASE else {"error": "the agent cannot read this answer"}
    )

    await site.gated()

    assert {one.fault for one in site.world.comparisons()} == {"candidate"}


async def test_an_end_that_is_not_known_is_no_failure(site: Site) -> None:
    site.world.hold_out(6)
    site.ends = lambda adapter: {"success": True} if adapter == BASE else {}

    await site.gated()

    found = site.world.comparisons()
    assert {(one.status, one.fault, one.difference) for one in found} == {
        ("set_aside", "unknown", None)
    }
    with site.world.database.read() as session:
        assert session.get(CounterRow, ("gate", "no_outcome")) is not None


async def test_it_waits_for_users_and_for_the_budget_of_the_day(site: Site) -> None:
    world = site.world
    world.hold_out(3)
    with world.database.write() as session:
        count(session, REHEARSED, day_of(world.clock.now), 1_000)

    name = world.register(1)
    for _ in range(4):
        await site.controller.tick()

    assert site.asked == []
    assert "tokens_per_day" in (site.gate.away(world.canary(name)) or "")


@pytest.mark.both_stores
def test_the_prompt_of_a_task_is_its_first(world: World) -> None:
    first, later = world.serve("s", held_out=True), world.serve("s", held_out=True)
    world.serve("t", held_out=True, status=500)  # its first request failed
    only_later = world.serve("t", held_out=True)
    with world.database.write() as session:
        row = ExchangeRow
        for name, parent in ((later, first), (only_later, "x0")):
            session.execute(
                update(row).where(row.exchange_id == name).values(turn=1, parent_id=parent)
            )

    with world.database.read() as session:
        prompts = held_out_prompts(session, world.line, limit=5, first=True)

    assert [one.exchange_id for one in prompts] == [first]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (Answer(success=True, outcome=-3.0), 1.0),
        (Answer(success=False), 0.0),
        (Answer(outcome=0.25), 0.25),
        (Answer(outcome=7.0), None),
        (Answer(), None),
    ],
)
def test_the_value_of_an_end(answer: Answer, value: float | None) -> None:
    assert value_of(answer) == value
