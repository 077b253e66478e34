"""Replay: an adapter and the champion answer recorded prompts again, and are judged blind.

A replay asks what the gate asks (`deploy.canary.gate`), of any adapter at any time, and decides
nothing: no user meets the adapter, and neither an answer nor a judge's reply is stored. Its prompts
are of held-out sessions, from which nothing is learned. The evidence is that of the canary's judged
groups, read in the order in which the prompts were drawn.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from statistics import fmean
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.canary import gate_store
from deploy.canary.gate import (
    ARM_FAULT,
    ATTEMPTS,
    SET_ASIDE,
    TRY_LATER,
    WAITS,
    difference_to,
    fault_of,
    score_prompt,
    status_of,
)
from deploy.canary.gate_answers import Answered, ArmFailedError, FreshAnswers, NextAnswers, seed_of
from deploy.canary.gate_store import HeldOutPrompt
from deploy.errors import DeployError, EngineError
from deploy.evidence.progress import Estimate, Kind, counts_as, difference_words, estimate, kinds_of
from deploy.evidence.quality import Quality
from deploy.records import Canary, version_of
from deploy.registry import proof_rule
from deploy.registry.canary_rule import Comparison, quality_of
from ingest.errors import (
    JudgeNoCreditError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeUnavailableError,
    JudgeWithheldError,
    SamplingError,
)
from ingest.privacy.texts import JudgeView
from ingest.ruler.group import Scored, ask_probe, refusal_of
from ingest.ruler.judge import Judge
from ingest.ruler.ruler import SEED_BITS, JudgeCall, Judgement
from ingest.vllm.sampler import Room, Sampler
from sidecar.lines import Line
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings, Judge as JudgeSettings
from sidecar.store.models import ExchangeRow
from sidecar.visible import counted

log = structlog.get_logger()

HOURS = 4
"""Hours of a day (UTC) that are shown together."""
GIVE_UP_AFTER = 10
"""Prompts in a row that say nothing after which a replay ends."""
REFUSES_ALL = (JudgeRejectedError.reason, JudgeNoCreditError.reason)
"""Why a judge may refuse the probe: that does not pass by itself."""
LONGEST_AWAY_S = 600.0
"""How long a replay waits for vLLM, users' load or the judge until it ends with what it has."""
Load = Callable[[], Awaitable[None]]
"""Loads the candidate into the vLLMs that lack it. Raises: EngineError."""


class ReplayError(DeployError):
    """A replay cannot be made, or not be made further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One recorded request that is asked again."""

    held_out: HeldOutPrompt
    turn: int
    asked_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replay found."""

    candidate: str
    champion: str
    since: float
    """Unix seconds of the oldest prompt that may be drawn."""
    judge: str
    prompts: int
    """Prompts that were asked."""
    verdict: str
    """`worse`, `better`, `no worse` (each proven at its level of the canary) or `undecided`."""
    why: str
    difference: Estimate | None
    """Candidate minus champion, with the lost ones; None: nothing was scored. The interval has two
    sides and a verdict has one, so either may exclude 0 before the other does."""
    lost: int
    """Comparisons that count as -1, because the candidate's answers could not be scored."""
    champion_lost: int
    """Comparisons that count as +1, because the champion's could not. They are no merit of the
    candidate: they count against `worse` alone."""
    flaws: Mapping[str, float]
    """Kind of flaw -> the candidate's share of such answers minus the champion's, in the mean."""
    kinds: Sequence[Kind]
    """The difference of openings and later turns, and of projects; empty where there is one."""
    hours: Sequence[Kind]
    """The difference by the hour of the day (UTC) of the recorded request."""
    set_aside: Mapping[str, int]
    """Why prompts were not scored -> how many."""
    judge_calls: int
    judge_tokens: int
    judge_usd: float | None
    """None: of some calls no price is known."""
    stopped: str = ""
    """Why it ended before all prompts were asked; empty: it did not."""


