"""Read users' turns of a ramp from the `exchange` table, for `deploy.evidence.live`.

Each tick reads the exchanges that the store took since the last one, in the order of the table
(`seq`), which is that in which replies ended; `deploy.evidence.in_order` puts them in one that does
not depend on the speed of the arms. A process that starts again reads the ramp's exchanges from the
first one and ends in the same state. What is read in one tick is bounded, so a long ramp is caught
up with over several.

The unit is `session_key`, what the proxy hashed to choose the arm, and not the session that ingest
finds later: two conversations that open alike share an arm. A request counts for the arm that it
was routed to, also if another adapter answered it (`fallback_from`) or failed too: a request of the
champion that fails counts, so an outage of both arms must count in both. The weight is the
propensity that the proxy stored. The caller is the key; where none was asked for, the name of the
user that the client gives and the address of its connection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from sqlalchemy import ColumnElement, TextClause, select, text
from sqlalchemy.orm import Session

from deploy.canary.answer_shape import flaws_of
from deploy.canary.ramp_counts import given_choices
from deploy.evidence.in_order import InOrder
from deploy.evidence.live import Live, Turn
from deploy.records import Canary
from deploy.registry.proof_rule import ratios_of
from ingest.reward_watch.traits import needs_tools
from sidecar.lines import Line, public_model
from sidecar.settings import Canary as CanarySettings
from sidecar.store.contents import load_contents, opened_reply
from sidecar.store.database import DAMAGE, decompress
from sidecar.store.models import ExchangeRow
from sidecar.store.models.capture import COUNTED, TAKEN_OVER

log = structlog.get_logger()

PAGE = 500
"""Exchanges of one kind that are read at once."""
PAGES = 4
"""Most pages of one tick: reading a page with its texts takes tens of milliseconds."""


class _Row(NamedTuple):
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
    timings: object
    """As the store has it: `sidecar.records.Timings` as JSON."""

    @property
    def took_s(self) -> float:
        """Seconds from the request to the end of its reply; where they are not known, to when it
        was stored."""
        total_s = self.timings.get("total_s") if isinstance(self.timings, dict) else None
        if isinstance(total_s, int | float) and 0.0 <= total_s < math.inf:
            return float(total_s)
        return max(0.0, self.stored_at - self.started_at)

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


_COLUMNS = tuple(getattr(ExchangeRow, name) for name in _Row._fields)


class LiveTurns:
    """Keeps the state of one canary's ramp between ticks."""

    def __init__(self, rules: CanarySettings, line: Line | None = None) -> None:
        """line: of the canaries; None: the default one of a model without others."""
        self._rules = rules
        self._line = line
        self._of: tuple[object, ...] = ()
        """Which ramp the state is of: another salt assigns other sessions."""
        self._live = Live(ratios_of(rules))
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
            self._live = Live(ratios_of(self._rules))
            self._order = InOrder(self._rules.turn_wait_s)
        for _ in range(PAGES):
            rows, full = _page(session, canary, self._mark)
            line = self._line or Line(name=canary.model)
            # The base is champion in several lines; the mark passes their rows all the same.
            own = [row for row in rows if line.has(row.project)]
            for row, turn in _turns(session, canary, own):
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
            stored = [row.stored_at for row in rows if _is_number(row.stored_at)]
            self._live.read(self._order.take(min(now, stored[-1] if stored else 0.0)))
        return self._live, True


def _page(session: Session, canary: Canary, mark: int) -> tuple[list[_Row], bool]:
    """List the next exchanges of both arms in their order. Returns: them, and True if there may be
    more."""
    found: list[_Row] = []
    edges: list[int] = []
    for which in _kinds(canary):
        statement = (
            select(*_COLUMNS)
            .where(*which, ExchangeRow.seq > mark)
            .order_by(ExchangeRow.seq)
            .limit(PAGE)
        )
        rows = [_Row(*row) for row in session.execute(statement)]
        found += rows
        if len(rows) == PAGE:
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


def _turns(session: Session, canary: Canary, rows: Sequence[_Row]) -> Iterator[tuple[_Row, Turn]]:
    rows = [row for row in rows if _counts(row, canary)]
    whole = [row.exchange_id for row in rows if not row.failed and not row.cut]
    flaws = _flaws(session, whole)
    for row in rows:
        canary_was_due = row.arm == "canary" or row.fallback_from == canary.candidate
        weight = row.propensity if row.arm == "canary" else 1.0 - row.propensity
        kind = "failed" if row.failed else "cut" if row.cut else None
        bad = flaws.get(row.exchange_id, frozenset()) if kind is None else frozenset({kind})
        yield (
            row,
            Turn(
                unit=row.session_key,
                canary=canary_was_due,
                weight=weight,
                bad=bad,
                caller=f"key {row.key_id}" if row.key_id else row.user and f"user {row.user}",
                address=row.address_hash,
                shared=bool(row.fallback_from) and not row.answered,
            ),
        )


def _counts(row: _Row, canary: Canary) -> bool:
    numbers = (row.started_at, row.stored_at, row.propensity)
    known = all(_is_number(one) for one in numbers)  # else damaged: of no time or arm
    return known and row.started_at >= canary.ramp_began_at


def _is_number(stored: object) -> bool:
    return isinstance(stored, int | float)


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
