"""Check that recorded log-probabilities agree with the trainer's. Pure.

The answers of a run are compared with the adapter that sampled them, before any step. The same rule
applies on three levels: an answer, a group, all groups together. An answer or a group that differs
is left out alone. A difference that the noise of a small level hides shows on a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from learner.records import Drift

TOKEN_NOISE = 0.1
"""Nats: scatter of |recorded - recomputed| over the tokens of good answers. Measured on
SmolLM2-135M, bf16 against an fp32 trainer, 1,682 tokens of 48 answers: mean 0.036, standard
deviation 0.036 (of the signed difference 0.051), largest 0.32; by group 0.030 to 0.043, by answer
0.021 to 0.060. Twice the 0.05, because trained adapters differ more (mean 0.049)."""
NOISE_DEVIATIONS = 3.0
"""Standard errors by which a mean over n tokens may exceed the limit."""


def measure(differences_N: Sequence[float]) -> Drift:
    """Summarise [N] recorded minus recomputed log-probabilities, in nats, N >= 1."""
    tokens = len(differences_N)
    return Drift(
        mean=sum(differences_N) / tokens,  # sum, because fmean refuses infinities of both signs
        mean_abs=sum(map(abs, differences_N)) / tokens,
        max_abs=max(map(abs, differences_N)),
        ratio_mean=sum(map(_ratio, differences_N)) / tokens,
        tokens=tokens,
    )


def excess(drift: Drift, limit: float) -> str | None:
    """Describe how a drift exceeds the limit; None when it does not.

    limit: `learner.max_drift`, nats a token, for a mean over many tokens. The mean over few tokens
        is noisy, so its own limit is higher by `NOISE_DEVIATIONS` standard errors. These use the
        measured noise of good answers, not the sample's own noise: a bad answer with a wide scatter
        must not raise its own limit.
    """
    allowed = limit + NOISE_DEVIATIONS * TOKEN_NOISE / math.sqrt(drift.tokens)
    if not drift.mean_abs <= allowed:
        return (
            f"recorded and recomputed log-probabilities differ by {drift.mean_abs:.4f} nats a "
            f"token over {drift.tokens} tokens; {allowed:.4f} is allowed"
        )
    if not abs(drift.ratio_mean - 1) <= allowed:
        return (
            f"the importance ratio before the first step is {drift.ratio_mean:.4f} and not 1 "
            f"over {drift.tokens} tokens; {allowed:.4f} is the allowed distance"
        )
    return None


def _ratio(difference: float) -> float:
    # exp overflows beyond 709. A token that differs by 50 nats is far over any limit already.
    return math.exp(min(-difference, 50.0))
