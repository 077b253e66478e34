"""Reads and writes of the gate in the store: held-out prompts and comparisons."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from sqlalchemy import ColumnElement, TextClause, and_, func, or_, select, text
from sqlalchemy.orm import Session

from deploy.canary.answer_shape import excess, lengthening, narrowing
from deploy.evidence.quality import FLAWS, OF_GROUPS, Fault
from deploy.records import Canary
from deploy.registry.gate_rule import Comparison, judge_name
from ingest.grouping.selection import TURN_DECIDED
from ingest.records import Disagreement
from ingest.store.sealed_answers import seal_answer
from sidecar.lines import Line
from sidecar.store.contents import Contents, keyring_of, load_contents
from sidecar.store.database import DAMAGE, count, insert_into
from sidecar.store.models import CanaryRow, ExchangeRow, GateComparisonRow
from sidecar.store.models.capture import COUNTED, EXAMINED

EXAMINED_AT_MOST = 20_000
"""Newest held-out exchanges among which the gate looks for sessions: a session of any length must
not make it read them all. With ten exchanges a session these are 2,000 sessions."""
PAGE = 500
LIVE_EXAMINED = 2_000
"""Newest exchanges of the champion among which the ramp looks for sessions."""
SETTLED_S = 600.0
"""A session without a request for so long has ended: of one that goes on, the first turns would be
drawn more often than the later ones. Users of an agent pause 10 to 90 s (docs/log.md)."""
MOST_TURNS = 2_000
"""Turns of one session among which one is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPrompt:
    """One recorded request of a session that is never trained on."""

    exchange_id: str
    session_id: str
    request: dict[str, Any]
    """Request body as JSON; empty when the stored one is damaged."""
    project: str
    """Its privacy policy holds for the answers of the comparison, and its rubric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the store keeps of one comparison."""

    status: str
    """`scored`, or the reason for setting it aside, which is counted; the row says `set_aside`."""
    difference: float | None
    """Mean score of the candidate's answers minus the champion's; None unless scored."""
    anchor_difference: float | None
    """The same for the anchor; None also when the champion is the anchor."""
    fault: Fault | None
    """Whose answers kept the judge from scoring it; None when it is scored."""
    place: int
    """Its number in the order of drawing."""
    answers: Sequence[dict[str, Any]]
    judge_model: str | None
    rubric_hash: str | None
    """Both None when the judge was not asked."""
    disagreement: Disagreement | None
    """How far the judge's passes differ; None after a single pass, and without scores."""


def comparison_id(canary: Canary, prompt: HeldOutPrompt) -> str:
    """Derive the id from canary and prompt, so that no comparison is stored twice."""
    text = f"{canary.canary_id}\x00{prompt.exchange_id}"
    return "c-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def drawn_turn(salt: str, session_id: str, exchange_ids: Iterable[str]) -> str:
    """Draw one turn of a session, each with the same chance over the salts. Pure.

    exchange_ids: at least one. A session that grows keeps its turn, unless a new one is drawn.
    """

    def rank(exchange_id: str) -> bytes:
        text = f"{salt}\x00{session_id}\x00{exchange_id}"
        return hashlib.sha256(text.encode()).digest()

    return min(exchange_ids, key=rank)


def held_out_prompts(
    session: Session,
    line: Line,
    *,
    limit: int,
    known: Collection[str] = (),
    without: str | None = None,
    salt: str = "",
    until: float | None = None,
) -> list[HeldOutPrompt]:
    """List one good turn of each of a line's newest held-out sessions, the newest session first.

    The turn is drawn by `drawn_turn`. known: sessions to leave out. without: an adapter; sessions
    in which it answered are left out too: the prompts of their later turns have its own words in
    them. salt: the canary's. until: Unix seconds; a session with a later exchange goes on, and is
    left out; None: none is for that.

    Sessions whose last exchange is older than the newest `EXAMINED_AT_MOST` are left out.
    """
    row = ExchangeRow
    found: dict[str, None] = {}
    left_out = set(known)
    unfit = [] if until is None else [row.stored_at > until]
    unfit += [] if without is None else [row.adapter == without]
    for session_id in _newest_examined(session, line, until):
        if session_id in left_out or session_id in found:
            continue
        if _any_in(session, session_id, unfit):
            left_out.add(session_id)
            continue
        found[session_id] = None
        if len(found) == limit:
            break
    good = (row.public_model == line.model, text(EXAMINED))
    return _prompts(session, line, found, good, salt)


def _any_in(session: Session, session_id: str, unfit: Sequence[ColumnElement[bool]]) -> bool:
    """Return True when one of these conditions holds for an exchange of the session."""
    if not unfit:
        return False
    found = select(ExchangeRow.seq).where(ExchangeRow.session_id == session_id, or_(*unfit))
    return session.scalar(found.limit(1)) is not None


