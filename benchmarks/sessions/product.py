"""The product's own finder, `ingest.sessions`, on the streams of this benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.sessions.records import HELD_OUT, Placement, SentRequest, Side
from ingest.grouping.features import is_held_out
from ingest.sessions.messages import Arrival, Place
from ingest.sessions.rows import conversation_of, replies_of
from ingest.sessions.search import RequestReader
from ingest.sessions.tree import SessionTree


def by_ingest(stream: Iterable[SentRequest]) -> Iterator[Placement]:
    """Read each exchange and place it, as the ingest process does."""
    tree = SessionTree(is_held_out=lambda name: is_held_out(name, HELD_OUT))
    reader = RequestReader()
    for one in stream:
        arrival = Arrival(
            exchange_id=one.exchange_id,
            at=one.at,
            project=one.project,
            key_id=one.key_id,
            user=one.user,
            session_header=f"h:{one.session_header}" if one.session_header else "",
            trace_id=one.trace_id,
            turn_id="",
            conversation=conversation_of(one.request, reader),
            replies=replies_of(one.replies, reader),
        )
        for place in tree.place(arrival, now=one.handed_at):
            yield Placement(
                exchange_id=place.exchange_id,
                session=place.session,
                parent=place.parent,
                at=one.handed_at,
                side=_side(place),
            )


def _side(place: Place) -> Side:
    if place.shares_opening:
        return "neither"
    return "held_out" if place.held_out else "trained"
