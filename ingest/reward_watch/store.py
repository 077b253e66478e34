"""The reward watch in the store: traits of answers, their sums, and what is asked of them.

A pass takes a page of the newest exchanges in the order of the table, and keeps what it found in
`watched_answer`: the newest `window` answers of each adapter. It does not try to keep up with
more traffic than it can look at: what it passes over is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

import msgspec
import structlog
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from ingest.feedback.store import rank
from ingest.reward_watch.rules import (
    LIMITS,
    Finding,
    Gain,
    Limits,
    Line as WatchLine,
    Moments,
    Verdict,
    assess,
    mean_of,
    moments,
    pooled_correlation,
    rate_of,
)
from ingest.reward_watch.traits import (
    KINDS,
    MeanOf,
    Profile,
    RateOf,
    needs_tools,
    traits_of,
    write_body,
)
from sidecar.lines import Line, flag_of, project_of
from sidecar.records import BASE
from sidecar.settings import Watch
from sidecar.store.codec import HEAD_BYTES, ID_BYTES, decoded_ids, decompress
from sidecar.store.contents import load_contents, opened_reply
from sidecar.store.database import DAMAGE, Database, count, get_flag, insert_into, set_flag
from sidecar.store.models import (
    AdapterProfileRow,
    AdapterRow,
    AliasRow,
    AnswerRow,
    CanaryRow,
    ChoiceRow,
    ExchangeRow,
    FeedbackRow,
    GroupRow,
    SignalRow,
    WatchedAnswerRow,
)

# Sum up what is stored of an adapter's answers, and keep the sums when the answers go.

UNHAPPY = ("correction", "regeneration", "retry")
"""Signals that say that a user was not content with an answer."""
GROUPS = 200
"""Newest scored groups, of all adapters, that are looked at."""

log = structlog.get_logger()


def refresh(session: Session, model: str, adapter: str, limits: Limits, *, now: float) -> Profile:
    """Compute an adapter's profile and store it, in the caller's write transaction."""
    profile = current_profile(session, model, adapter, limits)
    values = {"at": now, "body": write_body(profile)}
    session.execute(
        insert_into(session, AdapterProfileRow)
        .values(model=model, adapter=adapter, **values)
        .on_conflict_do_update(index_elements=["model", "adapter"], set_=values)
    )
    return profile


def current_profile(session: Session, model: str, adapter: str, limits: Limits) -> Profile:
    """Return what is known of an adapter: of its answers in the store, or of those before."""
    stored = stored_profile(session, model, adapter)
    answers = _of_answers(session, model, adapter, limits)
    groups = _of_groups(session, model, adapter)
    if stored is None:
        return _joined(answers, groups)
    told = stored.newest >= answers.newest and stored.answers > answers.answers
    grouped = stored.newest_group >= groups.newest_group and stored.groups > groups.groups
    grouped = grouped or groups.groups < min(stored.groups, limits.min_groups)
    return _joined(stored if told else answers, stored if grouped else groups)


def stored_profile(session: Session, model: str, adapter: str) -> Profile | None:
    """Return a stored profile; None when there is none. One that is no profile counts as none
    (logged): it is made anew from its answers."""
    body = session.scalar(
        select(AdapterProfileRow.body).where(
            AdapterProfileRow.model == model, AdapterProfileRow.adapter == adapter
        )
    )
    try:
        return None if body is None else msgspec.json.decode(body, type=Profile)
    except msgspec.MsgspecError as error:
        log.error("profile_damaged", adapter=adapter, why=str(error))
        return None


def _joined(answers: Profile, groups: Profile) -> Profile:
    return msgspec.structs.replace(
        answers,
        groups=groups.groups,
        newest_group=groups.newest_group,
        correlation=groups.correlation,
        correlation_error=groups.correlation_error,
    )


def _of_answers(session: Session, model: str, adapter: str, limits: Limits) -> Profile:
    row = WatchedAnswerRow
    of_adapter = (row.model == model, row.adapter == adapter)
    found = session.execute(
        select(
            row.seq,
            row.exchange_id,
            row.session_id,
            row.tokens,
            *(getattr(row, kind) for kind in KINDS),
        )
        .where(*of_adapter)
        .order_by(row.seq.desc())
        .limit(limits.window)
    ).all()
    if not found:
        return Profile()
    sessions: dict[str, list[int]] = {}
    for at, one in enumerate(found):
        sessions.setdefault(one[2], []).append(at)
    signalled = set(
        session.scalars(
            select(SignalRow.exchange_id)
            .join(row, row.exchange_id == SignalRow.exchange_id)
            .where(*of_adapter, SignalRow.kind.in_(UNHAPPY))
        )
    )
    scores = _feedback(session, model, adapter)
    unhappy = [one[1] in signalled for one in found]

    def rate(hits: Sequence[bool]) -> RateOf:
        return rate_of((len(ats), sum(hits[at] for at in ats)) for ats in sessions.values())

    lengths = [
        math.log1p(one[3]) if isinstance(one[3], int) and one[3] >= 0 else None for one in found
    ]
    told: list[float | None] = [scores.get(one[1]) for one in found]
    return Profile(
        answers=len(found),
        sessions=len(sessions),
        newest=found[0][0],
        rates={kind: rate([one[4 + at] for one in found]) for at, kind in enumerate(KINDS)},
        log_tokens=_mean(sessions.values(), lengths),
        signals=rate(unhappy),
        feedback=_mean(sessions.values(), told),
    )


def _mean(sessions: Iterable[Sequence[int]], values: Sequence[float | None]) -> MeanOf | None:
    held = ([found for at in ats if (found := values[at]) is not None] for ats in sessions)
    return mean_of((len(some), sum(some)) for some in held)


def _feedback(session: Session, model: str, adapter: str) -> dict[str, float]:
    """Return the mean score of each answer that clients scored, each voice's newest."""
    row, told = WatchedAnswerRow, FeedbackRow
    place = rank().label("place")
    newest = (
        select(told.exchange_id, told.score, place)
        .join(row, row.exchange_id == told.exchange_id)
        .where(
            row.model == model,
            row.adapter == adapter,
            told.target_kind == "exchange",
            told.score.is_not(None),
        )
        .subquery()
    )
    found = session.execute(
        select(newest.c.exchange_id, newest.c.score).where(newest.c.place == 1).limit(MOST_FEEDBACK)
    )
    scores: dict[str, list[float]] = {}
    for name, score in found:
        if name is not None and isinstance(score, float) and -1.0 <= score <= 1.0:
            scores.setdefault(name, []).append(score)
    return {name: sum(some) / len(some) for name, some in scores.items()}


