"""Rehearsals: recorded tasks that the team's runner plays again, several times each, while vLLM is
idle.

One group of attempts is under way at a time, and of it one attempt: so an agent that asks one thing
at a time adds one request to what vLLM does, and an attempt begins only where the load test of
sampling finds room. All attempts of a group are pinned to the champion of its beginning. An attempt
is a member of no task group until all of them have ended; one that failed never becomes a member.

The sidecar calls no tool. What an attempt does is the runner's doing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx
import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.errors import SamplingError, UnreadableExchangesError
from ingest.feedback.deriving import save_feedback
from ingest.store.exchanges import load_exchange
from ingest.store.listing import patiently
from ingest.tasks.attempts import (
    Played,
    Player,
    Task,
    TaskGoneError,
    answered_by,
    end_attempt,
    spent_today,
)
from ingest.tasks.keys import IDLE_S, caller_of
from ingest.tasks.runner import Answer
from ingest.vllm.sampler import Room
from sidecar import conditions
from sidecar.backoff import Backoff
from sidecar.errors import UNREADABLE_JSON, StoreError
from sidecar.feedback import Feedback, id_of_key
from sidecar.lines import PAUSED, Line, flag_of
from sidecar.records import BASE
from sidecar.routing.table import decode_table
from sidecar.settings import Settings
from sidecar.settings.learning import Rehearsals
from sidecar.store.database import DAMAGE, Database, get_flag
from sidecar.store.models import ExchangeRow, FeedbackRow, RehearsalRow, RoutingRow

# Which task is played next. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A finished session whose task may be played again."""

    exchange_id: str
    """Its first request."""
    key: tuple[str, ...]
    """Shared by sessions of one task."""
    prompt_key: str | None
    at: float
    caller: str = ""
    """Who asked, as `ingest.tasks.keys.caller_of` has it."""
    rewards: tuple[float, ...] = ()
    """Of users' sessions of this task, and of its rehearsals; unknown ones are left out."""
    attempts: int = 0

    @property
    def is_alike(self) -> bool:
        """Its attempts are known to end alike: nothing can be learned from one more group."""
        return len(self.rewards) > 1 and min(self.rewards) == max(self.rewards)


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return one candidate of each task, the best first: those whose rewards differed, or are not
    known; of these the least rehearsed; of these the newest of each caller before the second
    newest of any."""
    best: dict[tuple[str, ...], Candidate] = {}
    for one in sorted(candidates, key=lambda one: -one.at):
        best.setdefault(one.key, one)
    of_caller: Counter[str] = Counter()
    turns: dict[tuple[str, ...], int] = {}
    for one in best.values():
        turns[one.key], of_caller[one.caller] = of_caller[one.caller], of_caller[one.caller] + 1
    return sorted(
        best.values(), key=lambda one: (one.is_alike, one.attempts, turns[one.key], -one.at)
    )


# What the store says: tasks, the champion, what is spent.

EXAMINED: Final = 2_000
"""Newest exchanges among which tasks are looked for: some ten milliseconds."""
MOST_A_DAY: Final = 32
"""Attempts at a task in 24 hours: eight groups of four. More of one task teach that task alone."""
DAY_S: Final = 86_400.0
TRIED: Final = 20
"""Candidates that are read before none is chosen."""
ENDED: Final = "ended"
"""Value of `rehearsal.result`: it counts. Others say why it counts for nothing, and stand in
`task_member.excluded` too."""


def candidates_in(session: Session, *, now: float) -> list[Candidate]:
    """Read the newest finished sessions whose first request is known: of users, and of none that is
    held out. A session is finished when its outcome was told, or after `IDLE_S` without a turn."""
    row = ExchangeRow
    found = session.execute(
        select(
            *(row.seq, row.exchange_id, row.session_id, row.project, row.task, row.prompt_key),
            *(row.started_at, row.stored_at, row.turn, row.parent_id, row.surface, row.status),
            *(row.outcome, row.held_out, row.user, row.key_id, row.address_hash),
        )
        .where(row.origin == "user")
        .order_by(row.seq.desc())
        .limit(EXAMINED)
    ).all()
    newest: dict[str, float] = {}
    first: dict[str, Any] = {}
    held = {one.session_id for one in found if one.held_out}
    for one in found:
        newest.setdefault(one.session_id, one.stored_at)
        answered = (one.surface, one.status, one.outcome) == ("chat", 200, "ok")
        if answered and one.parent_id is None and one.turn == 0:
            first[one.session_id] = one  # the oldest is the last
    feedback, played = FeedbackRow, RehearsalRow
    outcomes = select(feedback.session_id, feedback.reward, feedback.success).where(
        feedback.session_id.in_(sorted(first)), feedback.kind == "outcome"
    )
    told = session.execute(outcomes.limit(EXAMINED)).all()
    ended = {name for name, *_ in told}
    found_by = {
        name: Candidate(
            exchange_id=one.exchange_id,
            key=(one.project, one.task or one.prompt_key or name),
            prompt_key=one.prompt_key,
            at=one.started_at,
            caller=caller_of(one.user, one.key_id, one.address_hash),
        )
        for name, one in first.items()
        if name not in held and (name in ended or newest[name] <= now - IDLE_S)
    }
    by_task = {one.exchange_id: one for one in found_by.values()}
    attempts = session.execute(
        select(played.task, played.outcome, played.success, played.began_at).where(
            played.task.in_(sorted(by_task))
        )
    ).all()
    rewards: dict[tuple[str, ...], list[float]] = {}
    of_all = [
        (found_by.get(row.session_id or ""), _values(row.reward, row.success)) for row in told
    ]
    of_all += [(by_task.get(row.task), _values(row.outcome, row.success)) for row in attempts]
    for of, values in of_all:
        if of is not None:
            rewards.setdefault(of.key, []).extend(values)
    number = Counter(by_task[row.task].key for row in attempts)
    today = Counter(by_task[row.task].key for row in attempts if row.began_at > now - DAY_S)
    return [
        replace(one, rewards=tuple(rewards.get(one.key, ())), attempts=number[one.key])
        for one in found_by.values()
        if today[one.key] < MOST_A_DAY
    ]


def _values(reward: float | None, success: bool | None) -> list[float]:
    value = success if reward is None else reward
    return [] if value is None else [float(value)]


def choose_task(session: Session, *, now: float) -> Task | None:
    """Return the task that is played next; None when there is none."""
    for one in in_order(candidates_in(session, now=now))[:TRIED]:
        # A prompt of the exam is not learned from, whoever asked it too.
        row = ExchangeRow
        of_exam = row.prompt_key == one.prompt_key, row.selection == "held_out"
        examined = select(row.seq).where(*of_exam).limit(1)
        if one.prompt_key is not None and session.scalar(examined) is not None:
            continue
        if (task := load_task(session, one.exchange_id)) is not None:
            return task
    return None


def load_task(session: Session, exchange_id: str) -> Task | None:
    """Read a task; None when its request is gone, or holds no messages that can be sent again."""
    try:
        stored = load_exchange(session, exchange_id)
        if stored is None:
            return None
        request = msgspec.json.decode(stored.exchange.request, type=dict[str, Any])
        messages, tools = request.get("messages"), request.get("tools") or []
        found = msgspec.convert([messages, tools], type=list[list[dict[str, Any]]])
        msgspec.json.encode(found)  # it may be nested too deep to be sent
    except (*UNREADABLE_JSON, *DAMAGE, UnreadableExchangesError) as error:
        log.warning("task_unreadable", exchange_id=exchange_id, why=str(error))
        return None
    if not found[0]:
        return None
    project = stored.exchange.project
    return Task(exchange_id=exchange_id, project=project, messages=found[0], tools=found[1])


def champion_of(session: Session, line: Line) -> str | None:
    """Return the champion of a line by its routing table; None when the table is damaged."""
    row = session.get(RoutingRow, line.name, populate_existing=True)
    try:
        return BASE if row is None else decode_table(row.body).champion
    except DAMAGE:
        return None


# The worker.

POLL_S: Final = 2.0
"""Pause while vLLM has no room, or nothing may be played."""
NOTHING_S: Final = 60.0
"""Pause when no task was found."""
FAILURES: Final = 3
"""Failures of the runner in a row after which it is held."""
HOLDS: Final = Backoff(first_s=60.0, last_s=3_600.0)
EXAM_SHARE: Final = 0.2
"""Of the day's tokens: left for attempts that compare a candidate with its champion."""
KIND: Final = "rehearsals"
"""Of the condition that says that the runner is held."""