def _prompts(
    session: Session,
    line: Line,
    sessions: Iterable[str],
    good: Sequence[ColumnElement[bool] | TextClause],
    salt: str,
) -> list[HeldOutPrompt]:
    """Draw one turn of each session. good: conditions of the exchanges that may be asked again."""
    row, found = ExchangeRow, list[tuple[str, str, str]]()
    for session_id in sessions:
        turns = session.execute(
            select(row.exchange_id, row.project)
            .where(row.session_id == session_id, *good)
            .limit(MOST_TURNS)
        )
        projects = {
            exchange_id: project
            for exchange_id, project in turns
            if line.has(project)
            and "\ufffd" not in exchange_id  # damaged: its comparison could never be found again
        }
        if projects:
            drawn = drawn_turn(salt, session_id, projects)
            found.append((drawn, session_id, projects[drawn]))
    contents = load_contents(session, [exchange_id for exchange_id, _, _ in found])
    return [
        HeldOutPrompt(
            exchange_id=exchange_id,
            session_id=key,
            request=_request(contents, exchange_id),
            project=project,
        )
        for exchange_id, key, project in found
    ]


def _newest_examined(session: Session, line: Line, until: float | None) -> Iterator[str]:
    """Yield the session of each exchange that the gate may ask again, the newest first.

    Those of other lines count among the `EXAMINED_AT_MOST`: a rare project must not make it read
    them all. until: as of `held_out_prompts`.
    """
    row, read, page = ExchangeRow, 0, PAGE
    before = [] if until is None else [row.stored_at <= until]
    while read < EXAMINED_AT_MOST:
        rows = session.execute(
            select(row.seq, row.session_id, row.project)
            .where(text(EXAMINED), row.public_model == line.model, *before)
            .order_by(row.seq.desc())
            .limit(page)
        ).all()
        yield from (session_id for _, session_id, project in rows if line.has(project))
        if len(rows) < page:
            return
        read, before = read + len(rows), [row.seq < rows[-1].seq]


def _request(contents: Contents, exchange_id: str) -> dict[str, Any]:
    try:
        request = json.loads(contents[exchange_id].request)
    except (*DAMAGE, RecursionError):
        return {}
    usable = isinstance(request, dict) and isinstance(request.get("messages"), list)
    return request if usable else {}


def compared_sessions(session: Session, canary_ids: Collection[str]) -> set[str]:
    """Return the sessions with a comparison in these canaries, scored or set aside."""
    statement = (
        select(ExchangeRow.session_id)
        .join(GateComparisonRow, GateComparisonRow.exchange_id == ExchangeRow.exchange_id)
        .where(GateComparisonRow.canary_id.in_(canary_ids))
    )
    return set(session.scalars(statement))


def comparisons(session: Session, canary_id: str) -> list[Comparison]:
    """List the canary's comparisons in a fixed order."""
    statement = (
        select(GateComparisonRow)
        .where(GateComparisonRow.canary_id == canary_id)
        .order_by(GateComparisonRow.comparison_id)
    )
    return [_to_comparison(row) for row in session.scalars(statement)]


def save_comparison(session: Session, canary: Canary, prompt: HeldOutPrompt, kept: Kept) -> bool:
    """Store one comparison, unless the canary has ended or holds the comparison already,
    or the exchange was deleted meanwhile. Returns: True when it is stored by this."""
    state = session.scalar(select(CanaryRow.state).where(CanaryRow.canary_id == canary.canary_id))
    known = select(ExchangeRow.seq).where(ExchangeRow.exchange_id == prompt.exchange_id)
    if state not in ("gating", "ramping") or session.scalar(known) is None:
        return False
    apart = kept.disagreement
    statement = (
        insert_into(session, GateComparisonRow)
        .on_conflict_do_nothing()
        .values(
            comparison_id=comparison_id(canary, prompt),
            canary_id=canary.canary_id,
            exchange_id=prompt.exchange_id,
            status="scored" if kept.difference is not None else "set_aside",
            difference=kept.difference,
            anchor_difference=kept.anchor_difference,
            fault=kept.fault,
            place=kept.place,
            flaws=_excess(kept.answers),
            answers=[
                seal_answer(keyring_of(session), comparison_id(canary, prompt), place, answer)
                for place, answer in enumerate(kept.answers)
            ],
            judge_model=kept.judge_model,
            rubric_hash=kept.rubric_hash,
            disagreement=apart.mean if apart is not None else None,
            flipped_pairs=apart.flipped if apart is not None else None,
        )
    )
    if session.scalar(statement.returning(GateComparisonRow.comparison_id)) is None:
        return False
    count(session, "gate", kept.status)
    return True


