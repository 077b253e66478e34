"""Is a loaded adapter live? Compare its log-probabilities with the base's on fixed prompts. Pure.

An adapter that vLLM lists may still do nothing: all of its B matrices are zero, the modules' names
match nothing, or the name falls through to the base. Then the numbers equal the base's. The base is
probed before and after: batching can move its last bits, and a difference not larger than that
movement proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MIN_DIFFERENCE = 1e-4
"""Mean nats a token. Measured on SmolLM2-135M: a fresh adapter 0, B matrices of 5e-4 make 0.05."""
NOISE_FACTOR = 2.0
"""The difference must be this many times that between the two probes of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a model would say next after each of the fixed prompts."""

    model_in_reply: str
    next_tokens: tuple[Mapping[int, float], ...]
    """[prompts] the likeliest next tokens: token id -> log-probability in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The comparison, kept as evidence."""

    live: bool
    reason: str
    model_in_reply: str
    tokens: int
    """Log-probabilities that were compared."""
    max_difference: float
    """Nats, adapter to base."""
    mean_difference: float
    noise: float
    """Mean nats a token between the two probes of the base."""


def compare(name: str, *, adapter: Probe, base_before: Probe, base_after: Probe) -> Liveness:
    """Say whether the adapter called `name` changes what the base says."""
    differences = _differences(base_before, adapter)
    noise = _mean(_differences(base_before, base_after))
    mean = _mean(differences)
    if adapter.model_in_reply != name:
        reason = f"not live: the reply to {name} names {adapter.model_in_reply}"
    elif not differences:
        reason = "not live: the probe gave no log-probabilities to compare"
    elif not math.isfinite(mean):
        reason = "not live: its log-probabilities are not finite"
    elif mean <= max(MIN_DIFFERENCE, NOISE_FACTOR * noise):
        reason = (
            f"not live: its log-probabilities are the base's ({mean:.2g} nats a token away, noise "
            f"{noise:.2g})"
        )
    else:
        reason = f"live: differs from the base by {mean:.3g} nats a token"
    return Liveness(
        live=reason.startswith("live"),
        reason=reason,
        model_in_reply=adapter.model_in_reply,
        tokens=len(differences),
        max_difference=max(differences, default=0.0),
        mean_difference=mean,
        noise=noise,
    )


def _differences(base: Probe, other: Probe) -> list[float]:
    """|difference| in nats of every likely token of the base, at the same places of the prompts.

    A token that is not among the other's likeliest has at most the least of their
    log-probabilities there; how far that is below the base's is taken.
    """
    found: list[float] = []
    for ours, theirs in zip(base.next_tokens, other.next_tokens, strict=False):
        if not theirs:
            continue
        least = min(theirs.values())
        for token_id, logprob in ours.items():
            if token_id in theirs:
                found.append(abs(logprob - theirs[token_id]))
            else:
                found.append(max(0.0, logprob - least))
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
