"""How busy vLLM is, and whether there is room for work that nobody waits for. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ingest.errors import SamplingError

# What vLLM's counters say of its work: steps, tokens, and the time they took. Pure.

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


RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"

REOPEN_SHARE = 0.75
"""The gate opens again at this share of the limits, so that it does not flutter around them."""
REOPEN_AFTER = 2
"""Measurements in a row that must find room before the gate opens again. A limit of no waiting
request has no lower one, and an engine that is just full shows waiting requests now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What is in the engine at one moment, over all its ranks."""

    running: int
    waiting: int
    kv_cache_usage: float
    """0..1, of the fullest rank."""
    work: EngineWork | None = None
    """Counters of the work done; None: vLLM does not tell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """Above one of them an engine gets no candidates; nor while a request waits in it."""

    requests: int
    """Users' requests, running and waiting."""
    kv_cache_usage: float
    """Share of the KV cache in use, 0..1, whoever uses it."""
    max_slowdown: float = 0.0
    """Share by which candidates may slow users (`ingest.vllm.throttle`); 0: no limit."""


def parse_load(metrics: str) -> EngineLoad:
    """Read the load from vLLM's metrics in Prometheus text format.

    Each metric has one line per engine (data parallel rank), told apart by labels.
    Raises: SamplingError when a line cannot be read or holds no finite number, or when one of the
    three metrics is not there (`--disable-log-stats`).
    """
    found: dict[str, list[float]] = {RUNNING: [], WAITING: [], KV_CACHE_USAGE: []}
    # Only the lines that matter are parsed: a page has thousands, and a bad one among the others
    # must not cost the load.
    starts = tuple(f"{name}{after}" for name in found for after in "{ \t")
    wanted = [line for line in metrics.split("\n") if line.startswith(starts)]
    for line in wanted:
        try:
            families = list(text_string_to_metric_families(line))
        except (ValueError, IndexError) as error:  # the parser raises both for text it cannot read
            raise SamplingError(f"vLLM's metrics: cannot read {line[:200]!r}") from error
        for sample in (sample for family in families for sample in family.samples):
            if not math.isfinite(sample.value):
                raise SamplingError(f"vLLM's metrics: cannot use {line[:200]!r}")
            if sample.name in found:
                found[sample.name].append(sample.value)
    if missing := [name for name, values in found.items() if not values]:
        raise SamplingError(
            f"vLLM's metrics hold no {' and no '.join(missing)}; start it without "
            "--disable-log-stats"
        )
    return EngineLoad(
        running=round(sum(found[RUNNING])),
        waiting=round(sum(found[WAITING])),
        kv_cache_usage=max(found[KV_CACHE_USAGE]),
        work=parse_work(metrics),
    )


class LoadGate:
    """Open while the users leave room. Closes above a limit, opens again well below them all."""

    def __init__(self, limits: LoadLimits) -> None:
        self._limits = limits
        self._open = True
        self._roomy = 0
        """Measurements in a row that found room."""

    def update(self, load: EngineLoad, *, own: int) -> bool:
        """Take a new measurement. own: our candidates in flight, which are not users'.

        A waiting request closes the gate also when it is one of ours: the engine is full.
        Returns: whether the gate is open now.
        """
        # The gauges lag behind what was just sent, so ours may not be counted in them yet.
        users = max(0, load.running + load.waiting - own)
        limits, kv = self._limits, load.kv_cache_usage
        if load.waiting > 0 or users > limits.requests or kv > limits.kv_cache_usage:
            self._open, self._roomy = False, 0
        elif users <= limits.requests * REOPEN_SHARE and kv <= limits.kv_cache_usage * REOPEN_SHARE:
            self._roomy += 1
            self._open = self._open or self._roomy >= REOPEN_AFTER
        else:
            self._roomy = 0
        return self._open
