"""Reads and writes of the gate in the store: held-out prompts and comparisons."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from sqlalchemy import ColumnElement, Select, func, or_, select, text
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


def held_out_prompts(
    session: Session,
    line: Line,
    *,
    limit: int,
    known: Collection[str] = (),
    without: str | None = None,
) -> list[HeldOutPrompt]:
    """List the newest good exchange of each of a line's newest held-out sessions, the newest first.

    known: sessions to leave out. without: an adapter; sessions in which it answered are left out
    too: the prompts of their later turns have its own words in them.

    Sessions whose last exchange is older than the newest `EXAMINED_AT_MOST` are left out.
    """
    newest: dict[str, int] = {}
    """Session -> `seq` of its newest exchange."""
    left_out = set(known)
    for seq, session_id, adapter in _newest_examined(session, line):
        if session_id in left_out or session_id in newest:
            continue
        if without is not None and (
            adapter == without or session.scalar(_answers_of(session_id, without)) is not None
        ):
            left_out.add(session_id)
            continue
        newest[session_id] = seq
        if len(newest) == limit:
            break
    return _prompts(session, newest.values())


def _answers_of(session_id: str, adapter: str) -> Select[int]:
    """Return a query for one exchange of a session that an adapter answered."""
    row = ExchangeRow
    return select(row.seq).where(row.session_id == session_id, row.adapter == adapter).limit(1)


def _prompts(session: Session, seqs: Collection[int]) -> list[HeldOutPrompt]:
    statement = (
        select(ExchangeRow.exchange_id, ExchangeRow.session_id, ExchangeRow.project)
        .where(ExchangeRow.seq.in_(seqs))
        .order_by(ExchangeRow.seq.desc())
    )
    found = [
        (exchange_id, key, project)
        for exchange_id, key, project in session.execute(statement)
        if "\ufffd" not in exchange_id  # damaged: its comparison could never be found again
    ]
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


def _newest_examined(session: Session, line: Line) -> Iterator[tuple[int, str, str]]:
    """Yield `seq`, session and adapter of the exchanges that the gate may ask again, the newest
    first.

    Those of other lines count among the `EXAMINED_AT_MOST`: a rare project must not make it read
    them all.
    """
    read, page = 0, PAGE
    before: tuple[ColumnElement[bool], ...] = ()
    while read < EXAMINED_AT_MOST:
        rows = session.execute(
            select(
                ExchangeRow.seq, ExchangeRow.session_id, ExchangeRow.adapter, ExchangeRow.project
            )
            .where(text(EXAMINED), ExchangeRow.public_model == line.model, *before)
            .order_by(ExchangeRow.seq.desc())
            .limit(page)
        ).all()
        yield from (
            (seq, session_id, adapter)
            for seq, session_id, adapter, project in rows
            if line.has(project)
        )
        if len(rows) < page:
            return
        read, before = read + len(rows), (ExchangeRow.seq < rows[-1].seq,)


def _request(contents: Contents, exchange_id: str) -> dict[str, Any]:
    try:
        request = json.loads(contents[exchange_id].request)
    except (*DAMAGE, RecursionError):
        return {}
    usable = isinstance(request, dict) and isinstance(request.get("messages"), list)
    return request if usable else {}


def compared_sessions(session: Session, canary: Canary) -> set[str]:
    """Return the sessions with a comparison in this canary, scored or set aside."""
    statement = (
        select(ExchangeRow.session_id)
        .join(GateComparisonRow, GateComparisonRow.exchange_id == ExchangeRow.exchange_id)
        .where(GateComparisonRow.canary_id == canary.canary_id)
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
    limit: int,
    known: Collection[str],
) -> list[HeldOutPrompt]:
    """List the newest good exchange of each of the champion's newest sessions, the newest first.

    line: the canary's. after: Unix seconds; a session that began earlier may have been learned
    from. known: sessions to leave out. Those in which the candidate answered are left out too.
    """
    row = ExchangeRow
    newest: dict[str, int] = {}
    old = set(known)
    rows = session.execute(
        select(
            row.seq, row.session_id, row.started_at, row.surface, row.status, row.outcome,
            row.selection, row.project,
        )
        .where(
            row.public_model == line.model,
            row.adapter == canary.champion,
            row.arm == "champion",
            text(COUNTED),
        )
        .order_by(row.seq.desc())
        .limit(LIVE_EXAMINED)
    )  # fmt: skip
    for seq, session_id, started_at, surface, status, outcome, selection, project in rows:
        if not line.has(project):  # the base is champion in several lines
            continue
        good = (surface, status, outcome) == ("chat", 200, "ok") and selection in TURN_DECIDED
        if not good or session_id in old or not _is_after(started_at, after):
            continue
        unfit = or_(row.started_at <= after, row.adapter == canary.candidate)
        found = select(row.seq).where(row.session_id == session_id, unfit).limit(1)
        if session_id not in newest and session.scalar(found) is not None:
            old.add(session_id)
            continue
        newest.setdefault(session_id, seq)
        if len(newest) == limit:
            break
    return _prompts(session, newest.values())


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
