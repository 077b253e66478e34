"""Groups in the store: save, load, claim with a lease, change their status, and their rewards.

A worker claims groups for a limited time; when it dies, its lease expires and another worker takes
them over. So a change of status happens only from the status that it starts in: of two workers that
both hold a group, the first to finish wins, and the other gets False. Each change is counted in
`counter` in the same transaction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from sqlalchemy import CursorResult, select, update
from sqlalchemy.orm import Session

from ingest.records import UNREADABLE, Answer, Disagreement, Group, Rewarded, ScoredGroup
from ingest.sessions.messages import Place
from sidecar.store.codec import FLOAT_BYTES, unpack_ids
from sidecar.store.contents import answer_place, keyring_of, load_contents
from sidecar.store.database import DAMAGE, count, insert_into
from sidecar.store.keyring import Keyring
from sidecar.store.mapping import RowMapping
from sidecar.store.models import AnswerRow, ExchangeRow, GroupRow

# The rewards of a scored group in the store, and what its verifiers found.

COLUMN = "checks"

T = TypeVar("T")


def keep_rewards(
    session: Session, group_id: str, answers: Sequence[AnswerRow], rewarded: Rewarded
) -> None:
    """Write the rewards of a group, in the caller's transaction.

    Raises: ValueError when there is not exactly one for each answer.
    """
    independent = rewarded.independent or (None,) * len(answers)
    rows = zip(answers, rewarded.rewards, independent, rewarded.checks, strict=True)
    for answer, reward, found, checks in rows:
        answer.reward = reward
        answer.independent_reward = found
        answer.checks = keyring_of(session).seal_text(
            json.dumps(list(checks)), answer_place(group_id, answer.index, COLUMN)
        )
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id)
        .values(reward_rule=json.dumps(dict(rewarded.rule)))
    )


def load_rewards(
    session: Session, row: GroupRow, answers: Sequence[AnswerRow], *, without: Collection[int] = ()
) -> Rewarded | None:
    """Read the rewards of a group; None when no verifier checked it.

    without: places of answers that are not read: their rewards are NaN.
    Raises: ValueError when they are damaged or do not decrypt.
    """
    rule = read_rule(row)
    if rule is None:
        return None
    read = [answer for place, answer in enumerate(answers) if place not in without]
    independent = [
        msgspec.convert(answer.independent_reward, float)
        for answer in read
        if answer.independent_reward is not None
    ]
    if len(independent) not in (0, len(read)):
        raise ValueError("some of its answers have an independent reward and some have none")
    rewards = (msgspec.convert(answer.reward, float) for answer in read)
    checks = (opened_checks(session, answer) for answer in read)
    return Rewarded(
        rewards=_in_place(rewards, len(answers), without, math.nan),
        independent=_in_place(independent, len(answers), without, math.nan) if independent else (),
        rule=rule,
        checks=_in_place(checks, len(answers), without, ()),
    )


def _in_place(found: Iterable[T], size: int, without: Collection[int], other: T) -> tuple[T, ...]:
    """Return [size] values: those found, in order, and `other` in the places that are not read."""
    rest = iter(found)
    return tuple(other if place in without else next(rest) for place in range(size))


def read_rule(row: GroupRow) -> dict[str, Any] | None:
    """Return how the rewards of a group were made; None: by the judge alone.

    Raises: ValueError when it is damaged.
    """
    if row.reward_rule is None:
        return None
    return msgspec.json.decode(row.reward_rule, type=dict[str, Any])


def opened_checks(session: Session, answer: AnswerRow) -> list[Mapping[str, Any]]:
    """Return what verifiers found of an answer. Raises: ValueError when it is damaged or does not
    decrypt."""
    place = answer_place(answer.group_id, answer.index, COLUMN)
    text = keyring_of(session).open_text(answer.checks or "", place)
    return msgspec.json.decode(text or "[]", type=list[Mapping[str, Any]])


SERVED = "served"
"""Counter rows: ("served", "trainable" or why it is masked) -> served answers of new groups."""
RETRIED = "judging_retried"
"""Counter rows: (this, reason for which a group was set aside before) -> groups judged anew."""
SAMPLING = "sampling"
SAMPLED = "sampled"
SCORED = "scored"
CLAIMED = "claimed"
SET_ASIDE = "set_aside"
DETAIL_CHARACTERS = 500
PENDING = (SAMPLING, SAMPLED)
"""Statuses of a group that is neither scored nor set aside yet."""
LEAST_ANSWERS = 2
"""Answers of a group that must be readable for its other ones to be left out."""
_ANSWER = RowMapping(Answer, AnswerRow)
_UNREAD = Answer(index=0, origin="sampled", message=b"", untrainable_reason=UNREADABLE)


def save_group(
    session: Session, group: Group, *, now: float, chosen: Mapping[str, object] | None = None
) -> bool:
    """Store a new group and its served answers, to be completed by sampling.

    chosen: columns that say why it was chosen (`Decision.chosen`).

    Returns: False when the exchange has a group already; then nothing changes.
    """
    statement = (
        insert_into(session, GroupRow)
        .on_conflict_do_nothing()
        .values(
            group_id=group.group_id,
            exchange_id=group.exchange_id,
            session_key=group.session_key,
            session_id=group.session_id or group.session_key,
            adapter=group.adapter,
            masked_by=group.masked_by,
            status=SAMPLING,
            sampling_attempts=0,
            attempts=0,
            lease_until=0.0,
            created_at=now,
            **(chosen or {}),
        )
    )
    if session.scalar(statement.returning(GroupRow.seq)) is None:
        return False
    _insert_answers(session, group.group_id, group.answers)
    for answer in group.answers:
        count(session, SERVED, answer.untrainable_reason or "trainable")
    return True


def load_group(session: Session, group_id: str, *, without: Collection[int] = ()) -> Group | None:
    """Read a group with its answers in order; None when there is none of this id.

    without: places of answers that are not read: they are empty, and masked (`UNREADABLE`).
    """
    statement = select(GroupRow, ExchangeRow.project).where(GroupRow.group_id == group_id)
    of_exchange = ExchangeRow.exchange_id == GroupRow.exchange_id
    found = session.execute(statement.join(ExchangeRow, of_exchange)).first()
    if found is None:
        return None
    row, project = found
    content = load_contents(session, [row.exchange_id])[row.exchange_id]
    keyring = keyring_of(session)
    return Group(
        group_id=row.group_id,
        exchange_id=row.exchange_id,
        session_key=row.session_key,
        session_id=row.session_id,
        project=project,
        adapter=row.adapter,
        masked_by=row.masked_by,
        request=content.request,
        prompt_token_ids=unpack_ids(content.prompt_ids),
        answers=tuple(
            replace(_UNREAD, index=place) if place in without else _answer(keyring, answer)
            for place, answer in enumerate(_answer_rows(session, group_id))
        ),
    )


def _answer(keyring: Keyring, row: AnswerRow) -> Answer:
    """Read an answer. Damaged log-probabilities cost only themselves: it is read without any, and
    the learner leaves it out."""
    without = {"logprobs": ()} if len(row.logprobs) % FLOAT_BYTES else {}
    return _ANSWER.open_record(row, partial(_open, keyring, row), **without)


def _why_unreadable(
    session: Session, row: GroupRow, answer: AnswerRow, *, independent: bool
) -> str | None:
    """Return why an answer of a scored group cannot be read; None when it can.

    independent: its siblings have an independent reward.
    """
    try:
        _answer(keyring_of(session), answer)
        opened_explanation(session, answer)
        rewarded = load_rewards(session, row, [answer])
    except DAMAGE as error:
        return f"{type(error).__name__}: {error}"
    lacks = independent and rewarded is not None and not rewarded.independent
    return "it has no independent reward, and its siblings have one" if lacks else None


def load_scored_group(
    session: Session, group_id: str, *, on_damage: Callable[[int, str], None] | None = None
) -> ScoredGroup | None:
    """Read a group and its scores; None when there is none of this id or it has no scores.

    on_damage: told the place of each answer that cannot be read, and why: it is masked, and a score
        that is no number is NaN. None: such a group cannot be read.
    Raises: one of `DAMAGE`; also where fewer than `LEAST_ANSWERS` answers can be read.
    """
    row = session.scalar(select(GroupRow).where(GroupRow.group_id == group_id))
    if row is None:
        return None
    answers = _answer_rows(session, group_id)
    scores = [answer.score for answer in answers if answer.score is not None]
    damaged: dict[int, str] = {}
    if on_damage is not None:
        scores = [math.nan if one.score is None else one.score for one in answers]
        independent = any(answer.independent_reward is not None for answer in answers)
        for place, answer in enumerate(answers):
            why = _why_unreadable(session, row, answer, independent=independent)
            if why is not None:
                damaged[place] = why
        if len(answers) - len(damaged) < LEAST_ANSWERS:
            damaged = {}
        for place, why in damaged.items():
            on_damage(place, why)
    group = load_group(session, group_id, without=damaged)
    if group is None or row.judge_model is None or row.rubric_hash is None:
        return None
    known = len(scores) - sum(map(math.isnan, scores))
    if len(scores) != len(answers) or (
        on_damage is not None and known < min(LEAST_ANSWERS, len(scores))
    ):
        return None
    return ScoredGroup(
        group=group,
        scores=tuple(scores),
        explanations=tuple(
            "" if place in damaged else opened_explanation(session, answer)
            for place, answer in enumerate(answers)
        ),
        judge_model=row.judge_model,
        rubric_hash=row.rubric_hash,
        passes=row.passes or 1,
        rewarded=load_rewards(session, row, answers, without=damaged),
    )


def claim_groups(
    session: Session, status: str, *, limit: int, now: float, lease_s: float
) -> list[str]:
    """Claim up to `limit` groups of a status, the oldest first, for `lease_s` seconds.

    Call it in a write transaction: SQLite's write lock keeps two workers from claiming the same
    group; PostgreSQL skips groups that another worker is claiming.
    Returns: their ids.
    """
    rows = session.scalars(
        select(GroupRow)
        .where(GroupRow.status == status, GroupRow.lease_until <= now)
        .order_by(GroupRow.seq)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    for row in rows:
        row.lease_until = now + lease_s
    session.flush()
    return [row.group_id for row in rows]


def release_group(session: Session, group_id: str, *, until: float = 0.0) -> None:
    """Give a claimed group back; no worker may claim it before `until` (unix seconds)."""
    session.execute(update(GroupRow).where(GroupRow.group_id == group_id).values(lease_until=until))


def append_answers(session: Session, group_id: str, answers: Sequence[Answer], *, size: int) -> int:
    """Append answers to a group in sampling, up to `size` answers in all.

    Each answer gets its place in the group as its index.
    Returns: how many were added; 0 when the group is no longer in sampling.
    """
    # Locked: two workers that hold one group must not give two answers the same index.
    status = select(GroupRow.status).where(GroupRow.group_id == group_id).with_for_update()
    if session.scalar(status) != SAMPLING:
        return 0
    held = len(_answer_rows(session, group_id))
    fitting = [
        replace(answer, index=held + place)
        for place, answer in enumerate(answers[: max(0, size - held)])
    ]
    _insert_answers(session, group_id, fitting)
    return len(fitting)


def retry_sampling(session: Session, group_id: str, *, until: float) -> None:
    """Give back a group whose round left candidates missing, and count the attempt."""
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id, GroupRow.status == SAMPLING)
        .values(sampling_attempts=GroupRow.sampling_attempts + 1, lease_until=until)
    )


def sampling_attempts(session: Session, group_id: str) -> int:
    """Read how many rounds of sampling left this group incomplete."""
    found = session.scalar(select(GroupRow.sampling_attempts).where(GroupRow.group_id == group_id))
    return found or 0


def mark_sampled(session: Session, group_id: str) -> bool:
    """sampling -> sampled: the answers are complete and wait for the judge."""
    return _step(session, group_id, SAMPLING, SAMPLED, stage="sampling", reason="sampled")


def set_aside(session: Session, group_id: str, reason: str, *, detail: str | None = None) -> bool:
    """sampling or sampled -> set_aside, with the reason; nothing will be learned from it.

    detail: the reason in words, such as the judge's own.
    """
    for status, stage in ((SAMPLING, "sampling"), (SAMPLED, "judging")):
        if _step(
            session, group_id, status, SET_ASIDE, stage=stage, reason=reason, row_reason=reason
        ):
            session.execute(
                update(GroupRow)
                .where(GroupRow.group_id == group_id)
                .values(detail=detail[:DETAIL_CHARACTERS] if detail else None)
            )
            return True
    return False


def retry_judging(session: Session, row: GroupRow) -> bool:
    """set_aside -> sampled, for a group that judging gave up: its failed attempts count no more.

    Its refused replies do: the judge gets another order of the answers than it had.
    """
    reason = row.reason or ""
    if not _step(session, row.group_id, SET_ASIDE, SAMPLED, stage=RETRIED, reason=reason):
        return False
    count(session, "judging", reason, -1)
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == row.group_id)
        .values(detail=None, judge_failures=None, judge_attempts=0)
    )
    return True


def mark_scored(
    session: Session,
    group_id: str,
    scores: Sequence[float],
    explanations: Sequence[str],
    judge_model: str,
    rubric_hash: str,
    now: float,
    disagreement: Disagreement | None = None,
    rewarded: Rewarded | None = None,
    *,
    passes: int = 0,
) -> bool:
    """sampled -> scored, with one score and explanation per answer, in the answers' order.

    disagreement: of the judge's passes; None when there was one pass. rewarded: None when no
        verifier checked the group. passes: those of the judge; 0: not known, or none.
    Raises: ValueError when there is not exactly one of each per answer.
    """
    answers = _answer_rows(session, group_id)
    apart = [None] * len(answers) if disagreement is None else disagreement.by_answer
    if not len(answers) == len(scores) == len(explanations) == len(apart):
        raise ValueError(
            f"group {group_id} has {len(answers)} answers, "
            f"got {len(scores)} scores and {len(explanations)} explanations"
        )
    if not _step(session, group_id, SAMPLED, SCORED, stage="judging", reason="scored"):
        return False
    for answer, score, explanation, far in zip(answers, scores, explanations, apart, strict=True):
        answer.disagreement = far
        _judged(session, answer, score, explanation)
    if rewarded is not None:
        keep_rewards(session, group_id, answers, rewarded)
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id)
        .values(
            scored_at=now,
            judge_model=judge_model,
            rubric_hash=rubric_hash,
            disagreement=disagreement and disagreement.mean,
            flipped_pairs=disagreement and disagreement.flipped,
            passes=passes or None,
            detail=None,
        )
    )
    session.flush()
    return True


def keep_scores(
    session: Session,
    group_id: str,
    scores: Sequence[float],
    explanations: Sequence[str],
    judge_model: str,
    rubric_hash: str,
) -> None:
    """Keep scores of the judge in a group that verifiers have still to check.

    Raises: ValueError when there is not exactly one of each per answer.
    """
    for answer, score, explanation in zip(
        _answer_rows(session, group_id), scores, explanations, strict=True
    ):
        _judged(session, answer, score, explanation)
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id)
        .values(judge_model=judge_model, rubric_hash=rubric_hash)
    )
    session.flush()


def _judged(session: Session, answer: AnswerRow, score: float, explanation: str) -> None:
    answer.score = score
    answer.explanation = keyring_of(session).seal_text(
        explanation, answer_place(answer.group_id, answer.index, "explanation")
    )


def _step(
    session: Session,
    group_id: str,
    before: str,
    after: str,
    *,
    stage: str,
    reason: str,
    row_reason: str | None = None,
) -> bool:
    result = session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id, GroupRow.status == before)
        .values(status=after, reason=row_reason, lease_until=0.0, judging_since=None)
    )
    if not isinstance(result, CursorResult) or result.rowcount != 1:
        return False
    count(session, stage, reason)
    return True


def _answer_rows(session: Session, group_id: str) -> Sequence[AnswerRow]:
    return session.scalars(
        select(AnswerRow).where(AnswerRow.group_id == group_id).order_by(AnswerRow.index)
    ).all()


def _insert_answers(session: Session, group_id: str, answers: Sequence[Answer]) -> None:
    if not answers:
        return
    keyring = keyring_of(session)
    rows = []
    for answer in answers:
        row = {**_ANSWER.to_row(answer), "group_id": group_id}
        if keyring:
            row = _ANSWER.sealed(row, answer, partial(_seal, keyring, group_id, answer.index))
        rows.append(row)
    session.execute(insert_into(session, AnswerRow), rows)


def _seal(
    keyring: Keyring, group_id: str, index: int, column: str, value: bytes, size: int
) -> bytes:
    return keyring.seal(value, answer_place(group_id, index, column), size=size)


def _open(keyring: Keyring, row: AnswerRow, column: str, value: bytes) -> bytes:
    return keyring.open(value, answer_place(row.group_id, row.index, column))


def opened_explanation(session: Session, row: AnswerRow) -> str:
    """Return the judge's explanation of an answer; empty: none. Raises: ValueError when it does not
    decrypt."""
    place = answer_place(row.group_id, row.index, "explanation")
    return keyring_of(session).open_text(row.explanation or "", place)


# The columns of a stored exchange that say where it stands in its session. Pure.


def place_columns(place: Place) -> dict[str, object]:
    """The columns of a place, by name."""
    return {
        "session_id": place.session,
        "parent_id": place.parent,
        "turn": place.turn,
        "branch": place.branch,
        "segment": place.segment,
        "placed_by": place.how,
        "shares_opening": place.shares_opening,
    }


def place_of(row: ExchangeRow) -> Place:
    """Read a row. An exchange that no tree has placed, of an older store, is the root of a session.

    Raises: msgspec.ValidationError when it says no known `How`.
    """
    columns = {
        "exchange_id": row.exchange_id,
        "session": row.session_id,
        "parent": row.parent_id,
        "turn": row.turn,
        "branch": row.branch,
        "segment": row.segment,
        "how": row.placed_by or "root",
        "held_out": row.held_out,
        "shares_opening": row.shares_opening,
    }
    return msgspec.convert(columns, Place)
