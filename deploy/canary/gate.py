"""The gate: candidate, champion and anchor answer a prompt and are judged blind in one group.

`advance` serves the gate, on held-out prompts; `shadow` goes on during the ramp, also on prompts of
users' sessions that began after the canary did, so the candidate was not trained on them. No user
sees these answers. Each call makes a few comparisons and stores each when it ends, so a
restarted process continues with the rest. While the judge or vLLM is unreachable, only the
reason is recorded.

Prompts are drawn in an order that is fixed before they are asked: no further one is drawn before
all that were drawn have ended, and `open_from` says which places may not be counted yet. So neither
the speed nor the failures of an answer decide when it counts.

A batch takes minutes, and another control may take the lease meanwhile (this machine slept, or was
cut off): it makes the same comparisons. So the lease is asked before each prompt is sampled and
before each pass of the judge.

A comparison without a usable answer is set aside and counted; so is a prompt that the judge fails
on repeatedly although it answers the probe. Then `fault` says whose answers were the cause.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from sqlalchemy.orm import Session

from deploy.canary import gate_store
from deploy.canary.exam import NoOutcomeError, TaskExam
from deploy.canary.gate_answers import (
    Answered,
    ArmFailedError,
    Drawing,
    FreshAnswers,
    NextAnswers,
    Prompts,
    as_rows,
    seed_of,
    storable_calls,
)
from deploy.canary.gate_store import HeldOutPrompt, Kept, comparison_id
from deploy.errors import LostLeaseError
from deploy.evidence.quality import Fault
from deploy.records import Canary
from deploy.registry import canaries
from deploy.registry.canary_rule import GateEvidence, judge_gate, mean_difference
from ingest.errors import (
    AWAY,
    JudgeBusyError,
    JudgeRefusalError,
    JudgeReplyError,
    JudgeTooLongError,
    JudgeUnavailableError,
    JudgeWithheldError,
    SamplingError,
)
from ingest.privacy.screen import Screen, default_screen
from ingest.privacy.texts import JudgeView, NotRedactedError
from ingest.ruler.calls import count_call, save_judge_calls
from ingest.ruler.group import (
    NOT_REDACTED,
    RUBBISH,
    SUBJECT,
    TOO_LONG,
    Scored,
    ask_probe,
    refusal_of,
)
from ingest.ruler.judge import Judge, replies_kept_for
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import SEED_BITS, JudgeCall, Judgement, score_answers
from ingest.store.listing import patiently
from ingest.vllm.sampler import Room, Sampler
from sidecar.backoff import Backoff
from sidecar.errors import StoreError
from sidecar.lines import Line
from sidecar.settings import Canary as CanarySettings, Judge as JudgeSettings
from sidecar.store.database import Database, count

# Keep what the gate has paid for until the store takes it.

log = structlog.get_logger()

SCORED = "scored"
LONGEST_KEPT_S = 3600.0
"""Longest time that a comparison is kept for a store that refuses it; then it is made again."""
STOP_GRACE_S = 15.0
"""Longest time that a stop of control waits for comparisons to be stored, as score does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of one comparison."""

    status: str
    """`scored`, or the reason for setting it aside."""
    answered: list[Answered]
    judgement: Judgement | None = None
    asked: bool = True
    """False when the judge was not asked."""
    fault: Fault | None = None
    """Whose answers kept the judge from scoring it; None when it is scored."""
    place: int = 0
    """Its number in the order of drawing."""
    calls: list[JudgeCall] = field(default_factory=list)


class Keeper:
    """Writes comparisons and judge calls of one gate."""

    def __init__(
        self,
        database: Database,
        *,
        screen: Screen,
        judge_model: str,
        judging: JudgeSettings,
        clock: Callable[[], float],
    ) -> None:
        """screen: the privacy policies by which answers are stored. judging: the settings of the
        gate's judge."""
        self._database = database
        self._screen = screen
        self._judge_model = judge_model
        self._judging = judging
        self._clock = clock
        self._storing: set[asyncio.Task[None]] = set()
        self._lost = 0
        """Paid calls that could not be stored, and are not counted yet."""

    async def keep(self, canary: Canary, prompt: HeldOutPrompt, ended: Ended) -> None:
        """Store a comparison; a cancelled caller does not end that.

        Raises: StoreError when the store refuses for `LONGEST_KEPT_S`.
        """
        task = asyncio.create_task(self._keep(canary, prompt, ended))
        self._storing.add(task)
        task.add_done_callback(self._forget)
        await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait for comparisons that the store has not taken yet, then give them up."""
        if not self._storing:
            return
        log.info("gate_stops_when_stored", comparisons=len(self._storing), longest_s=STOP_GRACE_S)
        _, late = await asyncio.wait(set(self._storing), timeout=STOP_GRACE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if late:
            log.error("gate_comparisons_lost", comparisons=len(late), why="control stops")

    async def keep_calls(self, subject: str, calls: Sequence[JudgeCall]) -> None:
        """Store calls that belong to no comparison, made with the default rubric.

        Raises: StoreError.
        """
        await asyncio.to_thread(self._save_calls, subject, calls)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._storing.discard(task)
        if not task.cancelled():
            task.exception()  # raised where it is awaited; a cancelled caller awaits it no more

    async def _keep(self, canary: Canary, prompt: HeldOutPrompt, ended: Ended) -> None:
        name, project = comparison_id(canary, prompt), prompt.project
        judgement = ended.judgement
        rows = await asyncio.to_thread(
            as_rows,
            ended.answered,
            judgement,
            screen=self._screen,
            project=project,
            request=prompt.request,
        )
        calls = await asyncio.to_thread(
            storable_calls, ended.calls, screen=self._screen, project=project
        )
        kept = Kept(
            status=ended.status,
            difference=difference_to(rows, "champion") if ended.status == SCORED else None,
            anchor_difference=difference_to(rows, "anchor") if ended.status == SCORED else None,
            fault=ended.fault,
            place=ended.place,
            answers=rows,
            judge_model=self._judge_of(ended),
            rubric_hash=self._hash_of(project) if ended.asked else None,
            disagreement=judgement.disagreement if judgement is not None else None,
        )

        def on_failure(error: StoreError, pause_s: float) -> None:
            log.warning(
                "gate_not_stored", comparison=name, error=str(error), again_in_s=round(pause_s, 1)
            )

        try:
            await patiently(
                lambda: self._save(canary, prompt, kept, calls),
                on_failure=on_failure,
                longest_s=LONGEST_KEPT_S,
            )
        except StoreError as error:
            self._lost += sum(not call.reply.cached for call in calls)
            log.error("gate_comparison_lost", comparison=name, calls=len(calls), error=str(error))
            raise

    def _judge_of(self, ended: Ended) -> str | None:
        """Return who judged: a fallback, when the first judge was away; None: nobody was asked."""
        if not ended.asked:
            return None
        return ended.judgement.judge_model if ended.judgement is not None else self._judge_model

    def _save(
        self, canary: Canary, prompt: HeldOutPrompt, kept: Kept, calls: Sequence[JudgeCall]
    ) -> None:
        name = comparison_id(canary, prompt)
        lost, self._lost = self._lost, 0

        def write(session: Session) -> None:
            count(session, "judge_calls", "lost", lost)
            if gate_store.save_comparison(session, canary, prompt, kept):
                self._add_calls(session, name, calls, self._hash_of(prompt.project))
                return
            for call in calls:  # the canary has ended, or the prompt is deleted: only counted
                count_call(session, call)

        try:
            self._database.repeat(write)
        except StoreError:
            self._lost += lost
            raise

    def _save_calls(self, subject: str, calls: Sequence[JudgeCall]) -> None:
        with self._database.write() as session:
            self._add_calls(session, subject, calls, hash_of(self._judging))

    def _hash_of(self, project: str) -> str:
        return hash_of(self._judging.of(project))

    def _add_calls(
        self, session: Session, subject: str, calls: Sequence[JudgeCall], rubric_hash: str
    ) -> None:
        save_judge_calls(session, subject, calls, rubric_hash=rubric_hash, now=self._clock())


def difference_to(rows: Sequence[Mapping[str, Any]], other: str) -> float | None:
    """Return the mean score of the candidate minus another arm's; None without its answers."""
    scores = {
        arm: [one["score"] for one in rows if one["arm"] == arm and one["score"] is not None]
        for arm in ("candidate", other)
    }
    if not scores[other]:
        return None
    return mean_difference(scores["candidate"], scores[other])