def judged_since(session: Session, canary_id: str, *, place: int) -> list[Comparison]:
    """List the canary's comparisons with larger places, in the order of drawing, without their
    answers."""
    row = GateComparisonRow
    statement = (
        select(row.place, row.difference, row.anchor_difference, row.fault, row.flaws)
        .where(row.canary_id == canary_id, row.place > place)
        .order_by(row.place, row.comparison_id)
    )
    return [
        Comparison(
            difference=_difference(difference),
            anchor_difference=_difference(anchor),
            fault=_fault(fault),
            flaws=_flaws(flaws),
            place=at,
        )
        for at, difference, anchor, fault, flaws in session.execute(statement)
    ]


def drawn(session: Session, canary_id: str) -> int:
    """Return the largest place of the canary's comparisons; 0 without any."""
    row = GateComparisonRow
    largest = session.scalar(select(func.max(row.place)).where(row.canary_id == canary_id))
    return largest if isinstance(largest, int) else 0


def made(session: Session, canary_id: str) -> int:
    """Return the number of the canary's comparisons, scored or set aside."""
    row = GateComparisonRow
    return session.scalar(select(func.count()).where(row.canary_id == canary_id)) or 0


def live_prompts(
    session: Session,
    canary: Canary,
    line: Line,
    *,
    after: float,
    until: float,
    limit: int,
    known: Collection[str],
) -> list[HeldOutPrompt]:
    """List one good turn of each of the champion's newest sessions, the newest session first.

    The turn is drawn by `drawn_turn`. line: the canary's. after: Unix
    seconds; a session that began earlier may have been learned from. until: a session with a later
    exchange goes on, and is left out. known: sessions to leave out. Those in which the candidate
    answered are left out too.
    """
    row = ExchangeRow
    found: dict[str, None] = {}
    old = set(known)
    champions: tuple[ColumnElement[bool] | TextClause, ...] = (
        row.public_model == line.model,
        row.adapter == canary.champion,
        row.arm == "champion",
        text(COUNTED),
    )
    good = (
        *champions,
        row.surface == "chat",
        row.status == 200,
        row.outcome == "ok",
        row.selection.in_(TURN_DECIDED),
    )
    unfit = (row.started_at <= after, row.adapter == canary.candidate, row.stored_at > until)
    rows = session.execute(
        select(row.session_id, row.started_at, row.project)
        .where(*champions, row.stored_at <= until)
        .order_by(row.seq.desc())
        .limit(LIVE_EXAMINED)
    )
    for session_id, started_at, project in rows:
        if session_id in old or session_id in found:
            continue
        if not line.has(project) or not _is_after(started_at, after):
            continue  # the base is champion in several lines
        if _any_in(session, session_id, unfit) or not _any_in(session, session_id, [and_(*good)]):
            old.add(session_id)
            continue
        found[session_id] = None
        if len(found) == limit:
            break
    return _prompts(session, line, found, good, canary.salt)


def _is_after(started_at: object, after: float) -> bool:
    return isinstance(started_at, int | float) and started_at > after  # damaged: of no time


def _excess(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    ours, theirs = (
        [one for one in answers if one["arm"] == arm] for arm in ("candidate", "champion")
    )

    def both(key: str) -> tuple[list[Any], list[Any]]:
        return [one.get(key) for one in ours], [one.get(key) for one in theirs]

    flaws = excess([one["flaws"] for one in ours], [one["flaws"] for one in theirs])
    return flaws | narrowing(*both("nats")) | lengthening(*both("tokens"))


def _difference(stored: object) -> float | None:
    """Return a difference of -1..1; None for none and for a damaged one."""
    known = isinstance(stored, int | float) and -1.0 <= stored <= 1.0
    return float(stored) if known else None  # type: ignore[arg-type]


def _fault(stored: str | None) -> Fault | None:
    return cast(Fault, stored) if stored in get_args(Fault) else None


def _flaws(stored: object) -> dict[str, float]:
    found = stored if isinstance(stored, dict) else {}
    read = {kind: _difference(found.get(kind)) for kind in (*FLAWS, *OF_GROUPS)}
    return {kind: value for kind, value in read.items() if value is not None}


def _to_comparison(row: GateComparisonRow) -> Comparison:
    candidate = [answer for answer in row.answers if answer["arm"] == "candidate"]
    champion = [answer for answer in row.answers if answer["arm"] == "champion"]
    return Comparison(
        difference=row.difference,
        candidate_answers=len(candidate),
        candidate_short=sum(answer["short"] for answer in candidate),
        champion_answers=len(champion),
        champion_short=sum(answer["short"] for answer in champion),
        judge=judge_name(row.judge_model, row.rubric_hash or "") if row.judge_model else "",
        disagreement=_share(row.disagreement),
        flipped=_share(row.flipped_pairs),
        anchor_difference=_difference(row.anchor_difference),
        fault=_fault(row.fault),
        flaws=_flaws(row.flaws),
        place=row.place or 0,
    )


def _share(stored: object) -> float | None:
    """Return a share of 0..1; None for none and for a damaged one."""
    return stored if isinstance(stored, float) and 0 <= stored <= 1 else None
