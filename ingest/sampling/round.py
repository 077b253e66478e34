"""One sampling round of one group: load it, sample candidates one by one, store the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.errors import (
    AdapterGoneError,
    EngineBusyError,
    EngineDownError,
    NoRoomError,
    RequestRefusedError,
    SamplingError,
)
from ingest.grouping.request import LogprobsMode, candidate_temperature, fill
from ingest.grouping.selection import kept_adapters
from ingest.judge_prompt import appearance, shown_answer
from ingest.privacy.screen import Screen
from ingest.records import Answer, Group
from ingest.ruler.waiting import LONGEST_RETRY_AFTER_S
from ingest.store.exchanges import load_exchange
from ingest.store.groups import (
    append_answers,
    load_group,
    mark_sampled,
    release_group,
    retry_sampling,
    sampling_attempts,
    set_aside,
)
from ingest.store.listing import day_of, next_midnight
from ingest.vllm.sampler import Sampler, SampleRequest
from sidecar.backoff import Backoff, retry_after_s
from sidecar.records import BASE, Exchange
from sidecar.routing.table import upstream_model
from sidecar.settings import Groups, SamplingField
from sidecar.store.database import count
from sidecar.store.models import AdapterRow, CounterRow

# Decide about a group after a round of sampling. Pure.

Miss = Literal[
    "held_back",
    "engine_down",
    "engine_busy",
    "adapter_away",
    "adapter_gone",
    "refused",
    "prompt_mismatch",
    "private",
    "failed",
]
"""Reasons for a missing candidate. held_back: users came first; engine_busy: vLLM takes no request
for now; adapter_away: vLLM lacks the adapter, which control loads again; adapter_gone: it is not
loaded again; refused: vLLM refuses the request itself; prompt_mismatch: vLLM used another prompt
than the one of the served answer; private: the project's privacy policy keeps the answer out of
training, or out of the store; failed: the reply was an error or invalid."""

WAITS: frozenset[Miss] = frozenset({"held_back", "engine_down", "engine_busy", "adapter_away"})
"""Misses that pass, and are not the group's fault."""
OF_ALL: frozenset[Miss] = WAITS | {"adapter_gone", "refused"}
"""Misses that every candidate of the round would share: after one, no other is requested."""
MAX_ROUNDS = 5
"""Most rounds that leave candidates missing through the group's own fault."""
RETRIES = Backoff(first_s=5.0, last_s=300.0)
"""Pauses between the rounds of a group: 5, 10, 20, ... 300 s."""
MIN_ANSWERS = 2
ALIKE_ENOUGH = 4
"""Answers, served ones counted, that must look alike before the rest of the group is not sampled.
Groups of this size or a smaller one are always sampled whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The result of one requested candidate: an answer, or why there is none."""

    answer: Answer | None = None
    miss: Miss | None = None
    tokens: int = 0
    """Tokens sampled for it, whether it was kept or not."""
    wait_s: float = 0.0
    """Seconds that vLLM asked to be left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """Decision about a group after a round.

    sampled: complete, goes to the judge. set_aside: for `reason`. retry: one of its rounds is used
    up. wait: no round is used up, since nothing is wrong with the group.
    """

    action: Literal["sampled", "set_aside", "retry", "wait"]
    reason: str = ""


def conclude(
    answers: Sequence[Answer], *, size: int, rounds: int, misses: Collection[Miss]
) -> Conclusion:
    """Decide a group after a round.

    answers: all answers that the group has now. rounds: rounds used up before this one.
    misses: the reason for each missing candidate of this round.
    """
    if len(answers) >= size:
        return _complete(answers)
    if pointless(answers, size=size):
        return Conclusion(action="set_aside", reason="identical_answers")
    if "adapter_gone" in misses:
        return Conclusion(action="set_aside", reason="adapter_gone")
    if "refused" in misses:
        return _with_what_there_is(answers, "request_refused")
    if not WAITS.isdisjoint(misses):
        return Conclusion(action="wait")
    served = sum(answer.origin == "served" for answer in answers)
    if len(misses) == size - served and set(misses) == {"prompt_mismatch"}:
        # No candidate matched: the rendering has changed since, and a retry would not help.
        return Conclusion(action="set_aside", reason="prompt_mismatch")
    if set(misses) == {"private"}:
        # A retry would draw from the same distribution again; the others are enough to compare.
        return _with_what_there_is(answers, "private")
    if rounds + 1 < MAX_ROUNDS:
        return Conclusion(action="retry")
    return _with_what_there_is(answers, "sampling_failed")


def next_step(answers: Sequence[Answer], *, size: int, missing: int) -> int:
    """Return how many candidates to request at once now; 0: no more in this round.

    answers: all answers that the group has by now. missing: candidates that this round has not
        requested yet.
    While all answers look alike only as many are requested as it takes to call the rest pointless.
    """
    if missing <= 0 or len(answers) >= size or pointless(answers, size=size):
        return 0
    if size <= ALIKE_ENOUGH or not answers or not all_identical(answers):
        return missing
    return min(missing, ALIKE_ENOUGH - len(answers))


def pointless(answers: Sequence[Answer], *, size: int) -> bool:
    """Return True when so many answers look alike that the others are not worth their tokens."""
    return ALIKE_ENOUGH <= len(answers) < size and all_identical(answers)


def all_identical(answers: Sequence[Answer]) -> bool:
    """Return True when all answers look equal to a judge. The ids of tool calls do not count, nor
    how the JSON of their arguments is written."""
    return len({_as_seen(answer.message) for answer in answers}) <= 1


def _with_what_there_is(answers: Sequence[Answer], reason: str) -> Conclusion:
    """Conclude a group that gets no more answers. reason: why, if they are too few."""
    if len(answers) >= MIN_ANSWERS:
        return _complete(answers)
    return Conclusion(action="set_aside", reason=reason)


def _complete(answers: Sequence[Answer]) -> Conclusion:
    if all_identical(answers):
        return Conclusion(action="set_aside", reason="identical_answers")
    return Conclusion(action="sampled")


def _as_seen(message: bytes) -> str | bytes:
    """Reasoning counts: verifiers see it."""
    try:
        parsed = msgspec.json.decode(message, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return message
    return appearance(shown_answer(parsed, show_reasoning=True))


# The budgets of sampling, by day (UTC).

DAY = "sampling_tokens"
SERVED, REHEARSED = "served_tokens", "rehearsal_tokens"
"""Stages of counter rows: (stage, day) -> tokens. Ingest writes the last two."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A budget that is spent."""

    setting: str
    why: str
    until: datetime
    """When it is renewed."""


