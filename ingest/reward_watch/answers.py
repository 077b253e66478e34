"""Find the traits of served answers, each once, soon after it was stored.

A pass takes a page of the newest exchanges in the order of the table, and keeps what it found in
`watched_answer`: the newest `watch.window` answers of each adapter. It does not try to keep up with
more traffic than it can look at: what it passes over is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import msgspec
import structlog
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from ingest.reward_watch.store import refresh
from ingest.reward_watch.traits import needs_tools, traits_of
from sidecar.errors import StoreError
from sidecar.lines import Line
from sidecar.settings import Watch
from sidecar.store.contents import load_contents, opened_reply
from sidecar.store.database import DAMAGE, Database, count, get_flag, insert_into, set_flag
from sidecar.store.frames import decompress
from sidecar.store.models import ChoiceRow, ExchangeRow, WatchedAnswerRow

STAGE = "watch"
"""Counter rows: (stage, reason) -> answers that were not looked at, and damaged profiles."""
FLAG = "watch_seq"
"""Flag row: the newest exchange that was looked at, by `exchange.seq`."""
PAGE = 250
"""Exchanges that one pass looks at."""
BEHIND = 8 * PAGE
"""A pass that is further behind goes to the newest page: the newest answers are what counts."""
INTERVAL_S = 5.0
"""Seconds between two passes."""
SETTLE_S = 5.0
"""An exchange is looked at so long after it was stored: PostgreSQL shows the rows of concurrent
transactions out of order."""
REFRESH_S = 60.0
"""Seconds between two computations of an adapter's sums."""

log = structlog.get_logger()


class AnswerWatch:
    """The pass of one ingest process."""

    def __init__(self, database: Database, settings: Watch, lines: Sequence[Line] = ()) -> None:
        """lines: of adapters, for which the answers are kept apart."""
        self._database = database
        self._lines = lines
        self._settings = settings
        self._due = 0.0
        self._refresh_due = 0.0
        self._touched: set[tuple[str, str]] = set()

    def step(self, now: float) -> int:
        """Look at a page of answers if it is time, and renew the sums of their adapters.

        now: Unix seconds. Returns: the number of exchanges looked at. Raises: StoreError.
        """
        if now < self._due:
            return 0
        self._due = now + INTERVAL_S
        seen, touched = look_at_answers(
            self._database, window=self._settings.window, now=now, lines=self._lines
        )
        self._touched |= touched
        if self._touched and now >= self._refresh_due:
            self._refresh_due = now + REFRESH_S
            for model, adapter in sorted(self._touched):
                self._refresh(model, adapter, now)
            self._touched.clear()
        return seen

    def _refresh(self, model: str, adapter: str, now: float) -> None:
        try:
            with self._database.write(alone=False) as session:
                refresh(session, model, adapter, self._settings, now=now)
        except StoreError:
            raise
        except DAMAGE as error:
            log.error("profile_not_made", adapter=adapter, why=f"{type(error).__name__}: {error}")


def look_at_answers(
    database: Database, *, window: int, now: float, lines: Sequence[Line] = ()
) -> tuple[int, set[tuple[str, str]]]:
    """Look at one page. window: answers of an adapter that are kept. now: Unix seconds.

    Returns: the number of exchanges looked at; and (line, adapter) of their answers.
    """
    with database.read() as session:
        begin, skipped = _begin(session)
        page = [_in_its_line(one, lines) for one in _page(session, begin, now=now)]
        found, unread = _traits(session, page)
    if not page:
        return 0, set()
    with database.write() as session:
        # `sidecar forget` may have deleted some meanwhile: nothing of theirs may come back.
        there = set(
            session.scalars(
                select(ExchangeRow.exchange_id).where(
                    ExchangeRow.exchange_id.in_([row["exchange_id"] for row in found])
                )
            )
        )
        found = [row for row in found if row["exchange_id"] in there]
        touched = {(str(row["model"]), str(row["adapter"])) for row in found}
        if found:
            session.execute(insert_into(session, WatchedAnswerRow).on_conflict_do_nothing(), found)
        for model, adapter in sorted(touched):
            _prune(session, model, adapter, window)
        count(session, STAGE, "skipped", skipped)
        count(session, STAGE, "unreadable", unread)
        set_flag(session, FLAG, str(page[-1].seq), now=now)
    return len(page), touched


