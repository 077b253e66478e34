"""The gate in the store: held-out prompts, comparisons, and what they say so far."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec
from sqlalchemy import ColumnElement, TextClause, and_, func, or_, select, text
from sqlalchemy.orm import Session

from deploy.evidence.quality import FLAWS, OF_GROUPS, Fault, Flaw, Quality
from deploy.records import Canary
from deploy.registry.canary_rule import Comparison, judge_name, quality_of
from deploy.registry.proof_rule import has_anchor, limits_of, tries_of
from ingest.grouping.selection import TURN_DECIDED
from ingest.records import Disagreement
from ingest.reward_watch.traits import traits_of
from ingest.store.exchanges import seal_answer
from ingest.verifiers.checkers import fits
from sidecar.lines import Line
from sidecar.replies.parts import answer_text
from sidecar.settings import Canary as CanarySettings
from sidecar.store.contents import Contents, keyring_of, load_contents
from sidecar.store.database import DAMAGE, count, insert_into
from sidecar.store.models import COUNTED, EXAMINED, CanaryRow, ExchangeRow, GateComparisonRow

# Facts about answers that need no judge. Pure.


def is_short(message: Mapping[str, Any], finish_reason: str | None) -> bool:
    """Return True for an answer that the token limit cut, or without words and tool calls."""
    if finish_reason == "length":
        return True
    return not answer_text(message).strip() and not message.get("tool_calls")


def flaws_of(
    message: Mapping[str, Any], finish_reason: str | None, request: Mapping[str, Any]
) -> frozenset[Flaw]:
    """Return the kinds of flaws of an answer (`deploy.evidence.quality`).

    request: the chat request, for its tools and its format; empty: neither is known to be wrong.
    """
    found: set[Flaw] = set()
    if is_short(message, finish_reason):
        found.add("short")
    encoded = msgspec.json.encode(message)
    traits = traits_of(encoded, finish_reason=finish_reason, tools=request.get("tools"))
    whole = finish_reason != "length"
    if traits.invalid_call or (whole and not fits_format(message, request.get("response_format"))):
        found.add("invalid")
    if traits.refusal or traits.repetition:
        found.add("evasive")
    return frozenset(found)


def fits_format(message: Mapping[str, Any], wanted: object) -> bool:
    """Return False when the request asks for JSON and the content is none, or does not fit its
    schema as far as bounded work can tell (`ingest.verifiers.checkers`)."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    content = message.get("content")
    if kind not in ("json_object", "json_schema") or not isinstance(content, str):
        return True
    if not content.strip():
        return True  # it is empty, which is a flaw of its own
    named = wanted.get("json_schema") if isinstance(wanted, dict) else None
    schema = named.get("schema") if kind == "json_schema" and isinstance(named, dict) else None
    return fits(content, True if schema is None else schema)


def excess(
    candidate: Sequence[Collection[str]], champion: Sequence[Collection[str]]
) -> dict[str, float]:
    """Return for each kind the candidate's share of flawed answers minus the champion's.

    candidate, champion: the flaws of each answer. Returns: nothing without answers of both.
    """
    if not candidate or not champion:
        return {}
    return {kind: _share(candidate, kind) - _share(champion, kind) for kind in FLAWS}


NARROW = 0.5
"""Share of the champion's uncertainty under which the candidate's counts as narrow, if it is also
under `COLLAPSED`."""
COLLAPSED = 0.1
"""Nats a token. An answer of 15 tokens then comes again with a chance of exp(-1.5), 22%, and the
answers of a group are alike. Less uncertainty than before is no harm by itself: it is what learning
does, and a supervised adapter has half of the base's or less on most prompts (docs/log.md)."""
CERTAIN = 0.01
"""Nats a token; where the other is no more uncertain than this, nothing can be narrower."""


def narrowing(
    candidate: Sequence[float | None], champion: Sequence[float | None]
) -> dict[str, float]:
    """Return 1 when the candidate's answers are nearly certain and at most half as uncertain as the
    champion's, -1 when the champion's are, else 0: its mean is 0 between two that do not differ.

    candidate, champion: mean negative log-probability a token of each answer, in nats; at
        temperature 1 it estimates the entropy. Returns: nothing without answers of both.
    """
    return _signed("narrow", _narrower, candidate, champion)


