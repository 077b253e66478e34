"""Recorded tasks are played again: what becomes a group, and what counts for nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import select

from ingest.errors import SamplingError
from ingest.retention.deletion import delete_exchanges
from ingest.tasks import attempts, rehearsals
from ingest.tasks.keys import IDLE_S
from ingest.tasks.rehearsals import (
    Candidate,
    RehearsalWorker,
    choose_task,
    in_order,
    rehearsals_status,
    rehearsed_tasks,
)
from ingest.tasks.runner import Scenario
from sidecar import conditions
from sidecar.lines import PAUSED
from sidecar.rehearsals import make_secret, read_ticket
from sidecar.routing.table import RoutingTable, encode_table
from sidecar.settings import Settings
from sidecar.store.database import count, set_flag
from sidecar.store.models import FeedbackRow, RehearsalRow, RoutingRow
from support.ingest_kit import Kit
from support.task_kit import TaskKit

Answer = Callable[[Scenario], Awaitable[httpx.Response]]


class Room:
    """Users leave room, or do not; or nobody knows."""

    def __init__(self) -> None:
        self.open: bool | None = True

    async def is_open(self) -> bool:
        if self.open is None:
            raise SamplingError("no metrics")
        return self.open


class Play:
    """A worker, its store and its runner. The runner plays two turns and earns its attempt's
    number, unless `answers` says otherwise for an attempt."""

    def __init__(self, kit: Kit, state_dir: Path, **rehearsal: Any) -> None:
        self.settings = Settings(
            state_dir=state_dir,
            serving={"model": "smollm"},
            tasks={"learn": "outcome", "size": 2},
            rehearsals={"runner": "http://runner:1", "tokens_per_day": 1_000, **rehearsal},
        )
        self.tasks = TaskKit(kit.database, size=2)
        self.database, self.kit = kit.database, kit
        self.room, self.asked = Room(), list[Scenario]()
        self.answers: dict[int, Answer] = {}
        self.champion = "base"
        self.worker = RehearsalWorker(
            kit.database,
            self.room,
            self.settings,
            now=lambda: self.tasks.now,
            transport=httpx.MockTransport(self._answer),
        )

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        ask = msgspec.json.decode(request.content, type=Scenario)
        self.asked.append(ask)
        answer = self.answers.get(ask.attempt)
        return await (self.plays(ask) if answer is None else answer(ask))

    async def plays(self, ask: Scenario, body: Any = None) -> httpx.Response:
        await asyncio.to_thread(self.turns, ask)
        body = {"outcome": float(ask.attempt)} if body is None else body
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.Response(200, content=content)

    def turns(self, ask: Scenario) -> None:
        of: dict[str, Any] = {
            "task": ask.task_id,
            "origin": "rehearsal",
            "arm": "rehearsal",
            "session_key": f"h:{ask.session_id}",
            "user": "",
            "adapter": self.champion,
            "completion_tokens": 7,
        }
        first = self.tasks.turn(f"h:{ask.session_id}", **of)
        self.tasks.turn(f"h:{ask.session_id}", parent=first, **of)

    def promote(self, adapter: str) -> None:
        self.champion = adapter
        table = RoutingTable(model="smollm", champion=adapter, generation=len(self.asked) + 1)
        with self.database.write() as session:
            session.merge(
                RoutingRow(
                    model="smollm",
                    generation=table.generation,
                    body=encode_table(table),
                    updated_at=0.0,
                )
            )

    def results(self) -> list[str]:
        with self.database.read() as session:
            return list(session.scalars(select(RehearsalRow.result).order_by(RehearsalRow.seq)))

    def condition(self) -> conditions.Condition | None:
        with self.database.read() as session:
            return conditions.read(session, "rehearsals")

    def held(self) -> conditions.Condition:
        found = self.condition()
        assert found is not None
        return found


@pytest.fixture
def play(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(attempts, "ARRIVE_S", 0.2)
    monkeypatch.setattr(attempts, "ATTEMPT_S", 2.0)
    made = Play(kit, tmp_path)
    made.tasks.session("source", task="")
    made.tasks.now += IDLE_S
    return made


@pytest.mark.both_stores
async def test_attempts_at_a_recorded_task_become_one_group(play: Play, tmp_path: Path) -> None:
    assert await play.worker.step() == 0.0

    assert [one.attempt for one in play.asked] == [0, 1]
    (task,) = {one.task_id for one in play.asked}
    assert task.startswith("source-")
    assert play.asked[0].messages[0]["role"] == "user"
    headers = play.asked[1].headers
    shown = {name.encode(): value.encode() for name, value in headers.items()}
    ticket = read_ticket(make_secret(tmp_path), shown, play.tasks.now)
    assert ticket is not None
    assert (ticket.task, ticket.adapter, ticket.project) == (task, "base", "default")
    assert play.results() == ["ended", "ended"]
    assert play.tasks.follow() == 1
    (group,) = play.tasks.groups()
    members = play.tasks.members(group.group_id)
    assert (group.key_kind, group.status) == ("rehearsal", "scored")
    assert sorted(one.reward or 0.0 for one in members.values()) == [0.0, 1.0]
    with play.database.read() as session:
        (listed,) = rehearsed_tasks(session)
        standing = rehearsals_status(session, play.settings.rehearsals, now=play.tasks.now)
    assert (listed["attempts"], listed["spread"], listed["tokens"]) == (2, 1.0, 28)
    assert listed["outcomes"] == [1.0, 0.0]
    assert standing is not None
    assert (standing["attempts_today"], standing["last"]["results"]) == (2, {"ended": 2})


async def test_the_runner_gets_the_name_that_the_agent_gave_to_the_task(play: Play) -> None:
    play.tasks.session("named", task="refund-7")
    play.tasks.now += IDLE_S

    await play.worker.step()
    await play.worker.step()

    assert {one.task_name for one in play.asked} == {"", "refund-7"}


async def hangs(ask: Scenario) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def dies(ask: Scenario) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


async def fails(ask: Scenario) -> httpx.Response:
    return httpx.Response(500, content=b"Traceback")


async def asks_nothing(ask: Scenario) -> httpx.Response:
    return httpx.Response(200, content=b'{"outcome": 1}')


async def packs(ask: Scenario) -> httpx.Response:
    """64 KiB of it could be of any size."""
    body = gzip.compress(b'{"outcome": 1.0}')
    return httpx.Response(200, content=body, headers={"content-encoding": "gzip"})


BAD: dict[str, tuple[Any, str]] = {
    "hangs": (hangs, "runner_error"),
    "dies": (dies, "runner_error"),
    "fails": (fails, "runner_error"),
    "packs": (packs, "runner_error"),
    "NaN": (b'{"outcome": NaN}', "runner_error"),
    "tells of an error": ({"outcome": 1, "error": "no tool"}, "runner_error"),
    "claims an outcome of nothing": (asks_nothing, "no_exchange"),
}


@pytest.mark.parametrize("name", BAD)
async def test_an_attempt_that_fails_is_in_no_group(play: Play, name: str) -> None:
    answer, result = BAD[name]

    async def bad(ask: Scenario) -> httpx.Response:
        return await play.plays(ask, answer)

    play.answers[1] = answer if callable(answer) else bad

    await play.worker.step()

    assert play.results() == ["ended", result]
    assert play.tasks.follow(after_s=10 * IDLE_S) == 0
    with play.database.read() as session:
        told = session.scalars(select(FeedbackRow.target)).all()
    assert told == [f"h:{play.asked[0].session_id}"]


async def test_an_attempt_of_which_another_outcome_was_told_is_in_no_group(play: Play) -> None:
    async def twice(ask: Scenario) -> httpx.Response:
        name = f"h:{ask.session_id}"
        reply = await play.plays(ask)
        outcome: dict[str, Any] = {"target_kind": "session", "target": name, "reward": 9.0}
        await asyncio.to_thread(play.tasks.told, name, **outcome)
        return reply

    play.answers[0] = twice

    await play.worker.step()

    assert play.results() == ["answered_twice", "ended"]
    assert play.tasks.follow(after_s=10 * IDLE_S) == 0


async def test_a_runner_that_fails_three_times_is_held_for_a_while(play: Play) -> None:
    play.answers = {0: fails, 1: dies}
    for _ in range(2):
        assert await play.worker.step() > 0.0
    assert play.condition() is None
    await play.worker.step()

    held = play.held()
    assert (held.state, held.code, held.until) == ("act", "runner_held", play.tasks.now + 60.0)
    assert "runner:1" in held.message
    assert "Traceback" in held.message
    assert len(play.asked) == 3
    await play.worker.step()
    assert len(play.asked) == 3  # not before its time

    play.tasks.now += 60.0
    await play.worker.step()
    assert len(play.asked) == 4  # once, and then it is held for longer
    assert play.held().until == play.tasks.now + 120.0

    play.tasks.now += 120.0
    play.answers.clear()
    await play.worker.step()
    assert play.condition() is None
    assert play.results()[-2:] == ["ended", "ended"]


async def test_a_change_of_champion_drops_the_group(play: Play) -> None:
    async def promotes(ask: Scenario) -> httpx.Response:
        reply = await play.plays(ask)
        await asyncio.to_thread(play.promote, "smollm--v2-0123456789ab")
        return reply

    play.answers[0] = promotes
    await play.worker.step()

    assert play.results() == ["champion_changed"]
    assert play.tasks.follow(after_s=10 * IDLE_S) == 0

    play.answers.clear()
    await play.worker.step()
    assert play.results()[1:] == ["ended", "ended"]
    assert play.tasks.follow() == 1
    assert play.tasks.groups()[0].adapter == "smollm--v2-0123456789ab"


@pytest.mark.parametrize("why", ["users", "unknown", "paused", "spent"])
async def test_nothing_is_played_without_room_budget_or_leave(play: Play, why: str) -> None:
    if why in ("users", "unknown"):
        play.room.open = False if why == "users" else None
    with play.database.write() as session:
        if why == "paused":
            set_flag(session, PAUSED, "1", now=0.0)
        if why == "spent":
            count(session, "rehearsal_tokens", "1970-01-01", 800)  # the rest is for exams

    assert await play.worker.step() > 0.0

    assert play.asked == []


@pytest.mark.both_stores
def test_only_finished_users_sessions_are_chosen(kit: Kit, tmp_path: Path) -> None:
    tasks = TaskKit(kit.database)
    tasks.session("held", held_out=True)
    tasks.turn("h:rehearsal-1", origin="rehearsal", task="ex_1")
    tasks.now += IDLE_S
    tasks.session("going-on")

    def chosen() -> str | None:
        with kit.database.read() as session:
            task = choose_task(session, now=tasks.now)
            return None if task is None else task.exchange_id

    assert chosen() is None
    first = tasks.session("told", success=True)[0]
    assert chosen() == first


def candidate(name: str, *rewards: float, attempts: int = 0, at: float = 0.0) -> Candidate:
    return Candidate(
        exchange_id=name,
        key=(name.split("-")[0],),
        prompt_key=None,
        at=at,
        rewards=rewards,
        attempts=attempts,
    )


def test_tasks_that_may_end_differently_come_first_then_those_rehearsed_least() -> None:
    found = in_order(
        [
            candidate("alike", 1.0, 1.0, at=9.0),
            candidate("differ", 0.0, 1.0, attempts=4),
            candidate("unknown", at=1.0),
            candidate("once", 1.0, at=2.0),
            candidate("once-again", 1.0, at=1.0),
        ]
    )
    assert [one.exchange_id for one in found] == ["once", "unknown", "differ", "alike"]


async def test_a_task_that_is_forgotten_meanwhile_is_played_no_further(play: Play) -> None:
    async def forgets(ask: Scenario) -> httpx.Response:
        reply = await play.plays(ask)
        await asyncio.to_thread(
            delete_exchanges, play.database, [ask.task_id], why="forgotten", now=play.tasks.now
        )
        return reply

    play.answers[0] = forgets

    await play.worker.step()

    assert len(play.asked) == 1


@pytest.mark.parametrize("why", ["asks nothing", "tells nothing"])
async def test_a_runner_that_plays_without_effect_is_held(play: Play, why: str) -> None:
    async def idle(ask: Scenario) -> httpx.Response:
        if why == "tells nothing":
            return await play.plays(ask, {})
        return httpx.Response(200, json={"outcome": 1.0})

    play.answers = {0: idle, 1: idle}
    for _ in range(3):
        await play.worker.step()

    assert play.held().code == "runner_held"


async def test_what_a_runner_says_has_no_ticket_in_it(play: Play) -> None:
    async def echoes(ask: Scenario) -> httpx.Response:
        return httpx.Response(200, json={"error": json.dumps(ask.headers)})

    play.answers[0] = echoes
    await play.worker.step()

    with play.database.read() as session:
        detail = session.scalar(select(RehearsalRow.detail).order_by(RehearsalRow.seq).limit(1))
    assert detail
    assert play.asked[0].headers["x-sidecar-rehearsal"] not in detail


async def test_one_task_is_not_played_all_day(play: Play) -> None:
    for _ in range(20):
        if await play.worker.step() > 0.0:
            break

    assert len(play.asked) == rehearsals.MOST_A_DAY


def test_one_caller_does_not_take_every_turn() -> None:
    def task(at: float, caller: str) -> Candidate:
        return Candidate(
            exchange_id=f"ex_{at:g}", key=("p", f"{at:g}"), prompt_key=None, at=at, caller=caller
        )

    found = in_order([task(1.0, "user:a"), *(task(at, "user:busy") for at in (2.0, 3.0, 4.0))])

    assert [one.at for one in found] == [4.0, 1.0, 3.0, 2.0]