def draw(
    session: Session, line: Line, *, trial: Canary, since: float, now: float, limit: int
) -> list[Prompt]:
    """Draw a turn of each of the newest held-out sessions in a span of time, in random order.

    Sessions that have ended come first, as at the gate. Of sessions in which the candidate
    answered the first turn is taken, which has none of its words, where the others do not suffice.
    since, now: Unix seconds. limit: most prompts.
    """
    found: list[HeldOutPrompt] = []
    settled, own = now - gate_store.SETTLED_S, None if trial.candidate == BASE else trial.candidate
    for until, without, first in ((settled, own, False), (None, own, False), (None, None, True)):
        found += gate_store.held_out_prompts(
            session,
            line,
            limit=limit - len(found),
            known={one.session_id for one in found},
            without=without,
            salt=trial.salt,
            until=until,
            since=since,
            first=first,
        )
        if len(found) == limit:
            break
    row = ExchangeRow
    ids = [one.exchange_id for one in found]
    asked = session.execute(
        select(row.exchange_id, row.turn, row.started_at).where(row.exchange_id.in_(ids))
    )
    facts = {name: (turn, at) for name, turn, at in asked}
    drawn = [
        Prompt(held_out=one, turn=facts[one.exchange_id][0], asked_at=facts[one.exchange_id][1])
        for one in found
    ]
    random.Random(seed_of(trial, "replay")).shuffle(drawn)
    return drawn