MOST_FEEDBACK = 10_000
"""Feedback on the answers of one adapter that is read at once."""


def _of_groups(session: Session, model: str, adapter: str) -> Profile:
    row, project = GroupRow, project_of(model)
    newest = session.execute(
        select(row.seq, row.group_id, row.adapter, row.project)
        .where(row.scored_at.is_not(None))
        .order_by(row.scored_at.desc())
        .limit(GROUPS)
    )
    groups = {
        group_id: seq
        for seq, group_id, of, of_project in newest
        if of == adapter and (project is None or of_project == project)  # the base is in every line
    }
    answers: dict[str, list[tuple[int, float]]] = {}
    broken: set[str] = set()
    held = session.execute(
        select(
            AnswerRow.group_id,
            AnswerRow.score,
            AnswerRow.reward,
            func.substr(AnswerRow.token_ids, 1, HEAD_BYTES),
            func.length(AnswerRow.token_ids),
        ).where(AnswerRow.group_id.in_(list(groups)))
    )
    for group_id, score, reward, head, stored_bytes in held:
        # What is learned from; null: the score itself.
        score = score if reward is None else reward
        if not isinstance(score, float) or not math.isfinite(score):
            broken.add(group_id)
            continue
        tokens = decoded_ids(head, stored_bytes or 0) // ID_BYTES
        answers.setdefault(group_id, []).append((tokens, score))
    told: list[Moments] = []
    for group_id, pairs in answers.items():
        if group_id not in broken and len(pairs) > 1:
            told.append(moments([length for length, _ in pairs], [score for _, score in pairs]))
    found = pooled_correlation(told)
    if found is None:
        return Profile(newest_group=max(groups.values(), default=0))
    return Profile(
        newest_group=max(groups.values()),
        groups=found.groups,
        correlation=found.r,
        correlation_error=found.error,
    )


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


class AnswerWatch:
    """The pass of one ingest process."""

    def __init__(
        self, database: Database, lines: Sequence[Line] = (), limits: Limits = LIMITS
    ) -> None:
        """lines: of adapters, for which the answers are kept apart."""
        self._database = database
        self._lines = lines
        self._limits = limits
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
        seen, touched = read_answers(
            self._database, window=self._limits.window, now=now, lines=self._lines
        )
        self._touched |= touched
        if self._touched and now >= self._refresh_due:
            self._refresh_due = now + REFRESH_S
            for model, adapter in sorted(self._touched):
                with self._database.write(alone=False) as session:
                    refresh(session, model, adapter, self._limits, now=now)
            self._touched.clear()
        return seen


def read_answers(
    database: Database, *, window: int, now: float, lines: Sequence[Line] = ()
) -> tuple[int, set[tuple[str, str]]]:
    """Look at one page. window: answers of an adapter that are kept. now: Unix seconds.

    Returns: the number of exchanges looked at; and (line, adapter) of their answers.
    """
    with database.read() as session:
        begin, skipped = _begin(session)
        page = _page(session, begin, now=now)
        found, unread = _traits(session, page, lines)
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


def _counts(one: Any) -> bool:
    answered = one.surface == "chat" and one.status == 200 and one.outcome == "ok"
    return bool(answered and one.origin == "user")


def _line_of(one: Any, lines: Sequence[Line]) -> str:
    """Return the name of the line that an answer is of, else its model."""
    own = (one.public_model, one.project)
    return next((x.name for x in lines if x.project and (x.model, x.project) == own), own[0])


