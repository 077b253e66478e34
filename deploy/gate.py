"""The gate: fresh answers of candidate and champion on held-out prompts, judged blind in one group.

A shell around `gate_rule`. Each call of `advance` makes a few of the missing comparisons and
stores each as it ends, so a process that is killed goes on with the rest. What cannot be asked
(judge or vLLM away) leaves no trace but the reason; what was asked and answered with rubbish is
set aside and counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from deploy import gate_store
from deploy.answer_shape import is_short
from deploy.canary import GateEvidence
from deploy.gate_rule import judge_gate, mean_difference
from deploy.gate_store import HeldOutPrompt
from deploy.records import Trial
from ingest.errors import (
    AdapterGoneError,
    EngineDownError,
    JudgeRefusalError,
    JudgeReplyError,
    JudgeUnavailableError,
    SamplingError,
)
from ingest.judge import Judge
from ingest.ruler import JudgeCall, score_answers
from ingest.ruler_prompt import rubric_hash
from ingest.store.database import Database
from ingest.vllm import SampledAnswer, Sampler
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings
from sidecar.settings import Judge as JudgeSettings

log = structlog.get_logger()

SPARE_PROMPTS = 2
"""Prompts tried at most, as a multiple of those wanted: some comparisons are set aside."""
_AWAY = (EngineDownError, AdapterGoneError, JudgeUnavailableError)
"""Nobody's answer was bad: ask again later. The reconciler brings a lost adapter back."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """One fresh answer and whose it is."""

    arm: str
    adapter: str
    message: dict[str, Any]
    finish_reason: str | None


