"""One attempt of the runner at a recorded task: asked for by a ticket, known in the store.

`ingest.tasks.rehearsals` plays attempts to learn from; `deploy.canary.exam` to compare a candidate
with its champion.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from ingest.errors import IngestError
from ingest.grouping.features import is_held_out
from ingest.sampling.round import REHEARSED
from ingest.store.listing import day_of
from ingest.tasks.keys import FirstExchange, task_key
from ingest.tasks.runner import (
    MAX_ANSWER_BYTES,
    PATH,
    TOKEN_VARIABLE,
    Answer,
    RunnerAwayError,
    RunnerError,
    Scenario,
    read_answer,
)
from sidecar.rehearsals import Attempt, attempt_headers, make_secret
from sidecar.routing.session_key import session_key
from sidecar.settings import Settings
from sidecar.store.database import Database, count, insert_into
from sidecar.store.models import CounterRow, ExchangeRow, RehearsalRow, TaskMemberRow

ATTEMPTS: Final = "rehearsal_attempts"
"""Stage of counter rows: (stage, day) -> attempts."""
PLAYING: Final = "playing"
"""Value of `rehearsal.result`: it is under way, or the process that played it ended meanwhile."""
ATTEMPT_S = 600.0  # longest time of one attempt
ARRIVE_S: Final = 30.0
"""How long the exchanges of attempts may take to arrive in the store."""
ARRIVE_POLL_S: Final = 0.2
SLACK_S: Final = 5.0
"""A ticket is valid so much longer than its attempt: clocks of two machines differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A recorded task."""

    exchange_id: str
    project: str
    messages: list[dict[str, Any]]  # Any: JSON
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Played:
    """One attempt."""

    session_id: str
    answer: Answer | None
    """None: the runner failed."""
    detail: str | None = None
    is_away: bool = False
    """The runner cannot be asked at all."""


def spent_today(session: Session, *, now: float) -> tuple[int, int]:
    """Return the attempts of today (UTC), and the completion tokens of rehearsals."""
    rows = (session.get(CounterRow, (one, day_of(now))) for one in (ATTEMPTS, REHEARSED))
    attempts, tokens = (0 if row is None else row.count for row in rows)
    return attempts, tokens


class TaskGoneError(IngestError):
    """The recorded task is in the store no more: nothing of it may be sent."""


class Player:
    """Has the runner play attempts, one at a time."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        now: Callable[[], float],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """transport: a fake runner, for tests. Raises: OSError when the secret cannot be made."""
        self._database = database
        self._settings, self._own = settings, settings.rehearsals
        self._now = now
        self._secret = make_secret(settings.state_dir)
        self._token = os.environ.get(TOKEN_VARIABLE, "")
        own = {"authorization": f"Bearer {self._token}"} if self._token else {}
        self._client = httpx.AsyncClient(
            headers={**own, "accept-encoding": "identity", "content-type": "application/json"},
            timeout=None,  # `_ask` bounds the whole attempt
            trust_env=False,
            transport=transport,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def play(self, task: Task, adapter: str, number: int) -> Played:
        """Play an attempt to its end. Raises: StoreError, TaskGoneError."""
        attempt = Attempt(
            session=self._name(task.project),
            task=task.exchange_id,
            project=task.project,
            adapter=adapter,
            expires_at=int(self._now() + ATTEMPT_S + SLACK_S),
        )
        key = session_key(header=attempt.session, user="", project=task.project)
        name = await asyncio.to_thread(self._begin, attempt, key, number)
        proxy = self._settings.proxy
        host = "127.0.0.1" if proxy.host in ("0.0.0.0", "::") else proxy.host
        host = f"[{host}]" if ":" in host else host
        scenario = Scenario(
            task_id=task.exchange_id,
            task_name=name,
            attempt=number,
            session_id=attempt.session,
            project=task.project,
            model=self._settings.serving.model,
            base_url=f"http://{host}:{proxy.port}/v1",
            headers=attempt_headers(self._secret, attempt),
            messages=task.messages,
            tools=task.tools,
            timeout_s=ATTEMPT_S,
        )
        try:
            return Played(key, await self._ask(scenario))
        except RunnerError as error:
            told = str(error)
            for secret in (*scenario.headers.values(), self._token):
                told = told.replace(secret, "...") if secret else told
            return Played(key, None, told, is_away=isinstance(error, RunnerAwayError))

    async def arrived(self, names: Collection[str]) -> dict[str, tuple[str, int]]:
        """Wait until the store has exchanges of these sessions, `ARRIVE_S` at most.

        Returns: session id -> (adapter that answered, completion tokens), of those that it has; ""
            where several adapters answered.
        """
        found: dict[str, tuple[str, int]] = {}
        for _ in range(int(ARRIVE_S / ARRIVE_POLL_S)):
            found = await asyncio.to_thread(self._arrived, names)
            if found.keys() >= set(names):
                break
            await asyncio.sleep(ARRIVE_POLL_S)
        return found

    def _arrived(self, names: Collection[str]) -> dict[str, tuple[str, int]]:
        with self._database.read() as session:
            return answered_by(session, names)

    def _name(self, project: str) -> str:
        """Draw a name of a session that is not held out."""
        while True:
            name = f"rehearsal-{os.urandom(10).hex()}"
            key = session_key(header=name, user="", project=project)
            if not is_held_out(key, self._settings.groups.held_out_rate):
                return name

    async def _ask(self, scenario: Scenario) -> Answer:
        """Have the runner play an attempt. Raises: RunnerError."""
        url, body = self._own.runner.rstrip("/") + PATH, bytearray()
        try:
            content = msgspec.json.encode(scenario)
        except (RecursionError, ValueError) as error:
            raise RunnerError(
                "the task cannot be sent as JSON: it is nested too deep, or holds half a character"
            ) from error
        try:
            async with (
                asyncio.timeout(ATTEMPT_S),
                self._client.stream("POST", url, content=content) as reply,
            ):
                if reply.headers.get("content-encoding", "identity") != "identity":
                    raise RunnerError("its answer is compressed, which nobody asked for")
                async for piece in reply.aiter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        break
        except TimeoutError as error:
            raise RunnerError(f"it gave no answer in {ATTEMPT_S:g} s") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise RunnerAwayError(f"it cannot be asked: {why}") from error
        if reply.status_code != 200:
            text = bytes(body[:200]).decode("utf-8", "replace")
            raise RunnerAwayError(f"it answered {reply.status_code}: {text}")
        return read_answer(bytes(body))

    def _begin(self, attempt: Attempt, key: str, number: int) -> str:
        """Store an attempt that begins, and its session as one that is a member of nothing yet.

        Returns: the name that the agent gave to the task; empty: none. Raises: TaskGoneError.
        """
        now = self._now()
        first = FirstExchange(project=attempt.project, task=attempt.task, origin="rehearsal")
        task = task_key(first, weakest="header")
        assert task is not None, "a rehearsal has a task"
        with self._database.write(alone=False) as session:
            recorded = select(ExchangeRow.task).where(ExchangeRow.exchange_id == attempt.task)
            name = session.scalar(recorded)
            if name is None:
                raise TaskGoneError("the task was forgotten, or deleted by retention")
            session.add(
                RehearsalRow(
                    session_id=key,
                    task=attempt.task,
                    project=attempt.project,
                    adapter=attempt.adapter,
                    attempt=number,
                    began_at=now,
                    result=PLAYING,
                )
            )
            member = insert_into(session, TaskMemberRow).values(
                session_id=key,
                project=attempt.project,
                key_kind=task.kind,
                key=task.digest,
                adapter=attempt.adapter,
                caller="",
                began_at=now,
                excluded=PLAYING,
            )
            session.execute(member.on_conflict_do_nothing())
            count(session, ATTEMPTS, day_of(now))
            return name


def end_attempt(
    session: Session, name: str, kept: Answer, *, result: str, excluded: str | None, **row: Any
) -> None:
    """Store how the attempt of a session ended. kept: its end. excluded: why the session is a
    member of no group; None: it may be one. row: further columns of the attempt."""
    of, member = RehearsalRow, TaskMemberRow
    ended = {**row, "result": result, "outcome": kept.outcome, "success": kept.success}
    session.execute(update(of).where(of.session_id == name).values(ended))
    session.execute(update(member).where(member.session_id == name).values(excluded=excluded))
    count(session, "rehearsals", result)


def answered_by(session: Session, names: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return session id -> (adapter that answered, completion tokens), as `Player.arrived`."""
    row = ExchangeRow
    figures = (func.min(row.adapter), func.max(row.adapter), func.sum(row.completion_tokens))
    of_names = row.session_id.in_(sorted(names))
    found = session.execute(
        select(row.session_id, *figures).where(of_names).group_by(row.session_id)
    )
    return {
        name: (first if first == last else "", tokens or 0) for name, first, last, tokens in found
    }
