"""Sum up what is stored of an adapter's answers, and keep the sums when the answers go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.feedback.reading import rank
from ingest.reward_watch.profile import (
    DamagedProfileError,
    MeanOf,
    Profile,
    RateOf,
    read_body,
    write_body,
)
from ingest.reward_watch.statistics import (
    Mean,
    Moments,
    Rate,
    mean_of,
    moments,
    pooled_correlation,
    rate_of,
)
from ingest.reward_watch.traits import KINDS
from sidecar.lines import project_of
from sidecar.settings import Watch
from sidecar.store.arrays import ID_BYTES
from sidecar.store.database import insert_into
from sidecar.store.frames import HEAD_BYTES, decoded_ids
from sidecar.store.models import (
    AdapterProfileRow,
    AnswerRow,
    FeedbackRow,
    GroupRow,
    SignalRow,
    WatchedAnswerRow,
)

UNHAPPY = ("correction", "regeneration", "retry")
"""Signals that say that a user was not content with an answer."""
GROUPS = 200
"""Newest scored groups, of all adapters, that are looked at."""

log = structlog.get_logger()


def refresh(session: Session, model: str, adapter: str, settings: Watch, *, now: float) -> Profile:
    """Compute an adapter's profile and store it, in the caller's write transaction."""
    profile = current_profile(session, model, adapter, settings)
    values = {"at": now, "body": write_body(profile)}
    session.execute(
        insert_into(session, AdapterProfileRow)
        .values(model=model, adapter=adapter, **values)
        .on_conflict_do_update(index_elements=["model", "adapter"], set_=values)
    )
    return profile


def current_profile(session: Session, model: str, adapter: str, settings: Watch) -> Profile:
    """Return what is known of an adapter: of its answers in the store, or of those before.

    A stored profile that cannot be read is computed anew; what its deleted answers told is lost,
    which the profile says. The damage is logged.
    """
    lost = False
    try:
        stored = stored_profile(session, model, adapter)
    except DamagedProfileError as error:
        log.error("profile_damaged", adapter=adapter, why=str(error))
        stored, lost = None, True
    answers = _of_answers(session, model, adapter, settings)
    groups = _of_groups(session, model, adapter)
    if stored is None:
        lost = lost and answers.answers < settings.min_answers
        return _joined(answers, groups, lost=lost)
    told = stored.newest >= answers.newest and stored.answers > answers.answers
    grouped = stored.newest_group >= groups.newest_group and stored.groups > groups.groups
    grouped = grouped or groups.groups < min(stored.groups, settings.min_groups)
    return _joined(
        stored if told else answers,
        stored if grouped else groups,
        lost=stored.lost and (stored if told else answers).answers < settings.min_answers,
    )


def stored_profile(session: Session, model: str, adapter: str) -> Profile | None:
    """Return a stored profile; None when there is none. Raises: DamagedProfileError."""
    body = session.scalar(
        select(AdapterProfileRow.body).where(
            AdapterProfileRow.model == model, AdapterProfileRow.adapter == adapter
        )
    )
    return None if body is None else read_body(body)


def damaged_profiles(session: Session, model: str, adapters: Iterable[str]) -> tuple[str, ...]:
    """Return those of these adapters whose stored profile cannot be read."""
    damaged = []
    for adapter in adapters:
        try:
            stored_profile(session, model, adapter)
        except DamagedProfileError:
            damaged.append(adapter)
    return tuple(damaged)


def _joined(answers: Profile, groups: Profile, *, lost: bool) -> Profile:
    return msgspec.structs.replace(
        answers,
        groups=groups.groups,
        newest_group=groups.newest_group,
        correlation=groups.correlation,
        correlation_error=groups.correlation_error,
        lost=lost,
    )


def _of_answers(session: Session, model: str, adapter: str, settings: Watch) -> Profile:
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
        .limit(settings.window)
    ).all()
    # A damaged trait is no truth value: that answer is left out.
    sound = [one for one in found if all(isinstance(one[4 + at], bool) for at in range(len(KINDS)))]
    if not sound:
        return Profile()
    sessions: dict[str, list[int]] = {}
    for at, one in enumerate(sound):
        sessions.setdefault(one[2], []).append(at)
    signalled = set(
        session.scalars(
            select(SignalRow.exchange_id)
            .join(row, row.exchange_id == SignalRow.exchange_id)
            .where(*of_adapter, SignalRow.kind.in_(UNHAPPY))
        )
    )
    scores = _feedback(session, model, adapter)
    unhappy = [one[1] in signalled for one in sound]

    def rate(hits: Sequence[bool]) -> RateOf:
        return _stored_rate(
            rate_of((len(ats), sum(hits[at] for at in ats)) for ats in sessions.values())
        )

    lengths = [
        math.log1p(one[3]) if isinstance(one[3], int) and one[3] >= 0 else None for one in sound
    ]
    told: list[float | None] = [scores.get(one[1]) for one in sound]
    return Profile(
        answers=len(sound),
        sessions=len(sessions),
        newest=sound[0][0],
        rates={kind: rate([one[4 + at] for one in sound]) for at, kind in enumerate(KINDS)},
        log_tokens=_mean(sessions.values(), lengths),
        signals=rate(unhappy),
        feedback=_mean(sessions.values(), told),
    )


def _mean(sessions: Iterable[Sequence[int]], values: Sequence[float | None]) -> MeanOf | None:
    held = ([found for at in ats if (found := values[at]) is not None] for ats in sessions)
    return _stored_mean(mean_of((len(some), sum(some)) for some in held))


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


def _stored_rate(rate: Rate) -> RateOf:
    return RateOf(
        n=rate.n,
        hits=rate.hits,
        weight=min(rate.weight, float(rate.n)),
        sessions=rate.sessions,
    )


def _stored_mean(mean: Mean | None) -> MeanOf | None:
    if mean is None:
        return None
    return MeanOf(n=mean.n, mean=mean.mean, error=mean.error, sessions=mean.sessions)
