"""Judge one group. Outcome: scored, to be set aside, or unanswered (to be judged again).

This module uses no store: it returns the outcome and reports each call when it is answered, so
that a worker can write both together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from ingest.errors import (
    JudgeBusyError,
    JudgeRefusalError,
    JudgeReplyError,
    JudgeTooLongError,
    JudgeUnavailableError,
    JudgeWithheldError,
)
from ingest.privacy.texts import JudgeView, NotRedactedError
from ingest.records import Answer, Group, Rewarded, ScoredGroup
from ingest.ruler.judge import Judge, replies_kept_for
from ingest.ruler.prompt import UnreadableGroupError, read_material
from ingest.ruler.ruler import JudgeCall, Judgement, merge_identical, score_answers
from ingest.verifiers.rewarding import Rewarding, combine
from sidecar.settings import Judge as JudgeSettings
from sidecar.visible import counted

UNREADABLE = "unreadable"
IDENTICAL = "identical_answers"
REFUSED = "judge_refused"
TOO_LONG = "judge_too_long"
"""Longer than the judge's context, also without the oldest messages of the conversation."""
RUBBISH = "judge_rubbish"
NOT_REDACTED = "not_redacted"
"""The search for what the judge must not see failed."""
EVEN = 0.5
"""Score of answers that the judge need not be asked about: they look alike to it."""


SUBJECT = "probe"
"""Subject of the probe's calls in the store, in place of a group's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    judgement: Judgement
    rewarded: Rewarded | None = None
    """None: no verifier checked the group."""
    judged_by: tuple[str, str] | None = None
    """Judge model and rubric hash of scores that were there before; None: the present ones."""

    @property
    def asked(self) -> bool:
        """True when the judge was asked for these scores; kept replies tell nothing of it."""
        return any(not call.reply.cached for call in self.judgement.calls)


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
    until: float | None = None
    """The operator's limits withhold the judge until then (Unix seconds): nobody is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A verifier failed whose settings let the group wait; the judge was not asked."""

    detail: str


GroupOutcome = Scored | SetAside | Unanswered


async def verify_and_judge(
    group: Group,
    judge: Judge,
    settings: JudgeSettings,
    rewarding: Rewarding | None,
    *,
    seed: int,
    on_call: Callable[[JudgeCall], None],
    view: JudgeView | None = None,
    load_known: Callable[[str], ScoredGroup | None],
) -> GroupOutcome | Held:
    """Have a group verified, then judged, and make its rewards.

    rewarding: None: there are no verifiers, and the group is only judged.
    load_known: reads the scores of the judge that a group has already, from a best-of-N request.
    Other arguments as for `judge_group`. Raises: StoreError.
    """
    verified = known = None
    if rewarding is not None:
        verified = await rewarding.verify(group)
        known = await asyncio.to_thread(load_known, group.group_id)
    if verified is not None and verified.held:
        return Held(detail=verified.held)
    outcome: GroupOutcome
    if known is not None:
        judgement = Judgement(
            scores=known.scores, explanations=known.explanations, disagreement=None, calls=()
        )
        by = (known.judge_model, known.rubric_hash)
        outcome = Scored(judgement=judgement, judged_by=by)
    else:
        outcome = await judge_group(
            group,
            judge,
            settings,
            seed=seed,
            on_call=on_call,
            view=view,
            told_apart=verified is not None and verified.tells_apart,
        )
    if rewarding is None or verified is None or not isinstance(outcome, Scored):
        return outcome
    return replace(outcome, rewarded=combine(outcome.judgement.scores, verified.checked))


async def judge_group(
    group: Group,
    judge: Judge,
    settings: JudgeSettings,
    *,
    seed: int,
    on_call: Callable[[JudgeCall], None],
    view: JudgeView | None = None,
    told_apart: bool = False,
) -> GroupOutcome:
    """Judge one group.

    seed: as for `score_answers`.
    on_call: receives every answered call, also of a group without scores.
    view: as for `score_answers`.
    told_apart: verifiers tell answers apart that may look alike to the judge.
    """
    try:
        material = read_material(group)
    except UnreadableGroupError as error:
        return SetAside(reason=UNREADABLE, detail=str(error), asked=False)
    if len(merge_identical(material.answers)[0]) < 2:
        # Nothing to compare: the scores would be equal whatever the judge says.
        if told_apart:
            return Scored(judgement=_even(len(group.answers)))
        return SetAside(reason=IDENTICAL, detail=counted(len(group.answers), "answer"), asked=False)
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
        )
    except NotRedactedError as error:
        return SetAside(reason=NOT_REDACTED, detail=str(error), asked=False)
    except JudgeUnavailableError as error:
        wait_s = error.retry_after_s if isinstance(error, JudgeBusyError) else 0.0
        until = error.until if isinstance(error, JudgeWithheldError) else None
        return Unanswered(detail=str(error), reason=error.reason, retry_after_s=wait_s, until=until)
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


def _even(answers: int) -> Judgement:
    return Judgement(
        scores=(EVEN,) * answers,
        explanations=("the judge was not asked: the answers look alike to it",) * answers,
        disagreement=None,
        calls=(),
    )


def failure_of(outcome: GroupOutcome | None) -> str | None:
    """Return the reason why a judged group has no scores; None when it has."""
    if isinstance(outcome, Unanswered) or (isinstance(outcome, SetAside) and outcome.asked):
        return outcome.reason
    return None


# A probe: does the judge work at all? A group of our own choice, or one that was scored before.


async def ask_probe(
    judge: Judge,
    settings: JudgeSettings,
    *,
    seed: int,
    on_call: Callable[[JudgeCall], None],
    group: Group | None = None,
    view: JudgeView | None = None,
) -> GroupOutcome:
    """Send the probe, in one pass.

    group: a group that was scored before; None: the sum question.
    """
    one_pass = settings.model_copy(update={"passes": 1})
    with replies_kept_for(None):  # a kept reply would not tell whether the judge works
        return await judge_group(
            group or _sum(), judge, one_pass, seed=seed, on_call=on_call, view=view
        )


def _sum() -> Group:
    request = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
    answers = ("2 + 3 = 5", "2 + 3 = 6")
    return Group(
        group_id=SUBJECT,
        exchange_id=SUBJECT,
        session_key="",
        adapter="",
        request=json.dumps(request).encode(),
        prompt_token_ids=(),
        answers=tuple(
            Answer(
                index=index,
                origin="served",
                message=json.dumps({"role": "assistant", "content": text}).encode(),
            )
            for index, text in enumerate(answers)
        ),
    )
