"""Sessions of tasks in a store, told of by outcomes, for tests of whole tasks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from sqlalchemy import select

from ingest.feedback.deriving import save_feedback
from ingest.sessions.messages import Place
from ingest.store.exchanges import save_exchange
from ingest.tasks.enrol import follow
from sidecar.feedback import Feedback
from sidecar.records import Timings
from sidecar.settings.learning import Tasks
from sidecar.store.database import Database
from sidecar.store.models import TaskGroupRow, TaskMemberRow
from support.ingest_kit import make_exchange

_numbers = count(1)


class TaskKit:
    """A store with sessions. `now` is 1,000 until a test moves it."""

    def __init__(self, database: Database, **settings: Any) -> None:
        self.database = database
        self.settings = Tasks(**{"learn": "outcome", **settings})
        self.now = 1_000.0

    def turn(
        self,
        session_id: str,
        *,
        at: float | None = None,
        parent: str | None = None,
        held_out: bool = False,
        **changes: Any,
    ) -> str:
        """Store an exchange of a session, which began now. Returns: its id."""
        began = self.now if at is None else at
        name = f"{session_id}-{next(_numbers)}"
        place = Place(
            exchange_id=name,
            session=session_id,
            parent=parent,
            turn=0,
            branch=0,
            segment=0,
            how="root" if parent is None else "answered",
            held_out=held_out,
        )
        values = {"task": "refund", "user": session_id, **changes}
        exchange = make_exchange(name, timings=Timings(started_at=began), **values)
        with self.database.write() as session:
            assert save_exchange(session, exchange, held_out=held_out, now=self.now, place=place)
        return name

    def told(self, exchange_id: str, *, at: float | None = None, **changes: Any) -> None:
        """Store an outcome of the session of an exchange."""
        received = self.now if at is None else at
        plain: dict[str, Any] = {
            "feedback_id": f"f{next(_numbers)}",
            "kind": "outcome",
            "target_kind": "exchange",
            "target": exchange_id,
            "project": "default",
            "source": "shop",
            "received_at": received,
        }
        with self.database.write() as session:
            assert save_feedback(session, [Feedback(**{**plain, **changes})], now=received) == []

    def session(self, name: str, success: bool | None = None, **changes: Any) -> list[str]:
        """Store a session of two turns, and its outcome if there is one. Returns: its turns."""
        first = self.turn(name, **changes)
        second = self.turn(name, parent=first, **changes)
        if success is not None:
            self.told(second, success=success)
        return [first, second]

    def follow(self, after_s: float = 60.0) -> int:
        """Let time pass, and the worker look. Returns: the number of groups drawn."""
        self.now += after_s
        return follow(self.database, self.settings, now=self.now)

    def groups(self) -> Sequence[TaskGroupRow]:
        with self.database.read() as session:
            return session.scalars(select(TaskGroupRow).order_by(TaskGroupRow.seq)).all()

    def members(self, group_id: str | None = None) -> dict[str, TaskMemberRow]:
        """The members of a group, or all sessions that have a key."""
        statement = select(TaskMemberRow).order_by(TaskMemberRow.place, TaskMemberRow.session_id)
        if group_id is not None:
            statement = statement.where(TaskMemberRow.group_id == group_id)
        with self.database.read() as session:
            return {one.session_id: one for one in session.scalars(statement)}
