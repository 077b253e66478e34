"""Count the outcomes of users' turns in each arm of a ramp, from the `exchange` table.

Both arms are counted over the same span of time, so that an outage of both counts in both. The span
begins with the present step at the earliest; the window of the arm with more traffic limits it, and
the order in which replies ended (`seq`) decides what is inside. Reply texts are read in a shorter
span, again the same for both. When the champion has fewer replies in the span than a step needs (at
a high weight it answers few users), its newest earlier replies are counted beside them, so that the
candidate always has a comparison.

The unit is a user's turn. A request and the client's retries of it are one turn, which failed when
any of them failed: the retries of an SDK must neither hide a failure of vLLM nor count it three
times. When another adapter answered a request because the routed one failed or was unknown to vLLM
(`fallback_from`), the turn is a failure of the routed adapter, also when the other adapter failed
too: the champion's turns count when they fail, and an outage must count in both arms. A turn is cut
when the client disconnected before its end.

Of a reply with several choices, those count that the user received: all of them if the client asked
for several (the turn is short when any is), or the returned one if they were sampled for best of N.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec
import structlog
from sqlalchemy import ColumnElement, TextClause, select, text
from sqlalchemy.orm import Session

from deploy.canary.gate_store import flaws_of, is_short
from deploy.evidence.live import InOrder, Live, Turn
from deploy.records import Canary
from deploy.registry.canary_rule import ArmCounts, RampEvidence
from deploy.registry.proof_rule import ratios_of
from ingest.reward_watch.traits import needs_tools
from sidecar.lines import Line, public_model
from sidecar.settings import Canary as CanarySettings
from sidecar.store.contents import load_contents, opened_reply
from sidecar.store.database import DAMAGE, decompress
from sidecar.store.models import COUNTED, TAKEN_OVER, ChoiceRow, ExchangeRow

log = structlog.get_logger()

WINDOW = 500
"""Newest exchanges of the candidate that are read, and newest turns of an arm whose reply text is
read."""
MOST_TRIES = 3
"""Most exchanges of one turn: the openai SDK sends two retries. A step that needs more turns than
fit into `WINDOW` reads this many exchanges for each turn."""
CHAMPION_WINDOW = 4 * WINDOW
"""The champion answers more: at a weight of 5% this covers 100 of the candidate's exchanges."""
COUNTS_PAGE = 250
"""Exchanges read by one query: a step that has just begun needs few."""
SESSIONS_PAGE = 2_000
MOST_FOR_SESSIONS = 40_000
"""Exchanges of the candidate that are read for the sessions of a step: 20 of 2,000 requests each.
Fewer are known where a session has more."""
NOT_FOUND = 404
"""Status of a reply when vLLM lost the adapter and no other adapter could answer."""


class Seen(NamedTuple):
    """The fields of an exchange that are counted."""

    seq: int
    exchange_id: str
    project: str
    turn_id: str
    outcome: str
    status: int
    fallback_from: str
    started_at: float
    session_key: str

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
    """The field of a chat request for the number of answers; any JSON, as the client sent it."""

    n: object = None


_ASKED_FOR = msgspec.json.Decoder(_AskedFor)


def count_ramp(
    session: Session,
    canary: Canary,
    *,
    step_min_exchanges: int,
    step_min_sessions: int = 0,
    line: Line,
) -> RampEvidence:
    """Return both arms' counts in the present step of a ramping canary, as progress and for the
    reader: what they prove is `deploy.canary.live_turns`.

    step_min_sessions: so many sessions are looked for, beyond the newest exchanges too.
    """
    window = max(WINDOW, MOST_TRIES * step_min_exchanges)
    champion_window = max(CHAMPION_WINDOW, window)
    candidate = _window(session, canary, canary.candidate, "canary", window)
    read = _window(session, canary, canary.champion, "champion", champion_window)
    # A full window leaves out older rows of its arm: both arms start at the later window's edge.
    full = [
        rows for rows, limit in ((candidate, window), (read, champion_window)) if len(rows) == limit
    ]
    edge = max((rows[-1].seq for rows in full), default=0)
    champion = [one for one in read if line.has(one.project)]  # the base is one in several lines

    answered = [one for one in candidate if _is_in_step(one, canary)]
    compared = [one for one in answered if one.seq >= edge]
    beside = [one for one in champion if _is_in_step(one, canary) and one.seq >= edge]
    earlier: list[Seen] = []
    lacking = step_min_exchanges - len(_turns(beside))
    if lacking > 0:
        earlier = [one for one in champion if not _is_in_step(one, canary) or one.seq < edge]
        if champion and len(_turns(earlier)) < lacking:
            oldest, tries = read[-1].seq, MOST_TRIES * lacking
            older = _newest(session, canary, canary.champion, "champion", tries, before_seq=oldest)
            earlier += [one for one in older if line.has(one.project)]
        newest = list(_turns(earlier).values())[:lacking]
        earlier = [one for turn in newest for one in turn]
    text_edge = max(_text_edge(compared), _text_edge(beside))
    return RampEvidence(
        candidate=_counts(session, compared, text_edge),
        champion=_counts(session, beside, text_edge),
        champion_before=_counts(session, earlier, _text_edge(earlier)),
        seen=len(_turns(answered)),
        sessions=_sessions(session, canary, candidate, window, step_min_sessions),
        missing_in_a_row=sum(1 for _ in takewhile(lambda one: one.missing, answered)),
    )