class Gate:
    """Compares a candidate with its champion. One per process."""

    def __init__(
        self,
        *,
        database: Database,
        sampler: Sampler,
        judge: Judge,
        rules: CanarySettings,
        judging: JudgeSettings,
        parallel: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """parallel: comparisons made at once, each with 2 `gate_answers` requests in flight."""
        self._database = database
        self._sampler = sampler
        self._judge = judge
        self._rules = rules
        self._judging = judging
        self._parallel = parallel
        self._clock = clock

    async def advance(self, trial: Trial) -> GateEvidence:
        """Make up to `parallel` missing comparisons, then add up all there are."""
        prompts, missing = await asyncio.to_thread(self._prompts, trial)
        away: str | None = None
        if len(prompts) < self._rules.gate_min_prompts:
            missing = []
        elif missing and not self._judge.model:
            away, missing = "no judge is set: name one in judge.model", []
        batch = missing[: self._parallel]
        for reason in await asyncio.gather(*(self._compare(trial, one) for one in batch)):
            away = away or reason
        return await asyncio.to_thread(self._evidence, trial, away)

    def _prompts(self, trial: Trial) -> tuple[set[str], list[HeldOutPrompt]]:
        """(keys of all sessions that take part, prompts not compared yet)."""
        limit = SPARE_PROMPTS * self._rules.gate_prompts
        with self._database.read() as session:
            done = gate_store.compared_sessions(session, trial)
            newest = gate_store.held_out_prompts(session, trial.model, limit=limit)
            made = gate_store.comparisons(session, trial.canary_id)
        scored = [one for one in made if one.difference is not None]
        missing = [prompt for prompt in newest if prompt.session_key not in done]
        room = min(limit - len(done), self._rules.gate_prompts - len(scored))
        return done | {p.session_key for p in newest}, missing[: max(0, room)]

    def _evidence(self, trial: Trial, away: str | None) -> GateEvidence:
        prompts, missing = self._prompts(trial)
        with self._database.read() as session:
            made = gate_store.comparisons(session, trial.canary_id)
        return GateEvidence(
            prompts=len(prompts),
            pending=len(missing),
            verdict=judge_gate(made, self._rules, seed=_seed(trial, "bootstrap")),
            away=away,
        )

    async def _compare(self, trial: Trial, prompt: HeldOutPrompt) -> str | None:
        """Make and store one comparison. Returns: why it could not be made yet, or None."""
        calls: list[JudgeCall] = []
        answered: list[_Answered] = []
        status = "scored"
        scores: tuple[float, ...] = ()
        explanations: tuple[str, ...] = ()
        try:
            answered = await self._answer(trial, prompt)
            judgement = await score_answers(
                self._judge,
                context=prompt.request["messages"],
                tools=prompt.request.get("tools") or (),
                answers=[one.message for one in answered],
                rubric=self._judging.rubric,
                passes=self._judging.passes,
                seed=_seed(trial, f"judge\x00{prompt.exchange_id}"),
                on_call=calls.append,
                subject=gate_store.comparison_id(trial, prompt),
            )
            scores, explanations = judgement.scores, judgement.explanations
        except _AWAY as error:
            log.warning("gate_waits", canary=trial.canary_id, reason=str(error))
            return str(error)
        except SamplingError as error:
            status = "sampling_failed"
            log.warning("gate_set_aside", exchange=prompt.exchange_id, reason=str(error))
        except (JudgeReplyError, JudgeRefusalError) as error:
            status = "judge_rubbish"
            log.warning("gate_set_aside", exchange=prompt.exchange_id, reason=str(error))
        rows = _as_rows(answered, scores, explanations)
        await asyncio.to_thread(self._save, trial, prompt, status, rows, calls)
        return None

    async def _answer(self, trial: Trial, prompt: HeldOutPrompt) -> list[_Answered]:
        """`gate_answers` fresh answers of each arm, in an order that tells nothing."""
        arms = [("candidate", trial.candidate), ("champion", trial.champion)]
        asked = [pair for pair in arms for _ in range(self._rules.gate_answers)]
        random.Random(_seed(trial, f"order\x00{prompt.exchange_id}")).shuffle(asked)
        sampled = await asyncio.gather(
            *(self._sample(trial, prompt, adapter) for _, adapter in asked), return_exceptions=True
        )
        answered: list[_Answered] = []
        errors = [one for one in sampled if isinstance(one, BaseException)]
        # An engine that is down, or has lost an adapter, explains the other errors.
        for error in sorted(errors, key=lambda one: not isinstance(one, _AWAY)):
            raise error
        for (arm, adapter), answer in zip(asked, sampled, strict=True):
            assert isinstance(answer, SampledAnswer)
            message = json.loads(answer.message)
            answered.append(_Answered(arm, adapter, message, answer.finish_reason))
        return answered

    async def _sample(self, trial: Trial, prompt: HeldOutPrompt, adapter: str) -> SampledAnswer:
        asked = prompt.request.get("max_completion_tokens") or prompt.request.get("max_tokens")
        limit = self._rules.max_tokens
        return await self._sampler.sample(
            upstream_model=trial.model if adapter == BASE else adapter,
            request=prompt.request,
            temperature=1.0,
            max_tokens=min(asked, limit) if isinstance(asked, int) else limit,
        )

    def _save(
        self,
        trial: Trial,
        prompt: HeldOutPrompt,
        status: str,
        answers: list[dict[str, Any]],
        calls: list[JudgeCall],
    ) -> None:
        scores = {
            arm: [one["score"] for one in answers if one["arm"] == arm and one["score"] is not None]
            for arm in ("candidate", "champion")
        }
        scored = status == "scored"
        with self._database.write() as session:
            saved = gate_store.save_comparison(
                session,
                trial,
                prompt,
                status=status,
                difference=mean_difference(**scores) if scored else None,
                answers=answers,
            )
            if saved:
                gate_store.save_judge_calls(
                    session,
                    gate_store.comparison_id(trial, prompt),
                    calls,
                    rubric_hash=rubric_hash(self._judging.rubric),
                    now=self._clock(),
                )


def _as_rows(
    answered: list[_Answered], scores: tuple[float, ...], explanations: tuple[str, ...]
) -> list[dict[str, Any]]:
    return [
        {
            "arm": one.arm,
            "adapter": one.adapter,
            "content": one.message.get("content"),
            "tool_calls": one.message.get("tool_calls") or [],
            "finish_reason": one.finish_reason,
            "short": is_short(one.message, one.finish_reason),
            "score": scores[place] if scores else None,
            "explanation": explanations[place] if explanations else None,
        }
        for place, one in enumerate(answered)
    ]


def _seed(trial: Trial, purpose: str) -> int:
    """A seed that nobody who writes prompts can guess: it hangs on the trial's random salt."""
    digest = hashlib.sha256(f"{trial.salt}\x00{purpose}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 2**29
