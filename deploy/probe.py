"""Is a loaded adapter live? Compare its log-probabilities with the base's on one prompt. Pure.

An adapter that vLLM lists may still do nothing: all of its B matrices are zero, the modules' names
match nothing, or the name falls through to the base. Then the numbers equal the base's. The base is
probed before and after: batching can move its last bits, and a difference not larger than that
movement proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_DIFFERENCE = 1e-4
"""Mean nats a token. Measured on SmolLM2-135M: a fresh adapter 0, B matrices of 5e-4 make 0.07."""
NOISE_FACTOR = 2.0
"""The difference must be this many times that between the two probes of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a model said of the fixed prompt."""

    model_in_reply: str
    token_ids: tuple[int, ...]
    """[P-1] the prompt's tokens after the first."""
    logprobs: tuple[float, ...]
    """[P-1] nats, of those tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The comparison, kept as evidence."""

    live: bool
    reason: str
    model_in_reply: str
    tokens: int
    max_difference: float
    """Nats, adapter to base."""
    mean_difference: float
    noise: float
    """Mean nats a token between the two probes of the base."""


def compare(name: str, *, adapter: Probe, base_before: Probe, base_after: Probe) -> Liveness:
    """Say whether the adapter called `name` changes what the base says."""
    same_tokens = adapter.token_ids == base_before.token_ids == base_after.token_ids
    differences = _differences(adapter, base_before) if same_tokens else []
    noise = _mean(_differences(base_before, base_after)) if same_tokens else 0.0
    mean = _mean(differences)
    if adapter.model_in_reply != name:
        reason = f"not live: the reply to {name} names {adapter.model_in_reply}"
    elif not differences:
        reason = "not live: the probe's tokens differ from the base's"
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
        tokens=len(adapter.token_ids),
        max_difference=max(differences, default=0.0),
        mean_difference=mean,
        noise=noise,
    )


def _differences(one: Probe, other: Probe) -> list[float]:
    return [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
