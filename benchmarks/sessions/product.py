"""The product's own finder, `ingest.sessions`, on the streams of this benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.sessions.records import Found, SentRequest
from ingest.sessions.arrival import read_arrival
from ingest.sessions.tree import SessionTree


def by_ingest(stream: Iterable[SentRequest]) -> Iterator[Found]:
    """Read each exchange and place it, as the ingest process does."""
    tree = SessionTree()
    for one in stream:
        arrival = read_arrival(
            exchange_id=one.exchange_id,
            at=one.at,
            project=one.project,
            key_id=one.key_id,
            user=one.user,
            session_key=f"h:{one.session_header}" if one.session_header else "",
            trace_id=one.trace_id,
            turn_id="",
            request=one.request,
            messages=one.replies,
        )
        for place in tree.place(arrival, now=one.at):
            yield Found(exchange_id=place.exchange_id, session=place.session, parent=place.parent)