def spent_budget(sampled_today: int, budgets: Groups, *, now: float) -> Spent | None:
    """Return the budget of candidate tokens if it is spent. Pure."""
    if sampled_today < budgets.tokens_per_day:
        return None
    setting = "groups.tokens_per_day"
    why = f"{setting} is spent: {sampled_today} candidate tokens today"
    return Spent(setting=setting, why=why, until=next_midnight(now))


def read_sampled_today(session: Session, *, now: float) -> int:
    """Read the candidate tokens of this day (UTC)."""
    row = session.get(CounterRow, {"stage": DAY, "reason": day_of(now)})
    return 0 if row is None else row.count


def completion_tokens(exchange: Exchange) -> int:
    """Return the tokens that a user was answered with: vLLM's count, else those recorded."""
    if exchange.completion_tokens is not None:
        return exchange.completion_tokens
    return sum(len(choice.token_ids) for choice in exchange.choices)


STAGE = "candidate"
"""Stage of the counter rows: ("candidate", "kept" or the miss) -> number of candidates."""

SPARED = "spared"
"""Candidates that were not requested because the answers were all alike."""
AWAY_S = 5.0
"""How long a group is left alone while its adapter is loaded again, and after a 429 that does not
say how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A group to complete, with what a request for a candidate needs."""

    group: Group
    model: str
    """The public model name."""
    request: dict[str, Any]
    upstream_model: str
    temperature: float
    max_tokens: int | None
    rounds: int
    """Rounds used up before this one."""
    missing: int


def load_job(
    session: Session,
    group_id: str,
    *,
    model: str,
    mode: LogprobsMode,
    size: int,
    sampling_defaults: Mapping[SamplingField, float] | None = None,
) -> Job | None:
    """Load a group to complete. Returns: None when it or its exchange is gone.

    sampling_defaults: the operator's values for fields that the request leaves out.
    """
    group = load_group(session, group_id)
    stored = load_exchange(session, group.exchange_id) if group is not None else None
    if group is None or stored is None:
        return None
    sampling = fill(stored.exchange.sampling, sampling_defaults)
    return Job(
        group=group,
        model=model,
        request=msgspec.json.decode(group.request, type=dict[str, Any]),
        upstream_model=upstream_model(model, group.adapter),
        temperature=candidate_temperature(sampling, mode),
        max_tokens=sampling.max_tokens,
        rounds=sampling_attempts(session, group_id),
        missing=max(0, size - len(group.answers)),
    )


