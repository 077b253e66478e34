"""Let a judge score groups whose order is known, as the product does, and keep each pass apart.

A run of a group is what the product calls a judgement: some passes, every second one in the reverse
order of the one before. Each pass is asked for alone here, because the scores and the order of each
are needed. A rate limit is waited for; any other failure ends that run, is counted by its reason,
and the others go on.

Replies of a group's first run may be those that were kept (`ingest.judges.cache`). Its further runs
tell how far the judge agrees with itself, so the judge is always asked anew for them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingest.calibration.records import KnownGroup, Pass, Run
from ingest.errors import (
    JudgeBusyError,
    JudgeRefusalError,
    JudgeReplyError,
    JudgeUnavailableError,
)
from ingest.judges.replies import NO_EXCHANGE
from ingest.privacy.judge_view import JudgeView, NotRedactedError
from ingest.ruler.blame import DEFECT
from ingest.ruler.group import NOT_REDACTED, RUBBISH, refusal_of
from ingest.ruler.judge import Judge, replies_kept_for
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S
from ingest.ruler.ruler import SEED_BITS, JudgeCall, merge_identical, score_answers
from sidecar.backoff import Backoff

LIMIT_WAITS = Backoff(first_s=1.0, last_s=60.0)
"""Waits of a call over a rate limit that does not say how long to wait; six of them take 63 s."""
LIMIT_TRIES = 7
GIVE_UP_AFTER = 10
"""Failed runs, with no good one, after which a judge is asked no more: a wrong key or address fails
on every group."""
GIVEN_UP = "given_up"
"""Reason of the runs that were not tried then."""

Sleep = Callable[[float], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the groups are judged."""

    passes: int
    repeats: int
    """How often each group is judged anew, in other orders."""
    concurrency: int
    """Runs at once."""
    seed: int
    """Draws the orders. They do not depend on judge and rubric, so that these are compared on the
    same ones."""


async def judge_groups(
    judge: Judge,
    groups: Sequence[KnownGroup],
    plan: Plan,
    *,
    rubric: str,
    view: JudgeView | None = None,
    show_reasoning: bool = False,
    sleep: Sleep = asyncio.sleep,
) -> list[Run]:
    """Judge every group `plan.repeats` times.

    rubric, view, show_reasoning: as for `score_answers`. sleep: for tests.
    Returns: one run for each group and repeat, failed ones too.
    """
    ask = _Asking(judge=judge, rubric=rubric, view=view, show_reasoning=show_reasoning, sleep=sleep)
    gate = asyncio.Semaphore(plan.concurrency)
    done: list[Run] = []

    async def one(group: KnownGroup, repeat: int) -> Run:
        async with gate:
            if len(done) >= GIVE_UP_AFTER and all(run.failure is not None for run in done):
                return Run(group=group, repeat=repeat, passes=(), failure=GIVEN_UP)
            done.append(await _judge(ask, group, plan, repeat))
            return done[-1]

    wanted = [one(group, repeat) for group in groups for repeat in range(plan.repeats)]
    return list(await asyncio.gather(*wanted))


async def _judge(ask: _Asking, group: KnownGroup, plan: Plan, repeat: int) -> Run:
    calls: list[JudgeCall] = []
    passes: list[Pass] = []
    failure = None
    detail = ""
    rng = random.Random(f"{plan.seed}/{group.group_id}/{repeat}")
    try:
        distinct, place_of = merge_identical(
            [one.message for one in group.candidates], show_reasoning=ask.show_reasoning
        )
        order = list(range(len(distinct)))
        for number in range(plan.passes):
            if number % 2:
                order.reverse()
            else:
                rng.shuffle(order)
            seed = rng.getrandbits(SEED_BITS)
            with replies_kept_for(NO_EXCHANGE if repeat == 0 else None):
                scores = await ask(group, distinct, order, seed, calls.append)
            shown_at = {answer: position for position, answer in enumerate(order)}
            passes.append(
                Pass(
                    scores=tuple(scores[place] for place in place_of),
                    positions=tuple(shown_at[place] for place in place_of),
                )
            )
    except (JudgeUnavailableError, JudgeRefusalError) as error:
        failure, detail = refusal_of(error), str(error)
    except JudgeReplyError as error:
        failure = RUBBISH
        detail = f"{error}; it wrote: {error.reply}" if error.reply else str(error)
    except NotRedactedError as error:
        failure, detail = NOT_REDACTED, str(error)
    except Exception as error:  # noqa: BLE001 - one group, of whatever form, ends no run
        failure, detail = DEFECT, f"{type(error).__name__}: {error}"
    replies = [call.reply for call in calls]
    costs = [reply.cost_usd for reply in replies if reply.cost_usd is not None]
    return Run(
        group=group,
        repeat=repeat,
        passes=() if failure else tuple(passes),
        failure=failure,
        detail=detail,
        calls=len(calls),
        unusable=sum(not call.ok for call in calls),
        replayed=sum(reply.cached for reply in replies),
        tokens=sum((one.prompt_tokens or 0) + (one.completion_tokens or 0) for one in replies),
        cost_usd=sum(costs) if len(costs) == len(replies) else None,
        seconds=sum(reply.seconds for reply in replies),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asking:
    """Asks the judge about one order of answers; waits for rate limits."""

    judge: Judge
    rubric: str
    view: JudgeView | None
    show_reasoning: bool
    sleep: Sleep

    async def __call__(
        self,
        group: KnownGroup,
        answers: Sequence[Mapping[str, Any]],
        order: Sequence[int],
        seed: int,
        on_call: Callable[[JudgeCall], None],
    ) -> dict[int, float]:
        """Show the answers in this order. Returns: the score of each by its index in `answers`."""
        places = arranged(order, seed)
        attempt = 1
        while True:
            try:
                judged = await score_answers(
                    self.judge,
                    context=group.context,
                    tools=group.tools,
                    answers=[answers[place] for place in places],
                    rubric=self.rubric,
                    passes=1,
                    seed=seed,
                    on_call=on_call,
                    subject=group.group_id,
                    view=self.view,
                    show_reasoning=self.show_reasoning,
                )
            except JudgeBusyError as error:
                if attempt == LIMIT_TRIES:
                    raise
                asked_s = min(error.retry_after_s, LONGEST_RETRY_AFTER_S)
            else:
                return dict(zip(places, judged.scores, strict=True))
            await self.sleep(max(asked_s, LIMIT_WAITS.wait_s(attempt)))
            attempt += 1


def arranged(order: Sequence[int], seed: int) -> list[int]:
    """Return which answer to put at each place, so that RULER's first pass shows them in `order`.

    seed: of `score_answers`, which shuffles what it is given by `random.Random(seed)` (see
        `JudgeCall.order_seed`).
    """
    drawn = list(range(len(order)))
    random.Random(seed).shuffle(drawn)
    places = [0] * len(order)
    for position, place in enumerate(drawn):
        places[place] = order[position]
    return places