def _sessions(
    session: Session, canary: Canary, newest: Sequence[Seen], window: int, wanted: int
) -> int:
    """Return the sessions that the candidate answered in the step; of more than `wanted` some.

    newest: its newest exchanges, up to `window`. A few long sessions fill them.
    """
    found, read, page = set[str](), len(newest), list(newest)
    size = window
    while True:
        inside = [one for one in page if _is_in_step(one, canary)]
        found |= {one.session_key for one in inside}
        enough = len(found) >= wanted or read >= MOST_FOR_SESSIONS
        if enough or len(page) < size or not inside:
            return len(found)
        size = SESSIONS_PAGE
        before = page[-1].seq
        page = _newest(session, canary, canary.candidate, "canary", size, before_seq=before)
        read += len(page)


def _is_in_step(one: Seen, canary: Canary) -> bool:
    return one.started_at >= canary.step_started_at


def _window(session: Session, canary: Canary, adapter: str, arm: str, limit: int) -> list[Seen]:
    """List an arm's exchanges, the newest first: up to `limit`, or back to before the step.

    An exchange that began before the step may end within it, so reading ends at a whole page of
    earlier ones.
    """
    found: list[Seen] = []
    while len(found) < limit:
        size = min(COUNTS_PAGE, limit - len(found))
        before_seq = found[-1].seq if found else None
        page = _newest(session, canary, adapter, arm, size, before_seq=before_seq)
        found += page
        if len(page) < size or not any(_is_in_step(one, canary) for one in page):
            break
    return found


def _newest(
    session: Session,
    canary: Canary,
    adapter: str,
    arm: str,
    limit: int,
    *,
    before_seq: int | None = None,
) -> list[Seen]:
    """List the exchanges that an arm answered or was routed to answer, the newest first.

    No time limits the query: a search for exchanges of a step that had few would read all before
    it. The caller looks at the times of the rows that it gets.
    """
    answered = (
        ExchangeRow.public_model == public_model(canary.model),
        ExchangeRow.adapter == adapter,
        ExchangeRow.arm == arm,
        text(COUNTED),
    )
    taken_over = (ExchangeRow.fallback_from == adapter, text(TAKEN_OVER))
    older = () if before_seq is None else (ExchangeRow.seq < before_seq,)
    found: list[Seen] = []
    # Two queries, each with its own index; one query with OR would scan the table.
    for which in (answered, taken_over):
        statement = (
            select(*_COLUMNS).where(*which, *older).order_by(ExchangeRow.seq.desc()).limit(limit)
        )
        found += [Seen(*row) for row in session.execute(statement)]
    return sorted(found, reverse=True)[:limit]


def _turns(seen: Iterable[Seen]) -> dict[tuple[str, ...], list[Seen]]:
    turns: dict[tuple[str, ...], list[Seen]] = {}
    for one in seen:
        turns.setdefault(one.turn, []).append(one)
    return turns


def _text_edge(seen: Sequence[Seen]) -> int:
    """Return the smallest `seq` whose text is read: that of an arm's newest `WINDOW` turns."""
    turns = list(_turns(seen).values())
    return turns[WINDOW - 1][0].seq if len(turns) > WINDOW else 0


def _counts(session: Session, seen: Sequence[Seen], text_edge: int) -> ArmCounts:
    turns = _turns(seen).values()
    failed = sum(any(one.failed for one in turn) for turn in turns)
    whole = [turn for turn in turns if not any(one.failed for one in turn)]
    cut = sum(any(one.cut for one in turn) for turn in whole)
    looked_at = [turn for turn in turns if turn[0].seq >= text_edge]
    # When a turn was answered twice, the user has the newer answer.
    complete = [
        turn[0].exchange_id for turn in looked_at if not any(one.failed or one.cut for one in turn)
    ]
    said_something: set[str] = set()
    short: set[str] = set()
    for choice in given_choices(session, complete):
        try:
            message = opened_reply(session, choice, "message_body")
        except ValueError as error:  # its key is missing: nobody knows whether it is short
            log.warning("reply_not_decrypted", exchange_id=choice.exchange_id, why=str(error))
            said_something.add(choice.exchange_id)
            continue
        if is_short(json.loads(decompress(message)), choice.finish_reason):
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