async def ask(sampler: Sampler, job: Job, screen: Screen, *, now: float) -> Attempt:
    """Sample one candidate. Errors of vLLM are not raised: the attempt holds the miss.

    now: Unix seconds.

    A candidate that the project's privacy policy keeps out of training is a miss: it has no use but
    to be learned from.
    """
    try:
        sampled = await sampler.sample(
            SampleRequest(
                upstream_model=job.upstream_model,
                chat=job.request,
                temperature=job.temperature,
                max_tokens=job.max_tokens,
            )
        )
    except NoRoomError:
        return Attempt(miss="held_back")
    except EngineDownError as error:
        return _missed(job, Attempt(miss="engine_down"), error)
    except EngineBusyError as error:
        asked_s = retry_after_s(error.headers, now)
        wait_s = AWAY_S if asked_s is None else min(asked_s, LONGEST_RETRY_AFTER_S)
        return _missed(job, Attempt(miss="engine_busy", wait_s=wait_s), error)
    except RequestRefusedError as error:
        return _missed(job, Attempt(miss="refused"), error)
    except AdapterGoneError as error:
        # The base cannot be unloaded: a 404 for it means a wrong name or URL, an operator's error.
        gone = job.group.adapter != BASE
        return _missed(job, Attempt(miss="adapter_gone" if gone else "failed"), error)
    except SamplingError as error:
        return _missed(job, Attempt(miss="failed"), error)
    tokens = len(sampled.token_ids)
    if sampled.prompt_token_ids != job.group.prompt_token_ids:
        log.warning("candidate_dropped", group_id=job.group.group_id, reason="prompt_mismatch")
        return Attempt(miss="prompt_mismatch", tokens=tokens)
    screened = await asyncio.to_thread(screen.answer, sampled.message, project=job.group.project)
    if not screened.may_learn:
        log.warning(
            "candidate_dropped",
            group_id=job.group.group_id,
            reason="private",
            found=list(screened.reasons),
        )
        return Attempt(miss="private", tokens=tokens)
    answer = Answer(
        index=len(job.group.answers),
        origin="sampled",
        message=sampled.message,
        finish_reason=sampled.finish_reason,
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        temperature=job.temperature,
    )
    return Attempt(answer=answer, tokens=tokens)


def store_round(
    session: Session, job: Job, attempts: Sequence[Attempt], *, size: int, now: float
) -> Conclusion:
    """Store a round and the group's next status, in the caller's transaction."""
    group_id = job.group.group_id
    count(session, DAY, day_of(now), sum(attempt.tokens for attempt in attempts))
    attempts = _told_by_registry(session, job, attempts)
    kept = [attempt.answer for attempt in attempts if attempt.answer is not None]
    misses = [attempt.miss for attempt in attempts if attempt.miss is not None]
    added = append_answers(session, group_id, kept, size=size)
    count(session, STAGE, "kept", added)
    # Another worker completed the group after this worker's lease ran out.
    count(session, STAGE, "late", len(kept) - added)
    for miss in misses:
        count(session, STAGE, miss)
    count(session, STAGE, SPARED, _spared(job, attempts, size=size))
    held = load_group(session, group_id)
    conclusion = conclude(
        held.answers if held is not None else (), size=size, rounds=job.rounds, misses=misses
    )
    match conclusion.action:
        case "sampled":
            mark_sampled(session, group_id)
        case "set_aside":
            set_aside(session, group_id, conclusion.reason)
        case "retry":
            retry_sampling(session, group_id, until=now + RETRIES.wait_s(job.rounds + 1))
        case "wait":
            wait_s = max((attempt.wait_s for attempt in attempts), default=0.0)
            release_group(session, group_id, until=now + wait_s if wait_s else 0.0)
    return conclusion


def _spared(job: Job, attempts: Sequence[Attempt], *, size: int) -> int:
    sampled = [attempt.answer for attempt in attempts if attempt.answer is not None]
    if not pointless([*job.group.answers, *sampled], size=size):
        return 0
    return job.missing - len(attempts)


def _told_by_registry(session: Session, job: Job, attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """Tell an adapter that vLLM lost, and gets again, from one that is retired.

    A vLLM that restarts has no adapter until control has loaded them.
    """
    if all(attempt.miss != "adapter_gone" for attempt in attempts):
        return attempts
    of_adapter = select(AdapterRow.model).where(AdapterRow.name == job.group.adapter)
    line = session.scalar(of_adapter) or job.model
    if job.group.adapter not in kept_adapters(session, line):
        return attempts
    return [
        replace(one, miss="adapter_away", wait_s=AWAY_S) if one.miss == "adapter_gone" else one
        for one in attempts
    ]


def _missed(job: Job, attempt: Attempt, error: SamplingError) -> Attempt:
    log.warning(
        "candidate_dropped",
        group_id=job.group.group_id,
        adapter=job.group.adapter,
        reason=attempt.miss,
        error=str(error),
    )
    return attempt
