"""Streams that are open at one control, counted from their request to their end."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import func, select
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from sidecar.store.database import Database
from sidecar.store.models import AuditRow


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