def _narrower(one: float, other: float) -> bool:
    return one < COLLAPSED and one < NARROW * other and other >= CERTAIN


LONG = 2.0
"""Times the champion's length over which the candidate's answers count as long. What a run adds is
some percent; twice the length is what rewards for length do (docs/canary.md)."""
LEAST_MORE = 16.0
"""Tokens, in the mean, by which long answers are longer: two words in place of one are no harm."""


def lengthening(
    candidate: Sequence[int | None], champion: Sequence[int | None]
) -> dict[str, float]:
    """Return 1 when the candidate's answers are more than twice as long as the champion's, -1 when
    the champion's are, else 0: its mean is 0 between two that do not differ.

    candidate, champion: tokens of each answer. Returns: nothing without answers of both.
    """
    return _signed("long", _longer, candidate, champion)


def _longer(one: float, other: float) -> bool:
    return one > LONG * other and one - other >= LEAST_MORE


def _signed(
    kind: str,
    worse: Callable[[float, float], bool],
    candidate: Sequence[float | None],
    champion: Sequence[float | None],
) -> dict[str, float]:
    """Return the kind -> 1 when the candidate's mean is worse than the champion's, -1 when the
    champion's is worse, else 0; nothing without figures of both."""
    known = [[one for one in arm if one is not None] for arm in (candidate, champion)]
    if not all(known):
        return {}
    ours, theirs = (sum(arm) / len(arm) for arm in known)
    return {kind: float(worse(ours, theirs)) - float(worse(theirs, ours))}


def _share(answers: Sequence[Collection[str]], kind: str) -> float:
    return sum(kind in flaws for flaws in answers) / len(answers)


EXAMINED_AT_MOST = 20_000
"""Newest held-out exchanges among which the gate looks for sessions: a session of any length must
not make it read them all. With ten exchanges a session these are 2,000 sessions."""
PAGE = 500
LIVE_EXAMINED = 2_000
"""Newest exchanges of the champion among which the ramp looks for sessions."""
SETTLED_S = 600.0
"""A session without a request for so long has ended: of one that goes on, the first turns would be
drawn more often than the later ones. Users of an agent pause 10 to 90 s (docs/log.md)."""
FIRST = (ExchangeRow.turn == 0, ExchangeRow.parent_id.is_(None))
"""Conditions of a session's first turn."""
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
    since: float | None = None,
    first: bool = False,
) -> list[HeldOutPrompt]:
    """List one good turn of each of a line's newest held-out sessions, the newest session first.

    The turn is drawn by `drawn_turn`. known: sessions to leave out. without: an adapter; sessions
    in which it answered are left out too: the prompts of their later turns have its own words in
    them. salt: the canary's. until: Unix seconds; a session with a later exchange goes on, and is
    left out; None: none is for that. since: Unix seconds; older exchanges are not taken. first: no
    turn but the session's first is taken.

    Sessions whose last exchange is older than the newest `EXAMINED_AT_MOST` are left out.
    """
    row = ExchangeRow
    found: dict[str, None] = {}
    left_out = set(known)
    unfit = [] if until is None else [row.stored_at > until]
    unfit += [] if without is None else [row.adapter == without]
    good = [row.public_model == line.model, text(EXAMINED), *(FIRST if first else ())]
    good += [] if since is None else [row.stored_at >= since, row.started_at >= since]
    for session_id in _newest_examined(session, line, since, until):
        if session_id in left_out or session_id in found:
            continue
        # Records of another gateway are stored long after they were asked.
        chosen = first or since is not None
        lacks = chosen and not _any_in(session, session_id, [and_(*good)])
        if lacks or _any_in(session, session_id, unfit):
            left_out.add(session_id)
            continue
        found[session_id] = None
        if len(found) == limit:
            break
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
        projects = {exchange_id: project for exchange_id, project in turns if line.has(project)}
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