def given_choices(session: Session, exchange_ids: Sequence[str]) -> list[ChoiceRow]:
    """Return the choices of these exchanges that users received."""
    found = select(ChoiceRow).where(ChoiceRow.exchange_id.in_(exchange_ids))
    choices = session.scalars(found).all()
    counts = Counter(choice.exchange_id for choice in choices)
    several = [exchange_id for exchange_id, count in counts.items() if count > 1]
    # A completions request with several prompts gives several choices without `n`.
    chats = select(ExchangeRow.exchange_id, ExchangeRow.returned_index).where(
        ExchangeRow.exchange_id.in_(several), ExchangeRow.surface == "chat"
    )
    indices: dict[str, int] = {
        row.exchange_id: row.returned_index for row in session.execute(chats)
    }
    contents = load_contents(session, indices)
    returned = {
        exchange_id: index
        for exchange_id, index in indices.items()
        if asks_for_one(contents[exchange_id].request)
    }
    return [
        choice
        for choice in choices
        if returned.get(choice.exchange_id, choice.index) == choice.index
    ]


def asks_for_one(request: bytes) -> bool:
    """Return True when a chat request, as the client sent it, asks for a single answer. Pure.

    If it does and there are several choices, the sidecar asked for them: the exchange is best of N.
    The store has no other mark of it (the first choice is returned as often as any other, so
    `returned_index` does not tell). A request with its own `n` never becomes best of N
    (`sidecar.relay.best_of`).
    """
    try:
        n = _ASKED_FOR.decode(request).n
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # best of N leaves an unreadable request alone too
    return n is None or (not isinstance(n, bool) and n == 1)


# Read users' turns of a ramp from the `exchange` table, for `deploy.evidence.live`.

TURNS_PAGE = 500
"""Exchanges of one kind that are read at once."""
PAGES = 4
"""Most pages of one tick: reading a page with its texts takes tens of milliseconds."""


class Row(NamedTuple):
    """The fields of an exchange that are read."""

    seq: int
    exchange_id: str
    session_key: str
    arm: str
    propensity: float
    outcome: str
    status: int
    fallback_from: str
    started_at: float
    stored_at: float
    project: str
    key_id: str
    user: str
    address_hash: str
    timings: dict[str, Any]
    """As the store has it: `sidecar.records.Timings` as JSON."""

    @property
    def took_s(self) -> float:
        """Seconds from the request to the end of its reply; where they are not known, to when it
        was stored."""
        total_s: float | None = self.timings.get("total_s")
        return max(0.0, self.stored_at - self.started_at) if total_s is None else total_s

    @property
    def answered(self) -> bool:
        """vLLM answered, whichever adapter it was."""
        return self.outcome != "upstream_error" and self.status < 400

    @property
    def failed(self) -> bool:
        return bool(self.fallback_from) or not self.answered

    @property
    def cut(self) -> bool:
        return self.outcome == "cut" and not self.failed

    def turn(self, canary: Canary, bad: frozenset[str] = frozenset()) -> Turn:
        """Return it as the guards read it. bad: guards that it is bad for."""
        return Turn(
            unit=self.session_key,
            canary=self.arm == "canary" or self.fallback_from == canary.candidate,
            weight=self.propensity if self.arm == "canary" else 1.0 - self.propensity,
            bad=bad,
            caller=f"key {self.key_id}" if self.key_id else self.user and f"user {self.user}",
            address=self.address_hash,
            shared=bool(self.fallback_from) and not self.answered,
        )


TURN_COLUMNS = tuple(getattr(ExchangeRow, name) for name in Row._fields)


