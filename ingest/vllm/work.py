"""What vLLM's counters say of its work: steps, tokens, and the time they took. Pure.

The names are those of vLLM 0.32. A page without them, or with values that are no finite numbers,
tells nothing: it is no error, since the load is known without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOKEN = "vllm:inter_token_latency_seconds"
"""Histogram: seconds from one token of a request to its next."""
STEP = "vllm:iteration_tokens_total"
"""Histogram with one value for each step of the engine."""
PREFILL = "vllm:request_prefill_time_seconds"
"""Histogram with one value for each request that ended."""
_COUNTERS = (
    f"{TOKEN}_count",
    f"{TOKEN}_sum",
    f"{STEP}_count",
    f"{PREFILL}_count",
    f"{PREFILL}_sum",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """Counters since vLLM started, summed over its engines (data parallel ranks)."""

    tokens: float
    """Tokens that followed another one of their request."""
    tokens_s: float
    """Seconds that these tokens took, summed over the tokens."""
    steps: float
    ended: float
    """Requests that ended."""
    prefills_s: float
    """Seconds of prefill of the requests that ended, summed."""
    engines: int = 1


def parse_work(metrics: str) -> EngineWork | None:
    """Read the counters from vLLM's metrics in Prometheus text format.

    Returns: None when one of them is not there or holds no finite number.
    """
    found: dict[str, list[float]] = {name: [] for name in _COUNTERS}
    for line in metrics.split("\n"):
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name not in found:
            continue
        try:
            value = float(line.rsplit("}", 1)[-1].removeprefix(name).split()[0])
        except (ValueError, IndexError):
            return None
        if not math.isfinite(value):
            return None
        found[name].append(value)
    if not all(found.values()):
        return None
    tokens, tokens_s, steps, ended, prefills_s = (sum(found[name]) for name in _COUNTERS)
    return EngineWork(
        tokens=tokens,
        tokens_s=tokens_s,
        steps=steps,
        ended=ended,
        prefills_s=prefills_s,
        engines=len(found[f"{STEP}_count"]),
    )