log = structlog.get_logger()


class RehearsalWorker:
    """Plays groups of attempts until it is stopped. One for each sidecar."""

    def __init__(
        self,
        database: Database,
        room: Room,
        settings: Settings,
        *,
        now: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """room: tells whether users leave capacity. transport: a fake runner, for tests."""
        self._database = database
        self._room = room
        self._settings = settings
        self._own = settings.rehearsals
        self._now = now
        self._player = Player(database, settings, now=now, transport=transport)
        self._failures = 0
        self._held_until = 0.0
        self._says_held = True
        """The store may have a condition, of this process or of an earlier one."""

    async def run(self, stop: asyncio.Event) -> None:
        """Play groups until `stop` is set; an attempt that is under way then counts for nothing."""
        playing = asyncio.create_task(self._play_on())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for one in (playing, stopping):
            one.cancel()
        found = await asyncio.gather(playing, stopping, return_exceptions=True)
        await self._player.close()
        if isinstance(found[0], Exception):
            raise found[0]

    async def _play_on(self) -> None:
        while True:
            try:
                pause_s = await self.step()
            except StoreError as error:
                log.warning("rehearsals_wait", error=str(error))
                pause_s = POLL_S
            await asyncio.sleep(pause_s)

    async def step(self) -> float:
        """Play one group, if one may be played now. Returns: seconds until the next step. Raises:
        StoreError."""
        if not await self._may_play(self._settings.lines[0]):
            return POLL_S
        task = await asyncio.to_thread(self._choose)
        if task is None:
            return NOTHING_S
        lines = self._settings.lines
        line = next((line for line in lines if line.project == task.project), lines[0])
        champion = await asyncio.to_thread(self._champion, line)
        if champion is None:
            return POLL_S
        played: list[Played] = []
        stays = True
        while stays and len(played) < self._settings.tasks.size:
            if await self._may_play(line):
                try:
                    played.append(await self._player.play(task, champion, len(played)))
                except TaskGoneError:
                    break
                if played[-1].is_away:
                    break
            else:
                await asyncio.sleep(POLL_S)
            stays = await asyncio.to_thread(self._champion, line) == champion
        names = [one.session_id for one in played if one.answer is not None]
        await self._judge_runner(played, await self._player.arrived(names))
        await patiently(
            lambda: self._settle(task, played, stays=stays),
            on_failure=lambda error, _: log.warning("rehearsals_wait", error=str(error)),
        )
        return POLL_S if played and played[-1].is_away else 0.0

    async def _may_play(self, line: Line) -> bool:
        if self._now() < self._held_until or not await asyncio.to_thread(self._is_wanted, line):
            return False
        try:
            return await self._room.is_open()
        except SamplingError:
            return False

    def _is_wanted(self, line: Line) -> bool:
        with self._database.read() as session:
            paused = get_flag(session, flag_of(PAUSED, line.name)) == "1"
            _, tokens = spent_today(session, now=self._now())
        kept = EXAM_SHARE if self._settings.tasks_are_examined else 0.0
        return not paused and tokens < (1.0 - kept) * self._own.tokens_per_day

    def _choose(self) -> Task | None:
        with self._database.read() as session:
            return choose_task(session, now=self._now())

    def _champion(self, line: Line) -> str | None:
        with self._database.read() as session:
            return champion_of(session, line)

    async def _judge_runner(self, played: Sequence[Played], found: Collection[str]) -> None:
        """Count against the runner an attempt that failed, one that asked the model nothing, and
        one whose end is not known although outcomes are the rewards."""
        for one in played:
            why = one.detail
            if one.answer is not None and one.session_id not in found:
                why = "it asked the model nothing with the headers of the attempt"
            elif one.answer == Answer() and self._settings.tasks.learn == "outcome":
                why = "it does not say how the attempt ended"
            if why is not None:
                await asyncio.to_thread(self._fail, why)
            else:
                self._failures = 0
        if self._says_held and not self._failures:
            await asyncio.to_thread(self._say_well)

    # -- the store

    def _settle(self, task: Task, played: Sequence[Played], *, stays: bool) -> None:
        """Store how the attempts of a group ended. Those that count get their outcome, and may
        become members of a group from now on."""
        told, now = FeedbackRow, self._now()
        names = [one.session_id for one in played]
        with self._database.write() as session:
            found = answered_by(session, names)
            tokens = {name: number for name, (_, number) in found.items()}
            twice = select(told.session_id).where(
                told.session_id.in_(names), told.kind == "outcome"
            )
            answered = set(session.scalars(twice))
            is_there = load_task(session, task.exchange_id) is not None
            for one in played:
                reasons = {
                    "runner_error": one.answer is None,
                    "champion_changed": not stays,
                    "no_exchange": one.session_id not in tokens,
                    "answered_twice": one.session_id in answered,
                    "task_deleted": not is_there,
                }
                why = next((name for name, holds in reasons.items() if holds), None)
                kept = (why is None and one.answer) or Answer()
                used = tokens.get(one.session_id, 0)
                row = {"ended_at": now, "detail": one.detail, "tokens": used}
                end_attempt(session, one.session_id, kept, result=why or ENDED, excluded=why, **row)
                if why is None:
                    record = Feedback(
                        feedback_id=id_of_key(task.project, "outcome", one.session_id),
                        kind="outcome",
                        target_kind="session",
                        target=one.session_id,
                        project=task.project,
                        source="rehearsal",
                        received_at=now,
                        success=kept.success,
                        reward=kept.outcome,
                        done=True,
                    )
                    save_feedback(session, [record], now=now)
        log.info("rehearsed", task=task.exchange_id, attempts=len(played))

    def _fail(self, why: str) -> None:
        """Count a failure of the runner, and hold it after several in a row."""
        self._failures += 1
        log.warning("runner_failed", why=why, failures=self._failures)
        if self._failures < FAILURES:
            return
        now = self._now()
        self._held_until = now + HOLDS.wait_s(self._failures - FAILURES + 1)
        runner = httpx.URL(self._own.runner).netloc.decode()
        found = conditions.Condition(
            kind=KIND,
            state="act",
            code="runner_held",
            message=f"the runner at {runner} failed {self._failures} times in a row, so no task is "
            f"rehearsed; last: {why}"[: conditions.MOST_CHARACTERS],
            to_do="look at the runner's own log; it is asked again at the time given here",
            until=self._held_until,
            data={"runner": runner, "failures": self._failures},
        )
        with self._database.write(alone=False) as session:
            conditions.write(session, found, now=now)
        self._says_held = True

    def _say_well(self) -> None:
        with self._database.write(alone=False) as session:
            conditions.clear(session, KIND)
        self._says_held = False


# What is shown.

SHOWN: Final = 2_000
"""Newest attempts of which the listing tells."""
MOST_ATTEMPTS: Final = 8
"""Of a group."""


def rehearsed_tasks(session: Session) -> list[dict[str, Any]]:
    """Return the tasks of the newest `SHOWN` attempts, the newest first, as JSON objects."""
    found: dict[str, list[RehearsalRow]] = {}
    newest = select(RehearsalRow).order_by(RehearsalRow.seq.desc()).limit(SHOWN)
    for row in session.scalars(newest):
        found.setdefault(row.task, []).append(row)
    return [_shown(task, rows) for task, rows in found.items()]


def _shown(task: str, rows: Sequence[RehearsalRow]) -> dict[str, Any]:
    outcomes = [value for one in rows for value in _values(one.outcome, one.success)]
    return {
        "task": task,
        "project": rows[0].project,
        "adapter": rows[0].adapter,
        "at": rows[0].began_at,
        "attempts": len(rows),
        "results": dict(Counter(one.result for one in rows)),
        "outcomes": outcomes,
        "spread": max(outcomes) - min(outcomes) if outcomes else None,
        "tokens": sum(one.tokens for one in rows),
        "detail": next((one.detail for one in rows if one.detail), None),
    }


def rehearsals_status(session: Session, own: Rehearsals, *, now: float) -> dict[str, Any] | None:
    """Return what `sidecar status` tells, as a JSON object; None while nothing is rehearsed."""
    if not own.are_on:
        return None
    attempts, tokens = spent_today(session, now=now)
    newest = select(RehearsalRow).order_by(RehearsalRow.seq.desc()).limit(MOST_ATTEMPTS)
    rows = session.scalars(newest).all()
    last = [one for one in rows if one.task == rows[0].task]
    return {
        "attempts_today": attempts,
        "tokens_left": max(0, own.tokens_per_day - tokens),
        "last": _shown(last[0].task, last) if last else None,
    }
