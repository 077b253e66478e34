"""Check by log-probabilities on fixed prompts that a loaded adapter has an effect ("live"). Pure.

An adapter that vLLM lists may still have none: all its B matrices are zero, its module names match
nothing, or vLLM answers its name with the base. Then its log-probabilities equal the base's. The
base is probed before and after the adapter: batching can change its last bits, and a difference no
larger than that noise proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MIN_DIFFERENCE = 1e-4
"""Least mean difference of a live adapter, in nats a token. Measured on SmolLM2-135M: a fresh
adapter gives 0, B matrices of 5e-4 give 0.05."""
NOISE_FACTOR = 2.0
"""Least ratio of the adapter's difference to the difference between the two probes of the base."""


MAX_NOISE = 1.0
"""Largest mean difference of two probes of the base that still decide, in nats a token. It was 0.0
in 14 of 15 canaries of one run on SmolLM2-135M beside other traffic, and 9,246 in the fifteenth."""
IMPOSSIBLE = -9999.0
"""vLLM's log-probability of a token that cannot follow. No truncation is requested, so every token
can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A model's distribution of the next token after each of the fixed prompts."""

    model_in_reply: str
    next_tokens: tuple[Mapping[int, float], ...]
    """[prompts] likeliest next tokens: token id -> log-probability in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Result of the comparison, kept as evidence."""

    live: bool
    unsure: bool
    """The probes decide nothing: vLLM answered wrongly, and is to be asked again. Then not live."""
    reason: str
    model_in_reply: str
    tokens: int
    """Number of compared log-probabilities."""
    max_difference: float
    """Largest difference between adapter and base, in nats."""
    mean_difference: float
    noise: float
    """Mean difference between the two probes of the base, in nats a token."""
    kl: float = 0.0
    """KL divergence of the adapter from the base, in nats: mean over the prompts (`divergence`)."""


_LEAST = 1e-9
"""Least probability that a term divides by: rounding may leave less than nothing of the rest."""


def divergence(base: Probe, other: Probe) -> float:
    """Return the least KL(base || other) of the next token that the probes allow, in nats.

    The mean over the prompts. Tokens that both list are compared one by one, those that the other
    does not list together: each has at most its least listed probability there. All further tokens
    are one group. The true divergence is at least as large (data-processing inequality).
    """
    found = [
        _of_prompt(ours, theirs)
        for ours, theirs in zip(base.next_tokens, other.next_tokens, strict=False)
        if ours and theirs
    ]
    return max(0.0, _mean(found))


def _of_prompt(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    shared = [
        (math.exp(nats), math.exp(theirs[token])) for token, nats in ours.items() if token in theirs
    ]
    unlisted = [math.exp(nats) for token, nats in ours.items() if token not in theirs]
    left = max(1.0 - sum(q for _, q in shared), _LEAST)
    at_most = min(len(unlisted) * math.exp(min(theirs.values())), left)
    p_unlisted = sum(unlisted)
    p_rest = max(0.0, 1.0 - sum(p for p, _ in shared) - p_unlisted)
    if p_unlisted * (left - at_most) <= p_rest * at_most:  # they need not be told apart
        groups = [(p_unlisted + p_rest, left)]
    else:
        groups = [(p_unlisted, at_most), (p_rest, left - at_most)]
    pairs = [*shared, *groups]
    return sum(p * math.log(p / max(q, _LEAST)) for p, q in pairs if p > 0.0)


def compare(name: str, *, adapter: Probe, base_before: Probe, base_after: Probe) -> Liveness:
    """Compare the probes: does the adapter `name` change the base's log-probabilities?"""
    differences = _differences(base_before, adapter)
    noise = max(
        _mean(_differences(base_before, base_after)), _mean(_differences(base_after, base_before))
    )
    mean, kl = _mean(differences), divergence(base_before, adapter)
    impossible = any(map(has_impossible, (base_before, adapter, base_after)))
    unsure = impossible or not noise <= MAX_NOISE
    if impossible:
        reason = "the probe decides nothing: vLLM calls a likely next token impossible (-9999 nats)"
    elif unsure:
        reason = f"the probe decides nothing: two of the base are {noise:.2g} nats a token apart"
    elif adapter.model_in_reply != name:
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
        unsure=unsure,
        reason=reason,
        model_in_reply=adapter.model_in_reply,
        tokens=len(differences),
        max_difference=max(differences, default=0.0),
        mean_difference=mean,
        noise=noise,
        kl=kl if math.isfinite(kl) else 0.0,
    )


def _differences(base: Probe, other: Probe) -> list[float]:
    """Return |difference| in nats for every likely token of the base, prompt by prompt.

    A token missing from the other probe's likeliest has at most the lowest log-probability listed
    there; the distance from that bound down from the base's value is used.
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


def has_impossible(probe: Probe) -> bool:
    """Return True when vLLM calls a likely next token impossible: a wrong answer."""
    return any(nats <= IMPOSSIBLE for likeliest in probe.next_tokens for nats in likeliest.values())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
