"""One sampling round of one group: load it, sample candidates one by one, store the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from ingest.grouping.engine_facts import fill
from ingest.grouping.exchangeable import LogprobsMode, candidate_temperature
from ingest.grouping.rules import kept_adapters
from ingest.privacy.screen import Screen
from ingest.records import Answer, Group
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S
from ingest.sampling.budget import spend_tokens
from ingest.sampling.candidates import Attempt, Conclusion, back_off_s, conclude, pointless
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
from ingest.vllm.sampler import Sampler, SampleRequest
from sidecar.backoff import retry_after_s
from sidecar.records import BASE
from sidecar.routing.table import upstream_model
from sidecar.settings import SamplingField
from sidecar.store.database import count
from sidecar.store.models import AdapterRow

STAGE = "candidate"
"""Stage of the counter rows: ("candidate", "kept" or the miss) -> number of candidates."""

SPARED = "spared"
"""Candidates that were not requested because the answers were all alike."""
AWAY_S = 5.0
"""How long a group is left alone while its adapter is loaded again, and after a 429 that does not
say how long."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A group to complete, with what a request for a candidate needs."""

    group: Group
    project: str
    """The project of the served answer: its privacy policy holds for the candidates."""
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
        project=stored.exchange.project,
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
    tokens, prompt_tokens = len(sampled.token_ids), len(sampled.prompt_token_ids)
    if sampled.prompt_token_ids != job.group.prompt_token_ids:
        log.warning("candidate_dropped", group_id=job.group.group_id, reason="prompt_mismatch")
        return Attempt(miss="prompt_mismatch", tokens=tokens, prompt_tokens=prompt_tokens)
    screened = await asyncio.to_thread(screen.answer, sampled.message, project=job.project)
    if not screened.may_learn:
        log.warning(
            "candidate_dropped",
            group_id=job.group.group_id,
            reason="private",
            found=list(screened.reasons),
        )
        return Attempt(miss="private", tokens=tokens, prompt_tokens=prompt_tokens)
    answer = Answer(
        index=len(job.group.answers),
        origin="sampled",
        message=sampled.message,
        finish_reason=sampled.finish_reason,
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        temperature=job.temperature,
    )
    return Attempt(answer=answer, tokens=tokens, prompt_tokens=prompt_tokens)


def store_round(
    session: Session, job: Job, attempts: Sequence[Attempt], *, size: int, now: float
) -> Conclusion:
    """Store a round and the group's next status, in the caller's transaction."""
    group_id = job.group.group_id
    spend_tokens(
        session,
        sampled=sum(attempt.tokens for attempt in attempts),
        prompts=sum(attempt.prompt_tokens for attempt in attempts),
        now=now,
    )
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
            retry_sampling(session, group_id, until=now + back_off_s(job.rounds + 1))
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
