"""Count what users got from each arm of a ramp, from the `exchange` table.

Both arms are counted over the same span of time, from the start of the present step at the
earliest, so that an outage of both counts in both. The span is as long as the arm with more traffic
has rows in its window, and ends of replies (the order of `seq`) say what is in it. Texts are read
in a shorter span, again the same for both. When the champion has fewer replies in the span than a
step needs (at a high weight it answers hardly anyone), its newest earlier ones are counted beside
them, so that the candidate is never measured against nothing.

What is counted is users' turns. A request and the client's retries of it are one turn, which
failed when any of them did: an SDK that asks again must not hide that vLLM failed, nor make one
user's bad luck three failures. A request that another adapter answered because the one that it
was meant for failed or was unknown to vLLM (`fallback_from`) is a failure of that one; when the
other adapter failed too, it says nothing of either. A turn that the client left before its end is
counted as cut.

Of an answer with several choices those count that the user got: all of them where the client asked
for several (short when any is), the returned one where they were sampled for best of N.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec
from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from deploy.canary.answer_shape import is_short
from deploy.records import Canary
from deploy.registry.canary_rule import ArmCounts, RampEvidence
from sidecar.store.database import decompress
from sidecar.store.models import ChoiceRow, ExchangeRow

WINDOW = 500
"""Newest exchanges of the candidate that are looked at. Also the newest turns of an arm whose text
is read."""
MOST_TRIES = 3
"""Exchanges of one turn, at most: the openai SDK sends two retries. A step that needs more turns
than fit into `WINDOW` looks at so many times as many exchanges."""
CHAMPION_WINDOW = 4 * WINDOW
"""The champion answers more: at a weight of 5% this covers 100 of the candidate's exchanges."""
NOT_FOUND = 404
"""vLLM has lost the adapter, and nobody could answer in its place."""


class Seen(NamedTuple):
    """The little of an exchange that is counted."""

    seq: int
    exchange_id: str
    project: str
    turn_id: str
    outcome: str
    status: int
    fallback_from: str
    started_at: float

    @property
    def missing(self) -> bool:
        return bool(self.fallback_from) or self.status == NOT_FOUND

    @property
    def cut(self) -> bool:
        return self.outcome == "cut"

    @property
    def failed(self) -> bool:
        return self.missing or self.outcome == "upstream_error" or self.status >= 400

    @property
    def turn(self) -> tuple[str, ...]:
        return (self.project, self.turn_id) if self.turn_id else (self.exchange_id,)


_COLUMNS = tuple(getattr(ExchangeRow, name) for name in Seen._fields)


class _AskedFor(msgspec.Struct):
    """How many answers a chat request asks for; any JSON, as a client may send it."""

    n: object = None


_ASKED_FOR = msgspec.json.Decoder(_AskedFor)


def count_ramp(session: Session, canary: Canary, *, step_min_exchanges: int) -> RampEvidence:
    """Both arms' counts in the present step of a ramping canary."""
    window = max(WINDOW, MOST_TRIES * step_min_exchanges)
    champion_window = max(CHAMPION_WINDOW, window)
    since = ExchangeRow.started_at >= canary.step_started_at
    candidate = _newest(session, canary, canary.candidate, "canary", window, since)
    champion = _newest(session, canary, canary.champion, "champion", champion_window, since)
    # Where a window is full there are older rows, which are not seen, of that arm only.
    edge = max(
        (
            min(one.seq for one in rows)
            for rows, limit in ((candidate, window), (champion, champion_window))
            if len(rows) == limit
        ),
        default=0,
    )
    compared = [one for one in candidate if one.seq >= edge]
    champion = [one for one in champion if one.seq >= edge]
    earlier: list[Seen] = []
    lacking = step_min_exchanges - len(_turns(champion))
    if lacking > 0:
        before = or_(ExchangeRow.started_at < canary.step_started_at, ExchangeRow.seq < edge)
        earlier = _newest(session, canary, canary.champion, "champion", window, before)
        earlier = _newest_turns(earlier, lacking)
    text_edge = max(_text_edge(compared), _text_edge(champion))
    return RampEvidence(
        candidate=_counts(session, compared, text_edge),
        champion=_counts(session, champion, text_edge),
        champion_before=_counts(session, earlier, _text_edge(earlier)),
        seen=len(_turns(candidate)),
        missing_in_a_row=sum(1 for _ in takewhile(lambda one: one.missing, candidate)),
    )