WAITS = Backoff(first_s=1.0, last_s=60.0)
"""Waits between attempts while the judge or vLLM is unreachable."""
ATTEMPTS = 3
"""Failed judge calls (while the judge answers the probe) after which a prompt is set aside."""
TRY_LATER = (*AWAY, JudgeBusyError, JudgeWithheldError, LostLeaseError)
"""Errors that concern no answer: retry later. The reconciler reloads a lost adapter; a budget that
is spent is renewed; another control may have the lease."""

_NO_SCORE = (JudgeUnavailableError, JudgeRefusalError, NotRedactedError, JudgeReplyError)
"""Errors by which the judge gives no score for some answers."""
SET_ASIDE: dict[type[Exception], str] = {
    SamplingError: "sampling_failed",
    NoOutcomeError: "no_outcome",
    NotRedactedError: NOT_REDACTED,
    JudgeReplyError: RUBBISH,
}
"""Errors that set a prompt aside at once -> its status."""
ARM_FAULT: dict[str, Fault] = {"candidate": "candidate", "champion": "champion"}
"""Arm whose answers vLLM fails to give -> whose fault it is; of another arm, nobody's."""


def status_of(error: Exception) -> str:
    """Return the status of a prompt that one of the errors of `SET_ASIDE` sets aside."""
    return next(name for kind, name in SET_ASIDE.items() if isinstance(error, kind))