class _Seen(msgspec.Struct, frozen=True):
    """A row of the page. Object: a damaged column holds anything."""

    seq: int
    exchange_id: str
    stored_at: object
    surface: str
    model: str
    project: object
    adapter: str
    session_id: str
    status: int
    outcome: str
    returned_index: object
    tokens: object

    @property
    def counts(self) -> bool:
        return self.surface == "chat" and self.status == 200 and self.outcome == "ok"


def _in_its_line(one: _Seen, lines: Sequence[Line]) -> _Seen:
    """Return the answer with the name of its line in place of the model's."""
    for line in lines:
        if line.project is not None and (line.model, line.project) == (one.model, one.project):
            return msgspec.structs.replace(one, model=line.name)
    return one


def _begin(session: Session) -> tuple[int, int]:
    """Return where the page begins, and how many exchanges are passed over."""
    text = get_flag(session, FLAG)
    begin = int(text) if text is not None and text.isdecimal() else 0
    newest = session.scalar(select(func.max(ExchangeRow.seq))) or 0
    if newest - begin <= BEHIND:
        return min(begin, newest), 0
    return newest - PAGE, newest - PAGE - begin


def _page(session: Session, begin: int, *, now: float) -> list[_Seen]:
    row = ExchangeRow
    rows = session.execute(
        select(
            row.seq,
            row.exchange_id,
            row.stored_at,
            row.surface,
            row.public_model,
            row.project,
            row.adapter,
            row.session_id,
            row.status,
            row.outcome,
            row.returned_index,
            row.completion_tokens,
        )
        .where(row.seq > begin)
        .order_by(row.seq)
        .limit(PAGE)
    )
    page: list[_Seen] = []
    for one in rows:
        seen = _Seen(*tuple(one))
        # A time to come was written by a clock that was fast: nothing waits for it.
        if isinstance(seen.stored_at, float) and now - SETTLE_S < seen.stored_at <= now:
            break
        page.append(seen)
    return page


def _traits(session: Session, page: Sequence[_Seen]) -> tuple[list[dict[str, object]], int]:
    """Return the rows to store, and how many answers could not be read."""
    counting = {one.exchange_id: one for one in page if one.counts}
    messages: dict[str, tuple[bytes, str | None]] = {}
    unread = 0
    for choice in session.scalars(
        select(ChoiceRow).where(ChoiceRow.exchange_id.in_(list(counting)))
    ):
        if choice.index != counting[choice.exchange_id].returned_index:
            continue
        try:
            message = decompress(opened_reply(session, choice, "message_body"))
        except DAMAGE:
            unread += 1
            continue
        messages[choice.exchange_id] = (message, choice.finish_reason)
    calling = [name for name, (message, _) in messages.items() if needs_tools(message)]
    tools = _tools(session, calling)
    rows: list[dict[str, object]] = []
    for name, (message, finish_reason) in messages.items():
        one = counting[name]
        try:
            traits = traits_of(message, finish_reason=finish_reason, tools=tools.get(name))
        except (ValueError, RecursionError) as error:
            log.warning("answer_not_looked_at", exchange_id=name, why=type(error).__name__)
            unread += 1
            continue
        if name in calling and name not in tools:
            traits = replace(traits, invalid_call=False)
        rows.append(
            {
                "seq": one.seq,
                "exchange_id": name,
                "model": one.model,
                "adapter": one.adapter,
                "session_id": one.session_id,
                "tokens": one.tokens if isinstance(one.tokens, int) and one.tokens >= 0 else None,
                **asdict(traits),
            }
        )
    return rows, unread


class _Request(msgspec.Struct):
    tools: object = None


_REQUEST = msgspec.json.Decoder(_Request)


def _tools(session: Session, exchange_ids: Sequence[str]) -> Mapping[str, object]:
    """Return the tools that some requests offer; a request that cannot be read is left out, and no
    call of its answer is then known to be valid or not."""
    found: dict[str, object] = {}
    contents = load_contents(session, exchange_ids)
    for name in exchange_ids:
        try:
            found[name] = _REQUEST.decode(contents[name].request).tools
        except (*DAMAGE, RecursionError):
            continue
    return found


def _prune(session: Session, model: str, adapter: str, window: int) -> None:
    row = WatchedAnswerRow
    of_adapter = (row.model == model, row.adapter == adapter)
    edge = session.scalar(
        select(row.seq).where(*of_adapter).order_by(row.seq.desc()).offset(window).limit(1)
    )
    if edge is not None:
        session.execute(delete(row).where(*of_adapter, row.seq <= edge))