class Replay:
    """Asks prompts of one candidate and its champion."""

    def __init__(
        self,
        trial: Canary,
        *,
        sampler: Sampler,
        room: Room,
        judge: Judge,
        rules: CanarySettings,
        judging: JudgeSettings,
        view: JudgeView,
        parallel: int,
        load: Load,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """judging: the settings of the gate's judge. parallel: comparisons at once. load: loads the
        candidate where it is not loaded; called again after vLLM was away. sleep: for tests."""
        # It ends at a number of prompts, so nothing is decided by the mean alone.
        self._rules = rules.model_copy(update={"promote_on": "no_worse"})
        self._trial = trial
        self._room = room
        self._judge = judge
        self._judging = judging
        self._view = view
        self._parallel = parallel
        self._load = load
        self._sleep = sleep
        self._answers = FreshAnswers(NextAnswers(sampler, self._rules).ask, self._rules)
        self._limits = proof_rule.limits_of(self._rules)
        self._quality = Quality()
        self._made: list[tuple[Prompt, Comparison]] = []
        self._set_aside: Counter[str] = Counter()
        self._calls: list[JudgeCall] = []
        self._stopped = ""

    async def run(self, prompts: Sequence[Prompt], progress: Callable[[int], None]) -> None:
        """Ask the prompts, until all are asked or harm is proven. progress: takes how many are,
        after each batch. What was found until it is cancelled stays in `report`."""
        for start in range(0, len(prompts), self._parallel):
            batch = prompts[start : start + self._parallel]
            asking = [asyncio.ensure_future(self._compare(one.held_out)) for one in batch]
            interrupted: asyncio.CancelledError | None = None
            try:
                await asyncio.wait(asking, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError as cancelled:
                interrupted = cancelled
            for one in asking:  # what one of them raises ends all of them
                one.cancel()
            found = await asyncio.gather(*asking, return_exceptions=True)
            error = next((one for one in found if isinstance(one, Exception)), None)
            ends: list[Comparison] = []
            for prompt, made in zip(batch, found, strict=True):
                if isinstance(made, BaseException):
                    continue
                end, why = made
                ends.append(end)
                self._made.append((prompt, end))
                if why:
                    self._set_aside[why] += 1
            self._quality = quality_of(ends, self._limits, anchored=False, start=self._quality)
            progress(len(self._made))
            if interrupted is not None:
                self._stopped = "it was interrupted"
                raise interrupted
            if isinstance(error, ReplayError):
                self._stopped = str(error)
                return
            if error is not None:
                self._stopped = f"{type(error).__name__}: {error}"
                log.error("replay_failed", exc_info=error)
                return
            left = len(prompts) - len(self._made)
            if left and proof_rule.harm(self._quality) is not None:
                self._stopped = f"it is proven worse: {counted(left, 'prompt')} not asked"
                return
            newest = self._made[-GIVE_UP_AFTER:]
            if len(newest) == GIVE_UP_AFTER and not any(
                counts_as(end.difference, end.fault) is not None for _, end in newest
            ):
                why = ", ".join(sorted(self._set_aside))
                self._stopped = f"none of {GIVE_UP_AFTER} prompts in a row could be scored ({why})"
                return

    def report(self, *, since: float) -> Report:
        """Sum up what was asked so far."""
        values = [
            (one, value)
            for one, end in self._made
            if (value := counts_as(end.difference, end.fault)) is not None
        ]
        kinds = [(_turn(one), value) for one, value in values]
        projects = [(f"project {one.held_out.project}", value) for one, value in values]
        verdict, why = verdict_of(self._quality, self._rules)
        costs = [call.reply.cost_usd for call in self._calls]
        return Report(
            candidate=self._trial.candidate,
            champion=self._trial.champion,
            since=since,
            judge=self._judge.model,
            prompts=len(self._made),
            verdict=verdict,
            why=why,
            difference=estimate(tuple(value for _, value in values)),
            lost=self._quality.lost,
            champion_lost=self._quality.champion_lost,
            flaws=_mean_flaws(end for _, end in self._made),
            kinds=(*kinds_of(kinds), *kinds_of(projects)),
            hours=kinds_of([(_hours(one.asked_at), value) for one, value in values], least=1),
            set_aside=dict(self._set_aside),
            judge_calls=len(self._calls),
            judge_tokens=sum(
                (call.reply.prompt_tokens or 0) + (call.reply.completion_tokens or 0)
                for call in self._calls
            ),
            judge_usd=sum(cost for cost in costs if cost is not None)
            if all(cost is not None for cost in costs)
            else None,
            stopped=self._stopped,
        )

    async def _compare(self, prompt: HeldOutPrompt) -> tuple[Comparison, str]:
        """Ask one prompt; wait while vLLM or the judge is away or users need the capacity.

        Returns: its result, and why it was not scored (empty: it was).
        Raises: ReplayError after `LONGEST_AWAY_S`.
        """
        waited_s = wait_s = 0.0
        failed = 0
        while True:
            began = time.monotonic()
            try:
                if await self._room.is_open():
                    return await self._ask(prompt)
                why = "users need the capacity of every vLLM"
            except JudgeWithheldError as error:
                if error.until - time.time() > LONGEST_AWAY_S:
                    raise ReplayError(str(error)) from error
                why = str(error)
            except (*TRY_LATER, SamplingError) as error:  # also of `is_open`
                why = str(error)
            except JudgeUnavailableError as error:
                failed += 1
                away = await self._probe()
                if away is None and failed == ATTEMPTS:
                    return await self._unscored(prompt, refusal_of(error))
                why = away or str(error)
            if wait_s:  # the first try was none in vain: its answers are kept
                waited_s += time.monotonic() - began
            if waited_s >= LONGEST_AWAY_S:
                raise ReplayError(f"waited {waited_s:.0f} s: {why}")
            wait_s = WAITS.after_s(wait_s)
            log.info("replay_waits", reason=why, wait_s=wait_s)
            await self._sleep(wait_s)
            waited_s += wait_s
            try:
                with suppress(EngineError):  # vLLM is away; the next try says so
                    await self._load()
            except (DeployError, OSError) as error:
                raise ReplayError(f"the candidate cannot be loaded any more: {error}") from error

    async def _probe(self) -> str | None:
        """Ask the judge an unrelated question. Returns: why it does not work, or None.

        Raises: ReplayError when it refuses that too: a wrong key or model, or no credit.
        """
        outcome = await ask_probe(
            self._judge,
            self._judging,
            seed=secrets.randbits(SEED_BITS),
            on_call=self._calls.append,
            view=self._view,
        )
        if isinstance(outcome, Scored):
            return None
        if outcome.reason in REFUSES_ALL:
            raise ReplayError(f"the judge refuses every question: {outcome.detail}")
        return outcome.detail

    async def _ask(self, prompt: HeldOutPrompt) -> tuple[Comparison, str]:
        if not prompt.request:
            return Comparison(difference=None, fault="unknown"), "unreadable"
        try:
            answered = await self._answers.get(self._trial, prompt)
            judged = await self._score(prompt, answered)
        except TRY_LATER:
            raise
        except ArmFailedError as error:
            fault = ARM_FAULT[error.arm]
            return Comparison(difference=None, fault=fault), f"{status_of(error)}_{fault}"
        except SamplingError as error:
            return Comparison(difference=None, fault="unknown"), status_of(error)
        except JudgeRefusalError as error:
            return await self._unscored(prompt, refusal_of(error))
        except tuple(SET_ASIDE) as error:
            return await self._unscored(prompt, status_of(error))
        self._answers.forget(self._trial, prompt)
        return _compared(answered, judged.scores, prompt.request), ""

    async def _score(
        self, prompt: HeldOutPrompt, answered: Sequence[Answered], part: str = ""
    ) -> Judgement:
        return await score_prompt(
            self._judge,
            self._trial,
            prompt,
            answered,
            judging=self._judging,
            view=self._view,
            on_call=self._calls.append,
            part=part,
        )

    async def _unscored(self, prompt: HeldOutPrompt, why: str) -> tuple[Comparison, str]:
        """Find out whose answers the judge did not score: that counts as at the gate."""
        answered = await self._answers.get(self._trial, prompt)
        fault = await fault_of(answered, partial(self._score, prompt), self._probe)
        self._answers.forget(self._trial, prompt)
        unscored = _compared(answered, [None] * len(answered), prompt.request)
        return replace(unscored, fault=fault), why


def _compared(
    answered: Sequence[Answered], scores: Sequence[float | None], request: Mapping[str, Any]
) -> Comparison:
    rows = [
        {
            "arm": one.arm,
            "score": score,
            "flaws": gate_store.flaws_of(one.message, one.finish_reason, request),
            "nats": one.nats,
            "tokens": one.tokens,
        }
        for one, score in zip(answered, scores, strict=True)
    ]
    return Comparison(difference=difference_to(rows, "champion"), flaws=gate_store.excess_of(rows))


def verdict_of(quality: Quality, rules: CanarySettings) -> tuple[str, str]:
    """Return the verdict of a report and its reason, by the canary's levels."""
    if (harm := proof_rule.harm(quality)) is not None:
        return "worse", harm
    doubt = proof_rule.gate_doubt(quality, rules) or proof_rule.lacking(quality, frozenset(), rules)
    if doubt is not None:
        return "undecided", doubt
    claims = proof_rule.proven(quality, rules)
    verdict, claim = ("better", "better") if "better" in claims else ("no worse", "no_worse")
    peak = getattr(quality, claim).peak
    return verdict, f"evidence {proof_rule.odds(peak)}, {1 / proof_rule.PROMOTE_LEVEL:g} is needed"


def _turn(one: Prompt) -> str:
    return "later turns" if one.turn else "openings"


def _hours(at: float) -> str:
    first = datetime.fromtimestamp(at, UTC).hour // HOURS * HOURS
    return f"{first:02d}-{first + HOURS:02d} h"


def _mean_flaws(made: Iterable[Comparison]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for one in made:
        for kind, share in one.flaws.items():
            found.setdefault(kind, []).append(share)
    return {kind: fmean(shares) for kind, shares in sorted(found.items())}


def lines_of(report: Report) -> list[str]:
    """Return the report in lines."""
    ours, theirs = version_of(report.candidate), version_of(report.champion)
    since = datetime.fromtimestamp(report.since, UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        f"{ours} against {theirs}: {counted(report.prompts, 'held-out prompt')} since {since}, "
        f"judged by {report.judge}",
        f"verdict: {report.verdict} ({report.why})",
    ]
    if report.stopped:
        lines.append(f"ended early: {report.stopped}")
    if report.difference is not None:
        lines.append(f"{ours} {difference_words(report.difference, theirs)}")
    for lost, name, value in ((report.lost, ours, "-1"), (report.champion_lost, theirs, "+1")):
        if lost:
            lines.append(f"of these {lost} count as {value}: answers of {name} could not be scored")
    for title, kinds in (("by kind of request", report.kinds), ("by hour (UTC)", report.hours)):
        if kinds:
            lines += ["", title, *(_kind_line(one) for one in kinds)]
    worse = [f"{kind} {share:+.0%}" for kind, share in report.flaws.items() if abs(share) >= 0.005]
    if worse:
        lines += ["", f"flawed answers, more (+) or fewer than {theirs}: {', '.join(worse)}"]
    if report.set_aside:
        aside = ", ".join(f"{why} {number}" for why, number in sorted(report.set_aside.items()))
        lines += ["", f"not scored: {aside}"]
    usd = "price not known" if report.judge_usd is None else f"${report.judge_usd:,.3f}"
    calls = counted(report.judge_calls, "judge call")
    return [*lines, "", f"{calls}, {report.judge_tokens:,} tokens, {usd}"]


def _kind_line(kind: Kind) -> str:
    one = kind.difference
    interval = f"[{one.low:+.3f}, {one.high:+.3f}]"
    return f"  {kind.name:<24} {one.mean:+.3f} {interval}  {counted(one.groups, 'prompt')}"