async def score_prompt(
    judge: Judge,
    canary: Canary,
    prompt: HeldOutPrompt,
    answered: Sequence[Answered],
    *,
    judging: JudgeSettings,
    view: JudgeView | None,
    on_call: Callable[[JudgeCall], None],
    part: str = "",
) -> Judgement:
    """Have the answers to a prompt scored blind, by its project's rubric. part: names the subset of
    the answers, when it is one. Raises: as `score_answers`."""
    return await score_answers(
        judge,
        context=prompt.request["messages"],
        tools=prompt.request.get("tools") or (),
        answers=[one.message for one in answered],
        rubric=judging.of(prompt.project).rubric,
        passes=judging.passes,
        seed=seed_of(canary, f"judge\x00{prompt.exchange_id}{part}"),
        on_call=on_call,
        subject=comparison_id(canary, prompt),
        view=view,
    )


async def fault_of(
    answered: Sequence[Answered],
    score: Callable[[list[Answered], str], Awaitable[object]],
    probe: Callable[[], Awaitable[str | None]],
) -> Fault:
    """Find whose answers kept the judge from scoring a group: it is asked again without the
    candidate's and without the champion's. One of both must work, and the other must not.

    score: scores some answers; its second argument names that part. probe: says why the judge does
    not work, or None. Raises: LostLeaseError.
    """
    works = {}
    for arm in ("candidate", "champion") if answered else ():
        try:
            await score([one for one in answered if one.arm != arm], f"\x00without {arm}")
            works[arm] = True
        except LostLeaseError:
            raise
        except TRY_LATER:
            return "unknown"
        except _NO_SCORE:
            works[arm] = False
    if works.get("candidate") == works.get("champion") or await probe() is not None:
        return "unknown"
    return "candidate" if works["candidate"] else "champion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjudged:
    """A comparison without a usable answer of the judge; the prompt or the judge is at fault."""

    prompt: HeldOutPrompt
    answered: list[Answered]
    reason: str
    detail: str
    final: bool
    """True when the judge refuses the prompt for good: no further attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Time of the next attempt after an outage. Kept in memory: a restart may retry at once."""

    at: float = 0.0
    wait_s: float = 0.0
    reason: str = ""

    def later(self, now: float, reason: str) -> Retry:
        """Return the wait after one more failure: twice the last one, up to a limit."""
        wait_s = WAITS.after_s(self.wait_s)
        return Retry(at=now + wait_s, wait_s=wait_s, reason=reason)