def _newest(
    session: Session, canary: Canary, adapter: str, arm: str, limit: int, when: ColumnElement[bool]
) -> list[Seen]:
    """What an arm answered, or was to answer, the newest first."""
    # A request that vLLM refused as the client's fault says nothing of the arm. That vLLM did not
    # know the adapter does.
    ours = or_(ExchangeRow.status < 400, ExchangeRow.status == NOT_FOUND, ExchangeRow.status >= 500)
    failed = ExchangeRow.outcome == "upstream_error"
    answered = and_(
        ExchangeRow.adapter == adapter,
        ExchangeRow.arm == arm,
        ExchangeRow.fallback_from == "",
        or_(failed, ExchangeRow.outcome == "cut", and_(ExchangeRow.outcome == "ok", ours)),
    )
    taken_over = and_(ExchangeRow.fallback_from == adapter, ExchangeRow.outcome != "upstream_error")
    found: list[Seen] = []
    # Two queries, each by an index of its own; one with OR would read the whole table.
    for which in (answered, taken_over):
        statement = (
            select(*_COLUMNS)
            .where(ExchangeRow.public_model == canary.model, which, when)
            .order_by(ExchangeRow.seq.desc())
            .limit(limit)
        )
        found += [Seen(*row) for row in session.execute(statement)]
    return sorted(found, reverse=True)[:limit]


def _turns(seen: Iterable[Seen]) -> dict[tuple[str, ...], list[Seen]]:
    turns: dict[tuple[str, ...], list[Seen]] = {}
    for one in seen:
        turns.setdefault(one.turn, []).append(one)
    return turns


def _newest_turns(seen: Sequence[Seen], limit: int) -> list[Seen]:
    kept = list(_turns(seen).values())[:limit]
    return [one for turn in kept for one in turn]


def _text_edge(seen: Sequence[Seen]) -> int:
    """The `seq` from which on the texts of an arm are read: of its newest `WINDOW` turns."""
    turns = list(_turns(seen).values())
    return turns[WINDOW - 1][0].seq if len(turns) > WINDOW else 0


def _counts(session: Session, seen: Sequence[Seen], text_edge: int) -> ArmCounts:
    turns = _turns(seen).values()
    failed = sum(any(one.failed for one in turn) for turn in turns)
    whole = [turn for turn in turns if not any(one.failed for one in turn)]
    cut = sum(any(one.cut for one in turn) for turn in whole)
    looked_at = [turn for turn in turns if turn[0].seq >= text_edge]
    # Of a turn that was answered twice the user has the newer answer.
    complete = [
        turn[0].exchange_id for turn in looked_at if not any(one.failed or one.cut for one in turn)
    ]
    said_something: set[str] = set()
    short: set[str] = set()
    for choice in _given(session, complete):
        if is_short(json.loads(decompress(choice.message_body)), choice.finish_reason):
            short.add(choice.exchange_id)
        else:
            said_something.add(choice.exchange_id)
    without_choices = set(complete) - short - said_something
    return ArmCounts(
        replies=len(turns),
        errors=failed,
        cuts=cut,
        short=len(short) + len(without_choices),
        looked_at=len(looked_at) if len(looked_at) < len(turns) else None,
    )


def _given(session: Session, exchange_ids: Sequence[str]) -> list[ChoiceRow]:
    """The choices of these exchanges that the users got."""
    found = select(ChoiceRow).where(ChoiceRow.exchange_id.in_(exchange_ids))
    choices = session.scalars(found).all()
    counts = Counter(choice.exchange_id for choice in choices)
    several = [exchange_id for exchange_id, count in counts.items() if count > 1]
    # Of completions several prompts give several choices, without any `n`.
    chats = select(
        ExchangeRow.exchange_id, ExchangeRow.returned_index, ExchangeRow.request_body
    ).where(ExchangeRow.exchange_id.in_(several), ExchangeRow.surface == "chat")
    returned = {
        exchange_id: index
        for exchange_id, index, body in session.execute(chats)
        if asks_for_one(decompress(body))
    }
    return [
        choice
        for choice in choices
        if returned.get(choice.exchange_id, choice.index) == choice.index
    ]


def asks_for_one(request: bytes) -> bool:
    """Whether a chat request, as its client sent it, asks for a single answer. Pure.

    If it does and there are several, then the sidecar asked for them: the exchange is best of N,
    which the store marks in no other way (the first choice is returned as often as any, so
    `returned_index` does not tell). The other way round, `sidecar.relay.best_of.plan` leaves every
    request alone that has an `n` of its own.
    """
    try:
        n = _ASKED_FOR.decode(request).n
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # left alone too
    return n is None or (not isinstance(n, bool) and n == 1)