class LiveTurns:
    """Keeps the state of one canary's ramp between ticks."""

    def __init__(self, rules: CanarySettings, line: Line) -> None:
        """line: of the canaries."""
        self._rules = rules
        self._line = line
        self._of: tuple[object, ...] = ()
        """Which ramp the state is of: another salt assigns other sessions."""
        self._live = Live(ratios_of())
        self._mark = 0
        self._order = InOrder(rules.turn_wait_s)

    def read(self, session: Session, canary: Canary, now: float) -> tuple[Live, bool]:
        """Read what is new, and count what has waited long enough.

        now: Unix seconds. Returns: the state, and True while more waits to be read from the store.
        """
        # Not by its beginning, which follows a clock that is set back: what was counted stays.
        of = (canary.canary_id, canary.salt, canary.ramp_after_seq)
        if of != self._of:
            self._of, self._mark = of, canary.ramp_after_seq
            self._live = Live(ratios_of())
            self._order = InOrder(self._rules.turn_wait_s)
        for _ in range(PAGES):
            rows, full = _page(session, canary, self._mark)
            # The base is champion in several lines; the mark passes their rows all the same.
            own = [row for row in rows if self._line.has(row.project)]
            for row, turn in _turns_of_sessions(session, canary, own):
                self._order.add(
                    turn,
                    started_at=row.started_at,
                    stored_at=row.stored_at,
                    took_s=row.took_s,
                    place=row.seq,
                )
            self._mark = max(self._mark, rows[-1].seq if rows else 0)
            if not full:
                self._live.read(self._order.take(now))
                return self._live, False
            # What is not read yet was stored no earlier than the newest row of a full page.
            self._live.read(self._order.take(min(now, rows[-1].stored_at if rows else 0.0)))
        return self._live, True


def _page(session: Session, canary: Canary, mark: int) -> tuple[list[Row], bool]:
    """List the next exchanges of both arms in their order. Returns: them, and True if there may be
    more."""
    found: list[Row] = []
    edges: list[int] = []
    for which in _kinds(canary):
        statement = (
            select(*TURN_COLUMNS)
            .where(*which, ExchangeRow.seq > mark)
            .order_by(ExchangeRow.seq)
            .limit(TURNS_PAGE)
        )
        rows = [Row(*row) for row in session.execute(statement)]
        found += rows
        if len(rows) == TURNS_PAGE:
            edges.append(rows[-1].seq)
    # Beyond the end of a full page that kind's rows are not known yet.
    edge = min(edges, default=None)
    known = [row for row in found if edge is None or row.seq <= edge]
    return sorted(known, key=lambda row: row.seq), bool(edges)


def _kinds(canary: Canary) -> list[tuple[ColumnElement[bool] | TextClause, ...]]:
    """Return a condition for each kind of exchange; each has its index."""
    row = ExchangeRow
    arms = (("canary", canary.candidate), ("champion", canary.champion))
    model = public_model(canary.model)
    return [
        *(
            (row.public_model == model, row.adapter == name, row.arm == arm, text(COUNTED))
            for arm, name in arms
        ),
        *((row.fallback_from == name, text(TAKEN_OVER)) for _, name in arms),
    ]


def _turns_of_sessions(
    session: Session, canary: Canary, rows: Sequence[Row]
) -> Iterator[tuple[Row, Turn]]:
    rows = [row for row in rows if row.started_at >= canary.ramp_began_at]
    whole = [row.exchange_id for row in rows if not row.failed and not row.cut]
    flaws = _flaws(session, whole)
    for row in rows:
        kind = "failed" if row.failed else "cut" if row.cut else None
        bad = flaws.get(row.exchange_id, frozenset()) if kind is None else frozenset({kind})
        yield row, row.turn(canary, bad)


def _flaws(session: Session, exchange_ids: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Return the flaws of what users received, by exchange; one without an answer is short."""
    found: dict[str, frozenset[str]] = {}
    messages: list[tuple[str, str | None, bytes]] = []
    for choice in given_choices(session, exchange_ids):
        found.setdefault(choice.exchange_id, frozenset())
        try:
            body = decompress(opened_reply(session, choice, "message_body"))
        except (*DAMAGE, ValueError) as error:  # nobody knows what it says
            log.warning("reply_not_read", exchange_id=choice.exchange_id, why=str(error))
            continue
        messages.append((choice.exchange_id, choice.finish_reason, body))
    requests = _requests(session, [name for name, *_ in messages])
    for name, finish_reason, body in messages:
        request = requests.get(name, {})
        if needs_tools(body) and not request:
            continue  # whether its call is valid cannot be told
        try:
            message = json.loads(body)
            found[name] |= flaws_of(message, finish_reason, request)
        except (*DAMAGE, ValueError, AttributeError) as error:
            log.warning("reply_not_read", exchange_id=name, why=str(error))
    empty = frozenset({"short"})
    return {name: found.get(name, empty) for name in exchange_ids}


def _requests(session: Session, exchange_ids: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """Return the tools and formats of some requests; one that cannot be read is left out."""
    found: dict[str, dict[str, Any]] = {}
    if not exchange_ids:
        return found
    contents = load_contents(session, exchange_ids)
    for name in exchange_ids:
        try:
            request = json.loads(contents[name].request)
        except (*DAMAGE, RecursionError, ValueError) as error:
            log.warning("request_not_read", exchange_id=name, why=str(error))
            continue
        if isinstance(request, dict):
            found[name] = {key: request.get(key) for key in ("tools", "response_format")}
    return found
