"""Tell web hooks of transitions, from the audit of the store.

Each hook has a cursor in the store: the number of the last audit row that it was told of, or that
is none of its events. It moves after a delivery, so a killed control tells the event again, with
the same `webhook-id`, and loses none: at least once, in the order of the audit. A receiver that
does not take an event is tried again after a wait that doubles; later events wait behind it. After
`RETRIES` tries, or when it is older than `MAX_AGE_S`, an event is given up (`dead`), and the next
one is told. A hook that is new begins with what happens from then on. Nothing waits for a hook: it
has a loop of its own.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import fnmatch
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deploy.errors import error_line
from deploy.outside.http import CALL_TIMEOUT_S, OutsideError, Poster, end_turns, secret_of
from deploy.registry.audit import NOTHING, Subject, subjects_of
from deploy.text import iso
from sidecar.backoff import Backoff
from sidecar.settings import Hook, Notify
from sidecar.store.database import Database, count, get_flag, set_flag
from sidecar.store.models import AuditRow

# Sign a web hook by the Standard Webhooks specification: HMAC-SHA256 over id, time and body. Pure.

PREFIX = "whsec_"
"""Marks a secret that is written in base64."""


def key_of(secret: str) -> bytes:
    """Return the key that a secret stands for: `whsec_` and base64, or any text.

    Raises: ValueError when the base64 is none, or nothing is left.
    """
    if not secret.startswith(PREFIX):
        if not secret:
            raise ValueError("the secret is empty")
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("the secret has no base64 behind whsec_") from error
    if not key:
        raise ValueError("the secret is empty")
    return key


def signed_headers(key: bytes, *, message_id: str, at: int, body: bytes) -> dict[str, str]:
    """Return the headers of one delivery. at: Unix seconds of the try, which a receiver checks."""
    told = b".".join((message_id.encode(), str(at).encode(), body))
    digest = hmac.new(key, told, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


log = structlog.get_logger()

EVERY_S = 1.0
"""How often the loop looks for new events."""
BATCH = 50
"""Audit rows that one hook goes through in one turn."""
SETTLE_S = 1.0
"""Age from which an audit row is told: PostgreSQL may commit rows out of the order of their numbers
when they are written within moments."""
WAITS = Backoff(first_s=5.0, last_s=3_600.0)
STAGE = "hook"
"""Durable counter: `delivered`, `failed` (tries), `dead`."""
FLAG = "hook:"
TEST = "test"
"""Type of the event that `sidecar hooks test` sends."""
MAX_SECRET_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class HookState:
    """How far a hook was told."""

    after: int
    """Number of the last audit row that is done with."""
    tries: int = 0
    """Tries of the next event that failed."""
    next_at: float = 0.0
    """Unix seconds before which it is not tried again."""
    delivered: int = 0
    dead: int = 0
    """Events that were given up."""
    told_at: float | None = None
    """When an event was last taken."""
    error: str = ""
    """Why the last try failed; empty after one that did not."""
    last: str = ""
    """What the last try was; counted once, as it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One row of the audit, as a hook is told of it."""

    seq: int
    at: float
    type: str
    """Action of the audit, such as `canary.promoted`."""
    subject: str
    actor: str
    reason: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    about: Subject = NOTHING

    def body(self, model: str) -> bytes:
        """Return the JSON that is posted; the same for each try."""
        data = {
            "seq": self.seq,
            "model": model,
            "at": self.at,
            "subject": self.subject,
            "project": self.about.project,
            "candidate": self.about.candidate,
            "actor": self.actor,
            "reason": self.reason,
            "before": dict(self.before),
            "after": dict(self.after),
        }
        told = {"type": self.type, "timestamp": iso(self.at) or "", "data": data}
        return json.dumps(told, ensure_ascii=True, separators=(",", ":")).encode()


RETRIES = 12
"""Tries after the first one; the wait doubles from 5 s to at most an hour."""
MAX_AGE_S = 86_400.0
"""An event that is older is given up without a further try."""


class Sender:
    """Posts events, signed."""

    def __init__(
        self,
        model: str,
        poster: Poster,
        *,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """environment: holds secrets; None takes that of the process."""
        self._model = model
        self._poster = poster
        self._environment = environment
        self._clock = clock

    async def post(self, name: str, hook: Hook, event: Event) -> None:
        """Post one event, signed. Raises: OutsideError."""
        body = event.body(self._model)
        # Another store, or a new one, numbers its events anew: the number alone names no event.
        message_id = f"{name}-{event.seq}-{hashlib.sha256(body).hexdigest()[:12]}"
        headers = signed_headers(
            self._key(hook), message_id=message_id, at=int(self._clock()), body=body
        )
        reply = await self._poster.post(hook.url, body, timeout_s=CALL_TIMEOUT_S, headers=headers)
        if not 200 <= reply.status < 300:
            raise OutsideError(f"status {reply.status}; let it answer 2xx when it has the event")

    def _key(self, hook: Hook) -> bytes:
        """Raises: OutsideError."""
        secret = secret_of(hook.secret_env, self._environment)
        try:
            if hook.secret_file:
                with Path(hook.secret_file).open("rb") as file:
                    secret = file.read(MAX_SECRET_BYTES).decode().strip()
            return key_of(secret)
        except (OSError, ValueError) as error:
            raise OutsideError(
                f"the secret cannot be used ({type(error).__name__}); check secret_env or "
                "secret_file"
            ) from error


class Hooks:
    """Tells all hooks of the settings. Only a control that acts calls it."""

    def __init__(
        self,
        database: Database,
        settings: Notify,
        sender: Sender,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._settings = settings
        self._sender = sender
        self._clock = clock
        self._turns: dict[str, asyncio.Task[None]] = {}
        """Name of a hook -> the turn in which it is told now."""

    @property
    def busy(self) -> bool:
        """True while a hook is still being told."""
        return bool(self._turns)

    async def tick(self) -> None:
        """Tell each hook what is due, or go on telling it. Raises: StoreError.

        One that hangs holds up itself alone: its task goes on, and the others have their turn.
        """
        for name, hook in self._settings.hooks.items():
            if name not in self._turns:
                self._turns[name] = asyncio.create_task(self._tell(name, hook))
        await end_turns(self._turns, within_s=EVERY_S)  # the next control tells it again

    async def _tell(self, name: str, hook: Hook) -> None:
        state = await asyncio.to_thread(self._state, name)
        now = self._clock()
        # A clock that was set back must not hold up a hook for longer than the longest wait.
        if now < state.next_at <= now + WAITS.last_s:
            return
        begin = state
        for event in await asyncio.to_thread(self._events, state.after):
            if not wants(hook, event.type):
                state = replace(state, after=event.seq)
                continue
            state = await self._deliver(name, hook, state, event)
            await asyncio.to_thread(self._keep, name, state)
            begin = state
            if state.tries:
                return
        if state != begin:
            await asyncio.to_thread(self._keep, name, state)

    async def _deliver(self, name: str, hook: Hook, state: HookState, event: Event) -> HookState:
        """Try once. Returns: the state after it."""
        now = self._clock()
        try:
            if state.tries > RETRIES or now - event.at > MAX_AGE_S:
                return self._give_up(name, state, event)
            await self._sender.post(name, hook, event)
        except OutsideError as error:
            why, tries = error_line(error)[:500], state.tries + 1
            log.warning("hook_failed", hook=name, told=event.type, seq=event.seq, why=why)
            failed = replace(
                state, tries=tries, next_at=now + WAITS.wait_s(tries), error=why, last="failed"
            )
            if tries > RETRIES:
                return self._give_up(name, failed, event)
            return failed
        return replace(
            state,
            after=event.seq,
            tries=0,
            next_at=0.0,
            delivered=state.delivered + 1,
            told_at=now,
            error="",
            last="delivered",
        )

    def _give_up(self, name: str, state: HookState, event: Event) -> HookState:
        log.error("hook_gave_up", hook=name, told=event.type, seq=event.seq, why=state.error)
        return replace(
            state, after=event.seq, tries=0, next_at=0.0, dead=state.dead + 1, last="dead"
        )

    def _state(self, name: str) -> HookState:
        with self._database.read() as session:
            known = read_state(session, name)
            if known is not None:
                return known
            newest = session.scalar(select(func.max(AuditRow.seq))) or 0
        state = HookState(after=newest)
        self._keep(name, state)
        return state

    def _keep(self, name: str, state: HookState) -> None:
        with self._database.write() as session:
            value = msgspec.json.encode(state).decode()
            set_flag(session, FLAG + name, value, now=self._clock())
            if state.last:
                count(session, STAGE, state.last)

    def _events(self, after: int) -> list[Event]:
        """Return the next rows of the audit, in order."""
        statement = select(AuditRow).where(AuditRow.seq > after).order_by(AuditRow.seq)
        found: list[Event] = []
        with self._database.read() as session:
            rows = session.scalars(statement.limit(BATCH)).all()
            subjects = subjects_of(session, rows)
            for row in rows:
                event = _event(row, subjects[row.seq])
                # A row of the future is of a clock that was set back since: it is old enough.
                if 0.0 <= self._clock() - event.at < SETTLE_S:
                    break
                found.append(event)
        return found


def wants(hook: Hook, event: str) -> bool:
    """Return True when a hook is to be told of events of this type."""
    return any(fnmatch.fnmatchcase(event, pattern) for pattern in hook.events)


def read_state(session: Session, name: str) -> HookState | None:
    """Return how far a hook was told; None before its first turn, and when it is damaged: then it
    begins with what happens from now on."""
    stored = get_flag(session, FLAG + name)
    if stored is None:
        return None
    try:
        return replace(msgspec.json.decode(stored, type=HookState), last="")
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        log.error("hook_state_damaged", hook=name, why=f"{type(error).__name__}: {error}")
        return None


def read_states(session: Session, names: Collection[str]) -> dict[str, HookState]:
    """Return the state of each of these hooks that was told before."""
    found = ((name, read_state(session, name)) for name in names)
    return {name: state for name, state in found if state is not None}


def _event(row: AuditRow, about: Subject) -> Event:
    return Event(
        seq=row.seq,
        at=row.at,
        type=row.action,
        subject=row.subject,
        actor=row.actor,
        reason=row.reason,
        before=row.before,
        after=row.after,
        about=about,
    )
