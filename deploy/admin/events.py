"""`GET /admin/v1/events`: the audit as it grows, as server-sent events.

One event for each row of the audit, in its order: `id` is its `seq`, `event` its action, `data`
what `GET /audit` shows of it. A client that lost its connection sends `Last-Event-ID`, as browsers
do, and gets what it missed. Without it the stream begins now. The store is asked every POLL_S, so
that changes of other processes (the learner, `--offline`) are told too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from sqlalchemy import func, select
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deploy.admin.context import AdminContext
from deploy.admin.models import AuditOut
from deploy.admin.paging import new_router
from deploy.admin.problems import TooManyStreamsError
from deploy.admin.records import damaged
from deploy.registry.audit import Subject, subjects_of
from sidecar.errors import StoreError
from sidecar.store.database import DAMAGE, Database
from sidecar.store.models import AuditRow

# Streams that are open at one control, counted from their request to their end.


class Streams:
    """The number of open streams of one kind."""

    def __init__(self) -> None:
        self.open = 0

    def begin(self, lines: AsyncIterator[str]) -> EventStream:
        """Return the reply that sends `lines`. It counts as open from now on."""
        return EventStream(lines, self)


class EventReply(StreamingResponse):
    """Server-sent events, as the API's description names them."""

    media_type = "text/event-stream"


class EventStream(EventReply):
    """One that counts until it was sent, or its client left."""

    def __init__(self, lines: AsyncIterator[str], streams: Streams) -> None:
        super().__init__(lines, headers={"cache-control": "no-store"})
        self._streams = streams
        streams.open += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1


def newest_change(database: Database) -> int:
    """Return the `seq` of the newest row of the audit; 0: it has none. Raises: StoreError."""
    with database.read() as session:
        return session.scalar(select(func.max(AuditRow.seq))) or 0


POLL_S = 1.0
QUIET_S = 15.0
"""Time without an event after which a comment is sent: no gateway may take the stream for dead."""
MAX_STREAMS = 20
MAX_S = 3_600.0
"""Longest time of one stream; the client then connects again."""
BATCH = 100


def event_router(context: AdminContext) -> APIRouter:
    router = new_router()
    streams = Streams()

    @router.get("/events", response_class=EventReply)
    async def events(
        for_s: Annotated[float, Query(ge=0, le=MAX_S, allow_inf_nan=False)] = MAX_S,
        last_event_id: Annotated[str | None, Header(max_length=19, pattern="^[0-9]+$")] = None,
    ) -> EventStream:
        """Every change as it is made, as server-sent events, for `for_s` seconds."""
        after = int(last_event_id) if last_event_id is not None else None
        if after is None:
            after = await asyncio.to_thread(newest_change, context.database)
        if streams.open >= MAX_STREAMS:  # nothing is awaited between this and the count
            raise TooManyStreamsError(f"{MAX_STREAMS} streams are open; close one of them")
        return streams.begin(_stream(context, min(after, 2**63 - 1), for_s))

    return router


async def _stream(context: AdminContext, after: int, for_s: float) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    ends, said = loop.time() + for_s, loop.time()
    yield ": the audit as it grows\n\n"
    while True:
        try:
            rows = await asyncio.to_thread(_read, context, after)
        except StoreError as error:  # the client connects again, and says where it was
            yield f": the store is away: {type(error).__name__}\n\n"
            return
        for seq, text in rows:
            after, said = seq, loop.time()
            yield text
        if loop.time() >= ends:
            return
        if loop.time() - said >= QUIET_S:
            said = loop.time()
            yield ": nothing new\n\n"
        if len(rows) < BATCH:
            await asyncio.sleep(min(POLL_S, max(0.0, ends - loop.time())))


def _read(context: AdminContext, after: int) -> list[tuple[int, str]]:
    statement = select(AuditRow).where(AuditRow.seq > after).order_by(AuditRow.seq).limit(BATCH)
    with context.database.read() as session:
        rows = session.scalars(statement).all()
        subjects = subjects_of(session, rows)
        return [(row.seq, _event(row, subjects[row.seq])) for row in rows]


def _event(row: AuditRow, about: Subject) -> str:
    """Format one event. A damaged row is told as such: the stream goes on after it."""
    try:
        data = AuditOut.of(row, about).model_dump_json(ensure_ascii=True)
        action = row.action.encode("ascii", "replace").decode().replace("\n", " ")
    except DAMAGE as error:
        damaged(f"audit {row.seq}", error)  # logs it
        action, data = "damaged", "{}"
    return f"id: {row.seq}\nevent: {action}\ndata: {data}\n\n"
