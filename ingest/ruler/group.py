"""Judge one group. Outcome: scored, to be set aside, or unanswered (to be judged again).

This module uses no store: it returns the outcome and reports each call when it is answered, so
that a worker can write both together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingest.errors import (
    JudgeBusyError,
    JudgeRefusalError,
    JudgeReplyError,
    JudgeTooLongError,
    JudgeUnavailableError,
)
from ingest.privacy.judge_view import JudgeView, NotRedactedError
from ingest.records import Group
from ingest.ruler.judge import Judge
from ingest.ruler.material import UnreadableGroupError, read_material
from ingest.ruler.ruler import JudgeCall, Judgement, merge_identical, score_answers
from sidecar.settings import Judge as JudgeSettings

UNREADABLE = "unreadable"
IDENTICAL = "identical_answers"
REFUSED = "judge_refused"
TOO_LONG = "judge_too_long"
"""Longer than the judge's context, also without the oldest messages of the conversation."""
RUBBISH = "judge_rubbish"
NOT_REDACTED = "not_redacted"
"""The search for what the judge must not see failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """The group cannot be scored; nothing is learned from it."""

    reason: str
    detail: str
    asked: bool
    """True when the judge refused the group; False when the judge did not need to be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """The judge gave no usable answer; the cause is unknown, and the group is unchanged."""

    detail: str
    reason: str = JudgeUnavailableError.reason
    """Same values as `JudgeUnavailableError.reason`."""
    retry_after_s: float = 0.0
    """Pause that the judge asked for, in seconds."""


GroupOutcome = Scored | SetAside | Unanswered


async def judge_group(
    group: Group,
    judge: Judge,
    settings: JudgeSettings,
    *,
    seed: int,
    on_call: Callable[[JudgeCall], None],
    view: JudgeView | None = None,
) -> GroupOutcome:
    """Judge one group.

    seed: as for `score_answers`.
    on_call: receives every answered call, also of a group without scores.
    view: as for `score_answers`.
    """
    try:
        material = read_material(group)
    except UnreadableGroupError as error:
        return SetAside(reason=UNREADABLE, detail=str(error), asked=False)
    shown = settings.show_reasoning
    if len(merge_identical(material.answers, show_reasoning=shown)[0]) < 2:
        # Nothing to compare: the scores would be equal whatever the judge says.
        return SetAside(reason=IDENTICAL, detail=f"{len(group.answers)} answers", asked=False)
    try:
        judgement = await score_answers(
            judge,
            context=material.context,
            tools=material.tools,
            answers=material.answers,
            rubric=settings.rubric,
            passes=settings.passes,
            seed=seed,
            on_call=on_call,
            subject=group.group_id,
            view=view,
            show_reasoning=shown,
        )
    except NotRedactedError as error:
        return SetAside(reason=NOT_REDACTED, detail=str(error), asked=False)
    except JudgeUnavailableError as error:
        wait_s = error.retry_after_s if isinstance(error, JudgeBusyError) else 0.0
        return Unanswered(detail=str(error), reason=error.reason, retry_after_s=wait_s)
    except JudgeRefusalError as error:
        asked = not isinstance(error, JudgeTooLongError) or error.asked
        return SetAside(reason=refusal_of(error), detail=str(error), asked=asked)
    except JudgeReplyError as error:
        return SetAside(reason=RUBBISH, detail=str(error), asked=True)
    return Scored(judgement=judgement)


def refusal_of(error: JudgeUnavailableError | JudgeRefusalError) -> str:
    """Return the reason to set a group aside for which the judge gave no answer."""
    if isinstance(error, JudgeUnavailableError):
        return error.reason
    return TOO_LONG if isinstance(error, JudgeTooLongError) else REFUSED


def failure_of(outcome: GroupOutcome | None) -> str | None:
    """Return the reason why a judged group has no scores; None when it has."""
    if isinstance(outcome, Unanswered) or (isinstance(outcome, SetAside) and outcome.asked):
        return outcome.reason
    return None