def _begin(session: Session) -> tuple[int, int]:
    """Return where the page begins, and how many exchanges are passed over."""
    text = get_flag(session, FLAG)
    begin = int(text) if text is not None and text.isdecimal() else 0
    newest = session.scalar(select(func.max(ExchangeRow.seq))) or 0
    if newest - begin <= BEHIND:
        return min(begin, newest), 0
    return newest - PAGE, newest - PAGE - begin


def _page(session: Session, begin: int, *, now: float) -> list[Any]:  # Any: rows
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
            row.origin,
        )
        .where(row.seq > begin)
        .order_by(row.seq)
        .limit(PAGE)
    )
    # A time to come was written by a clock that was fast: nothing waits for it.
    return list(takewhile(lambda one: not now - SETTLE_S < one.stored_at <= now, rows))


def _traits(
    session: Session, page: Sequence[Any], lines: Sequence[Line]
) -> tuple[list[dict[str, object]], int]:
    """Return the rows to store, and how many answers could not be read."""
    counting = {one.exchange_id: one for one in page if _counts(one)}
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
                "model": _line_of(one, lines),
                "adapter": one.adapter,
                "session_id": one.session_id,
                "tokens": one.completion_tokens,
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


# Ask the watch about the champion: gather what the checks compare, and what is waived.

OVERRIDE = "watch_override"
"""Flag row: what an operator accepted, as JSON of `Override`."""
WIDTH_95 = 2 * 1.959964
"""Width of a 95% interval in standard errors; the gate stores such intervals."""


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's word: while this version is champion, these checks do not hold the learner."""

    champion: str
    checks: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the watch says of the champion."""

    verdict: Verdict
    holding: tuple[Finding, ...]
    """Findings that nobody waived; with any of them the learner is held."""
    profiles: dict[str, Profile]

    @property
    def reason(self) -> str:
        return "; ".join(one.text for one in self.holding)


def ask(session: Session, model: str, settings: Watch, limits: Limits = LIMITS) -> Answer:
    """Check the champion of a line. Reads a bounded number of small rows.

    model: name of the line of adapters.
    """
    line = line_of(session, model, limits)
    verdict = assess(line, limits)
    waived = read_override(session, model)
    accepted: tuple[str, ...] = ()
    if waived is not None and waived.champion == verdict.champion:
        accepted = waived.checks
    holding = tuple(one for one in verdict.findings if one.check not in accepted)
    return Answer(
        verdict=verdict,
        holding=holding if settings.hold else (),
        profiles=dict(line.profiles),
    )


def line_of(session: Session, model: str, limits: Limits) -> WatchLine:
    """Gather the champion, the versions before it, and what is known of them."""
    alias = session.get(AliasRow, (model, "champion"))
    champion = BASE if alias is None else alias.adapter
    names = [champion, *_ancestors(session, model, champion, limits.versions)]
    line = WatchLine(champion=champion, profiles={}, parent=names[1] if len(names) > 1 else None)
    if line.parent is None:
        profiles = {champion: current_profile(session, model, champion, limits)}
        return replace(line, profiles=profiles)
    gains = [_gain(session, name) for name in names[:-1]]
    known = [one for one in gains if one is not None]
    wanted = dict.fromkeys((champion, line.parent, BASE, names[-1]))
    return replace(
        line,
        profiles={name: current_profile(session, model, name, limits) for name in wanted},
        earlier=names[-1],
        # Without all of them nobody knows what the judge saw in sum.
        gains=tuple(known) if len(known) == len(gains) else (),
    )


def _ancestors(session: Session, model: str, champion: str, most: int) -> Iterator[str]:
    name = champion
    for _ in range(most):
        if name == BASE:
            return
        parent = session.scalar(
            select(AdapterRow.parent).where(AdapterRow.model == model, AdapterRow.name == name)
        )
        if not isinstance(parent, str):
            return
        yield parent
        name = parent


class _Measured(msgspec.Struct):
    """What the gate measured, as the canary's evidence has it."""

    mean_difference: float
    low: float
    high: float


def _gain(session: Session, candidate: str) -> Gain | None:
    """Return what the gate measured of a version; None: it was not measured."""
    of_candidate = select(CanaryRow.evidence).where(CanaryRow.candidate == candidate)
    evidence = session.scalar(of_candidate.order_by(CanaryRow.created_at.desc()).limit(1))
    try:
        gate = msgspec.convert((evidence or {}).get("gate"), _Measured)
    except msgspec.ValidationError:
        return None
    if not (gate.low <= gate.mean_difference <= gate.high):
        return None
    return Gain(mean=gate.mean_difference, error=(gate.high - gate.low) / WIDTH_95)


def read_override(session: Session, model: str) -> Override | None:
    """Return what an operator accepted in a line; None: nothing, or the row is damaged: then
    nothing is waived."""
    text = get_flag(session, flag_of(OVERRIDE, model))
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Override)
    except (msgspec.MsgspecError, UnicodeError):
        log.error("watch_override_unreadable")
        return None


def write_override(session: Session, model: str, override: Override) -> None:
    """Accept what the watch found in a line, in the caller's write transaction."""
    set_flag(
        session, flag_of(OVERRIDE, model), msgspec.json.encode(override).decode(), now=override.at
    )