def _newest_examined(
    session: Session, line: Line, since: float | None, until: float | None
) -> Iterator[str]:
    """Yield the session of each exchange that the gate may ask again, the newest first.

    Those of other lines count among the `EXAMINED_AT_MOST`: a rare project must not make it read
    them all. since, until: as of `held_out_prompts`.
    """
    row, read, page = ExchangeRow, 0, PAGE
    span = [] if since is None else [row.stored_at >= since, row.started_at >= since]
    before = [] if until is None else [row.stored_at <= until]
    while read < EXAMINED_AT_MOST:
        rows = session.execute(
            select(row.seq, row.session_id, row.project)
            .where(text(EXAMINED), row.public_model == line.model, *span, *before)
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
    messages = request.get("messages") if isinstance(request, dict) else None
    usable = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
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
            flaws=excess_of(kept.answers),
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
            difference=difference,
            anchor_difference=anchor,
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
    first: bool = False,
) -> list[HeldOutPrompt]:
    """List one good turn of each of the champion's newest sessions, the newest session first.

    The turn is drawn by `drawn_turn`. line: the canary's. after: Unix
    seconds; a session that began earlier may have been learned from. until: a session with a later
    exchange goes on, and is left out. known: sessions to leave out. Those in which the candidate
    answered are left out too. first: as of `held_out_prompts`.
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
        *(FIRST if first else ()),
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
        if not line.has(project) or not started_at > after:
            continue  # the base is champion in several lines
        if _any_in(session, session_id, unfit) or not _any_in(session, session_id, [and_(*good)]):
            old.add(session_id)
            continue
        found[session_id] = None
        if len(found) == limit:
            break
    return _prompts(session, line, found, good, canary.salt)


def excess_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how much more often the candidate's answers of a group are flawed, by kind.

    answers: with `arm`, `flaws`, `nats` and `tokens` of each.
    """
    ours, theirs = (
        [one for one in answers if one["arm"] == arm] for arm in ("candidate", "champion")
    )

    def both(key: str) -> tuple[list[Any], list[Any]]:
        return [one.get(key) for one in ours], [one.get(key) for one in theirs]

    flaws = excess([one["flaws"] for one in ours], [one["flaws"] for one in theirs])
    return flaws | narrowing(*both("nats")) | lengthening(*both("tokens"))


def _fault(stored: str | None) -> Fault | None:
    return cast(Fault, stored) if stored in get_args(Fault) else None


def _flaws(stored: dict[str, float] | None) -> dict[str, float]:
    read = {kind: (stored or {}).get(kind) for kind in (*FLAWS, *OF_GROUPS)}
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
        disagreement=row.disagreement,
        flipped=row.flipped_pairs,
        anchor_difference=row.anchor_difference,
        fault=_fault(row.fault),
        flaws=_flaws(row.flaws),
        place=row.place or 0,
    )


# What the judged groups of a canary say so far, read from the `gate_comparison` table.


class Judged:
    """Keeps the state of one canary's groups between ticks."""

    def __init__(self, rules: CanarySettings) -> None:
        self._rules = rules
        self._limits = limits_of(rules)
        self._of = ""
        self._place = 0
        self._quality = Quality()
        self.carried = 0
        """Groups of earlier tries."""

    def _after(self, groups: Sequence[Comparison], canary: Canary) -> Quality:
        anchored = has_anchor(canary, self._rules)
        return quality_of(groups, self._limits, anchored=anchored, start=self._quality)

    def read(self, session: Session, canary: Canary, *, open_from: int | None) -> Quality:
        """Read what is new.

        open_from: the first place that may not be counted yet, found before `session` began
        (`Drawing.open_from`); None: all are counted.
        """
        if canary.canary_id != self._of:
            self._of, self._place, self._quality = canary.canary_id, 0, Quality()
            for earlier in tries_of(canary, self._rules):
                before = judged_since(session, earlier, place=0)
                self._quality = self._after(before, canary)
            self.carried = self._quality.groups + self._quality.unknown
        groups = [
            one
            for one in judged_since(session, canary.canary_id, place=self._place)
            if open_from is None or one.place < open_from
        ]
        self._quality = self._after(groups, canary)
        self._place = groups[-1].place if groups else self._place
        return self._quality
