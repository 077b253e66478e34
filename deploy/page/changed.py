"""`GET /changed`: tell an open page at once that something changed, as server-sent events.

The stream says only that the audit grew, and to which `seq`. The page then asks for its live part,
as it does every 5 s anyway, so what a visitor may see is decided in one place.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

from starlette.responses import Response

from deploy.admin.changes.streams import Streams, newest_change
from deploy.page.desk import Asked
from sidecar.errors import StoreError
from sidecar.store.database import Database

POLL_S = 1.0
"""Time between two looks at the audit. A look reads one row by its primary key."""
MAX_S = 60.0
"""Longest time of one stream. The browser then connects again, and its login is checked again."""
MAX_STREAMS = 40
"""Pages that are told at once. Further ones only ask every 5 s."""
_SEQ_MAX = 2**63 - 1


class Watchers:
    """Streams of the pages that are open at one control."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._streams = Streams()

    async def view(self, asked: Asked) -> Response:
        """Open a stream of what comes after `after`, a `seq`, or after what the browser saw last.

        204 ends the attempts of a browser: too many are open.
        """
        if asked.request.method == "HEAD" or self._streams.open >= MAX_STREAMS:
            return Response(status_code=204)
        seen = _seq(asked.request.headers.get("last-event-id", ""))
        if seen is None:
            seen = _seq(asked.query.get("after", ""))
        return self._streams.begin(self._stream(seen or 0))

    async def _stream(self, seen: int) -> AsyncIterator[str]:
        """seen: `seq` of the newest change that the page shows."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + MAX_S
        yield "retry: 2000\n\n"
        while True:
            try:
                newest = await asyncio.to_thread(newest_change, self._database)
            except StoreError as error:  # the browser connects again
                yield f": the store is away: {type(error).__name__}\n\n"
                return
            if newest > seen:
                seen = newest
                yield f"id: {newest}\nevent: changed\ndata: {newest}\n\n"
            if loop.time() >= ends:
                return
            await asyncio.sleep(min(POLL_S, max(0.0, ends - loop.time())))


def _seq(text: str) -> int | None:
    """Read a `seq` that a browser sent; None when it is none."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None
