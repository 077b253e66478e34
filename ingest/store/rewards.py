"""The rewards of a scored group in the store, and what its verifiers found.

What a verifier says of an answer may quote it, so it is encrypted when the store has a key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import update
from sqlalchemy.orm import Session

from ingest.records import Rewarded
from sidecar.store.contents import answer_place, keyring_of
from sidecar.store.database import DAMAGE
from sidecar.store.models import AnswerRow, GroupRow

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


def unreadable(
    session: Session,
    row: GroupRow,
    answers: Sequence[AnswerRow],
    read: Callable[[AnswerRow], None],
) -> dict[int, str]:
    """Return why answers of a scored group cannot be read, by their places.

    read: reads an answer but for its rewards. Raises: one of `DAMAGE`.
    """
    found: dict[int, str] = {}
    independent = any(answer.independent_reward is not None for answer in answers)
    for place, answer in enumerate(answers):
        try:
            read(answer)
            rewarded = load_rewards(session, row, [answer])
        except DAMAGE as error:
            found[place] = f"{type(error).__name__}: {error}"
        else:
            if independent and rewarded is not None and not rewarded.independent:
                found[place] = "it has no independent reward, and its siblings have one"
    return found


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
