"""Decide whether a served answer is exchangeable with the sampled candidates. Pure.

Candidates are sampled with a temperature and no other sampling field. A served answer takes part in
the gradient only if it could have been one of them, if it is known how it was sampled, and if its
ids and log-probabilities are exact; otherwise it is judged and shown, but masked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from ingest.grouping.chat_request import unknown_field
from ingest.grouping.engine_facts import NEUTRAL, why_unsaid
from ingest.records import Answer
from sidecar.records import Exchange, Sampling

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]

DEFAULT_TEMPERATURE = 1.0
"""vLLM's temperature when neither the request nor the model's generation_config sets one."""
RAISED_BELOW = 0.01
"""vLLM raises a temperature between 0 and this to this (its `_MAX_TEMP`)."""
IMPOSSIBLE_LOGPROB = -9999.0
"""Value that vLLM's API writes for minus infinity."""


def candidate_temperature(sampling: Sampling, mode: LogprobsMode) -> float:
    """Return the temperature for candidates: the request's, or 1 if that would teach nothing.

    Greedy answers are all equal, so 0 becomes 1, and so do temperatures that vLLM raises to 0.01.
    Raw log-probabilities do not include the temperature, so with them only 1 is exact.
    """
    if mode == "raw_logprobs" or _temperature(sampling) < RAISED_BELOW:
        return DEFAULT_TEMPERATURE
    return _temperature(sampling)


def served_answers(
    exchange: Exchange,
    request: Mapping[str, Any],
    *,
    sampling: Sampling,
    defaults: frozenset[str] | None,
    mode: LogprobsMode,
    limit: int,
) -> tuple[Answer, ...]:
    """Convert the reply's choices to the first answers of a group, at most `limit` of them.

    sampling: the exchange's, completed with the operator's values for missing fields.
    defaults: fields that vLLM fills with an unknown value; None: any field may be.
    """
    masked = (
        why_unsaid(sampling, defaults)
        or _why_not_sampled_alike(sampling, mode)
        or ("unknown_field" if unknown_field(request) else None)
    )
    return tuple(
        Answer(
            index=place,
            origin="served",
            message=choice.message,
            finish_reason=choice.finish_reason,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            temperature=_temperature(sampling),
            untrainable_reason=masked or why_inexact(choice.token_ids, choice.logprobs),
        )
        for place, choice in enumerate(exchange.choices[:limit])
    )


def why_inexact(token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> str | None:
    """Return the defect of an answer's token ids and log-probabilities; None when exact."""
    if not token_ids:
        return "no_token_ids"
    if len(token_ids) != len(logprobs):
        return "lengths_differ"
    if not all(math.isfinite(value) and value > IMPOSSIBLE_LOGPROB for value in logprobs):
        return "logprob_not_finite"
    return None


def _why_not_sampled_alike(sampling: Sampling, mode: LogprobsMode) -> str | None:
    if sampling.temperature == 0:
        return "temperature_zero"
    if _temperature(sampling) < RAISED_BELOW:
        return "temperature_raised"
    if _temperature(sampling) != candidate_temperature(sampling, mode):
        return "temperature_differs"
    for name, neutral in NEUTRAL.items():
        value = getattr(sampling, name)
        if name != "temperature" and value is not None and value not in neutral:
            return name
    return None


def _temperature(sampling: Sampling) -> float:
    return DEFAULT_TEMPERATURE if sampling.temperature is None else sampling.temperature