class Gate:
    """Compares a candidate with its champion. One for each line of adapters."""

    def __init__(
        self,
        *,
        database: Database,
        sampler: Sampler,
        judge: Judge,
        rules: CanarySettings,
        judging: JudgeSettings,
        room: Room,
        parallel: int,
        clock: Callable[[], float] = time.time,
        view: JudgeView | None = None,
        screen: Screen | None = None,
        judge_gives_reward: bool = False,
        exam: TaskExam | None = None,
        line: Line,
        acts: Callable[[], bool] = lambda: True,
    ) -> None:
        """line: of the canaries. acts: False once another control may act.
        judging: the settings of the gate's judge; each prompt is judged by its project's rubric.
        parallel: comparisons made at once, each with up to 3 `gate_answers` requests in flight.
        view: as for `score_answers`. screen: the privacy policies by which answers are stored;
        None: the default one. judge_gives_reward: the judge also scores the groups that are learned
        from. exam: compares by whole tasks, and the judge is not asked."""
        self._acts = acts
        self._view = view
        self._judge_gives_reward = judge_gives_reward
        self._keeper = Keeper(
            database,
            screen=screen or default_screen(),
            judge_model=judge.model,
            judging=judging,
            clock=clock,
        )
        self._database = database
        self._exam = exam
        ask = NextAnswers(sampler, rules).ask if exam is None else exam.ask
        self._answers = FreshAnswers(ask, rules)
        self._room = room
        self._judge = judge
        self._rules = rules
        self._judging = judging
        self._parallel = parallel if exam is None else 1
        self._clock = clock
        self._retry = Retry()
        self._drawing = Drawing(
            database,
            rules,
            parallel=self._parallel,
            clock=clock,
            line=line,
            whole_tasks=exam is not None,
        )
        self._attempts: Counter[str] = Counter()
        """Failed attempts by comparison id, in memory: a restart counts from zero."""
        self._calls: dict[str, list[JudgeCall]] = {}
        """Answered calls by comparison id, also of attempts that failed: they are paid for."""

    async def advance(self, canary: Canary) -> GateEvidence:
        """Make up to `parallel` comparisons of the gate, then sum up all comparisons.

        Raises: LostLeaseError when another control may decide by now.
        """
        prompts = await asyncio.to_thread(self._drawing.for_gate, canary)
        away: str | None = None
        if prompts.sessions >= self._rules.gate_min_prompts:
            away = await self._make(canary, prompts)
        self._check_lease()
        return await asyncio.to_thread(self._evidence, canary, away)

    async def shadow(self, canary: Canary) -> None:
        """Make up to `parallel` comparisons of the ramp, at the rate of `groups_per_hour`."""
        prompts = await asyncio.to_thread(self._drawing.for_shadow, canary)
        await self._make(canary, prompts)

    def away(self, canary: Canary) -> str | None:
        """Return why comparisons cannot be made now; None: they can, or nobody tried."""
        return self._retry.reason or None if self._drawing.is_for(canary) else None

    def open_from(self, canary: Canary) -> int:
        """Return the first place that may not be counted yet. Reads the store, in a transaction of
        its own: read what is counted in a later one."""
        return self._drawing.open_from(canary)

    async def settle(self) -> None:
        """Wait, as long as a stop may take, for what the store has not taken yet."""
        if self._exam is not None:
            await self._exam.close()
        await self._keeper.settle()

    async def _make(self, canary: Canary, prompts: Prompts) -> str | None:
        """Make a batch of comparisons. Returns: why they cannot be made now, or None."""
        due = self._drawing.draw(canary, prompts)
        if not due:
            return None
        if not self._judge.model and self._exam is None:
            return "no judge is set: name one in judge.model"
        if self._clock() < self._retry.at:
            return self._retry.reason
        try:
            if not await self._room.is_open():
                return "vLLM is busy with users"
        except SamplingError as error:
            return self._wait(canary, str(error))
        # After an outage, a single comparison tests whether it is over.
        batch = due[: 1 if self._retry.reason else self._parallel]
        ends = await asyncio.gather(*(self._compare(canary, one.prompt) for one in batch))
        unjudged = [end for end in ends if isinstance(end, Unjudged)]
        away = next((end for end in ends if isinstance(end, str)), None)
        if unjudged and away is None:
            away = await self._probe()
        if away is not None:
            return self._wait(canary, away)
        for one in unjudged:
            await self._count_attempt(canary, one)
        self._retry = Retry()
        return None

    async def _probe(self) -> str | None:
        """Ask the judge an unrelated question. Returns: why it does not work, or None."""
        calls: list[JudgeCall] = []
        outcome = await ask_probe(
            self._judge,
            self._judging,
            seed=secrets.randbits(SEED_BITS),
            on_call=calls.append,
            view=self._view,
        )
        await self._keeper.keep_calls(SUBJECT, calls)
        return None if isinstance(outcome, Scored) else outcome.detail

    async def _count_attempt(self, canary: Canary, one: Unjudged) -> None:
        """Count a failure against the prompt, since the judge works; set it aside after a few."""
        name = comparison_id(canary, one.prompt)
        self._attempts[name] += 1
        if not one.final and self._attempts[name] < ATTEMPTS:
            return
        del self._attempts[name]
        log.warning(
            "gate_set_aside", exchange=one.prompt.exchange_id, status=one.reason, reason=one.detail
        )
        fault = await self._fault(canary, one.prompt, one.answered)
        ended = Ended(status=one.reason, answered=one.answered, fault=fault)
        await self._keep(canary, one.prompt, ended)

    def _wait(self, canary: Canary, reason: str) -> str:
        self._retry = self._retry.later(self._clock(), reason)
        log.warning("gate_waits", canary=canary.canary_id, reason=reason)
        return reason

    def _evidence(self, canary: Canary, away: str | None) -> GateEvidence:
        prompts = self._drawing.for_gate(canary)
        with self._database.read() as session:
            made = gate_store.comparisons(session, canary.canary_id)
        return GateEvidence(
            prompts=prompts.sessions,
            pending=len(prompts.missing),
            verdict=judge_gate(made, self._rules, seed=seed_of(canary, "bootstrap")),
            quality=prompts.quality,
            away=away,
            judge_gives_reward=self._judge_gives_reward,
        )

    async def _compare(self, canary: Canary, prompt: HeldOutPrompt) -> Unjudged | str | None:
        """Make and store one comparison.

        Returns: None when it is stored; the reason why it cannot be made yet; or `Unjudged` when
        the judge gave no usable answer.
        """
        answered: list[Answered] = []
        if not prompt.request:
            log.warning("gate_set_aside", exchange=prompt.exchange_id, status="unreadable")
            unread = Ended(status="unreadable", answered=answered, asked=False, fault="unknown")
            await self._keep(canary, prompt, unread)
            return None
        status = SCORED
        judgement: Judgement | None = None
        fault: Fault | None = None
        try:
            self._check_lease()
            answered = await self._answers.get(canary, prompt)
            judgement = await self._score(canary, prompt, answered)
        except TRY_LATER as error:
            return str(error)
        except (JudgeUnavailableError, JudgeRefusalError) as error:
            if not isinstance(error, JudgeTooLongError) or error.asked:
                return Unjudged(
                    prompt=prompt,
                    answered=answered,
                    reason=refusal_of(error),
                    detail=str(error),
                    final=isinstance(error, JudgeRefusalError),
                )
            status = TOO_LONG
            log.warning("gate_set_aside", exchange=prompt.exchange_id, reason=str(error))
        except tuple(SET_ASIDE) as error:
            status = status_of(error)
            if isinstance(error, ArmFailedError):
                fault = ARM_FAULT.get(error.arm)
            elif isinstance(error, NoOutcomeError):
                fault = "unknown"
            log.warning("gate_set_aside", exchange=prompt.exchange_id, reason=str(error))
        if status != SCORED and fault is None:
            fault = await self._fault(canary, prompt, answered)
        unasked = ("sampling_failed", NOT_REDACTED, TOO_LONG)
        asked = self._exam is None and status not in unasked
        ended = Ended(
            status=status, answered=answered, judgement=judgement, asked=asked, fault=fault
        )
        await self._keep(canary, prompt, ended)
        return None

    async def _score(
        self, canary: Canary, prompt: HeldOutPrompt, answered: list[Answered], *, part: str = ""
    ) -> Judgement:
        """Ask the judge. part: names the subset of the answers, when it is one.

        Raises: LostLeaseError before a call that another control may make; NoOutcomeError; as
            `score_answers`.
        """
        if self._exam is not None:
            return self._exam.judge(answered)
        calls = self._calls.setdefault(comparison_id(canary, prompt), [])
        passes, known = self._judging.passes, len(calls)

        def note(call: JudgeCall) -> None:
            calls.append(call)
            if sum(one.ok for one in calls[known:]) < passes:  # another call follows
                self._check_lease()

        self._check_lease()
        with replies_kept_for(prompt.exchange_id):
            return await score_prompt(
                self._judge,
                canary,
                prompt,
                answered,
                judging=self._judging,
                view=self._view,
                on_call=note,
                part=part,
            )

    async def _fault(
        self, canary: Canary, prompt: HeldOutPrompt, answered: list[Answered]
    ) -> Fault:
        if self._exam is not None or self._rules.promote_on == "quick":
            return "unknown"
        return await fault_of(
            answered, lambda rest, part: self._score(canary, prompt, rest, part=part), self._probe
        )

    def _check_lease(self) -> None:
        if not self._acts():
            raise LostLeaseError("this control lost its lease: another one makes the comparisons")

    async def _keep(self, canary: Canary, prompt: HeldOutPrompt, ended: Ended) -> None:
        """Store the end of a comparison with all calls that were made for it."""
        name = comparison_id(canary, prompt)
        calls, place = list(self._calls.get(name, ())), self._drawing.place_of(name)
        ended = replace(ended, calls=calls, place=place)
        await self._keeper.keep(canary, prompt, ended)
        self._answers.forget(canary, prompt)
        self._calls.pop(name, None)
        self._drawing.end(name)


# The loop that judges further prompts during a ramp, beside the controller's.

EVERY_S = 2.0
"""Interval between two batches, when there is anything to compare."""


class Shadow:
    """Feeds the evidence of the canary that is ramping. One for each line of adapters."""

    def __init__(self, database: Database, gate: Gate, model: str) -> None:
        self._database = database
        self._gate = gate
        self._model = model

    async def tick(self) -> None:
        """Make one batch of comparisons, if a canary is ramping. Raises: StoreError."""
        canary = await asyncio.to_thread(self._ramping)
        if canary is not None:
            await self._gate.shadow(canary)

    def _ramping(self) -> Canary | None:
        with self._database.read() as session:
            canary = canaries.active(session, self._model)
        if canary is None or canary.phase != "ramping" or canary.paused:
            return None
        return canary
