"""Whole tasks in place of single answers: what an attempt proves, and what a failed one costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import select, update

from deploy.canary.exam import TaskExam, value_of
from deploy.canary.gate import Gate
from deploy.canary.gate_store import HeldOutPrompt, held_out_prompts
from ingest.sampling.round import REHEARSED
from ingest.store.listing import day_of
from ingest.tasks import attempts
from ingest.tasks.runner import Answer, Scenario
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings, Settings
from sidecar.store.database import count
from sidecar.store.models import CounterRow, ExchangeRow, RehearsalRow, TaskMemberRow
from tests.deploy.conftest import World

Plays = Callable[[str], Any]


@pytest.fixture
def rules() -> CanarySettings:
    return CanarySettings(
        promote_on="quick",
        gate_prompts=3,
        gate_answers=2,
        gate_min_prompts=2,
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
                **rehearsals,
            },
        )
        assert settings.tasks_are_examined
        self.world = world
        self.asked: list[Scenario] = []
        self.ends: Plays = lambda adapter: {"success": True}
        self.answers: Callable[[str], str | None] = lambda adapter: adapter
        """Adapter whose answer is stored for an attempt; None: nothing is asked."""
        self.status = 200
        self.exam = exam = TaskExam(
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
        return httpx.Response(self.status, content=json.dumps(said).encode())

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


@pytest.mark.parametrize("by", [None, "m--v9-other"])
async def test_a_runner_that_does_not_ask_the_adapter_proves_nothing(
    site: Site, by: str | None
) -> None:
    """It would end alike with every adapter."""
    site.world.hold_out(3)
    site.answers = lambda adapter: by

    candidate = await site.gated()

    assert site.world.canary(candidate).phase != "ramping"
    assert {(one.status, one.fault) for one in site.world.comparisons()} == {
        ("set_aside", "unknown")
    }


@pytest.mark.parametrize("bad", [{"error": "the agent cannot read this answer"}, {}])
@pytest.mark.parametrize("arm", ["candidate", "champion"])
async def test_bad_ends_count_against_their_arm_whatever_the_runner_calls_them(
    site: Site, bad: dict[str, str], arm: str
) -> None:
    site.world.hold_out(3)
    of_champion = arm == "champion"
    site.ends = lambda one: bad if (one == BASE) is of_champion else {"success": True}

    candidate = await site.gated()

    assert site.world.canary(candidate).phase == ("ramping" if of_champion else "rolled_back")
    assert [one.difference for one in site.world.comparisons()] == [
        1.0 if of_champion else -1.0
    ] * 3
    tried = [site.adapter_of(ask) for ask in site.asked]
    bad_one = BASE if of_champion else candidate
    assert tried.count(bad_one) == (12 if bad else 6)  # a failed one is made once more


async def test_a_task_of_which_no_end_is_known_is_set_aside_and_the_next_one_asked(
    site: Site,
) -> None:
    site.world.hold_out(6)
    site.ends = lambda adapter: {}

    await site.gated()

    found = site.world.comparisons()
    assert len(found) > 1
    assert {(one.status, one.fault, one.difference) for one in found} == {
        ("set_aside", "unknown", None)
    }
    with site.world.database.read() as session:
        assert session.get(CounterRow, ("gate", "no_outcome")) is not None


async def test_a_runner_that_is_away_and_room_that_is_not_known_cost_nobody(site: Site) -> None:
    site.world.hold_out(3)
    site.status = 503

    candidate = await site.gated()

    assert site.world.canary(candidate).phase == "gating"
    assert site.world.comparisons() == []
    assert "503" in (site.gate.away(site.world.canary(candidate)) or "")


async def test_a_task_that_cannot_be_sent_costs_itself(site: Site) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    world = site.world
    prompt = HeldOutPrompt(
        exchange_id=world.serve("deep", held_out=True),
        session_id="deep",
        request={"messages": [{"role": "user", "content": deep}]},
        project="default",
    )
    name = world.register(1)
    await site.controller.tick()

    given = await site.exam.ask(world.canary(name), prompt, BASE, 0)

    assert given.reward is None
    assert "nested too deep" in given.message["content"]


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
