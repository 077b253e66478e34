"""Prometheus metrics of the judges, made of durable counters and of what score says of its judges.

The label `judge` is a model name of the settings, cut at `MODEL_CHARACTERS`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from sqlalchemy.orm import Session

from ingest.judge_watch import BOUNDS, LAST, NANO, NANO_USD, SUM, TOKENS, read_judge_state
from ingest.judges.spending import (
    ASKED,
    ESTIMATED,
    MILLISECONDS,
    PAID,
    PROMPTS,
    REPLIES,
    read_spending,
)
from sidecar.settings import Judge as JudgeSettings

Counters = Mapping[str, Mapping[str, int]]
"""Stage -> reason -> count."""
BREAKERS = ("closed", "half_open", "open")


def judge_metrics(
    session: Session, counters: Counters, settings: JudgeSettings, *, now: float | None = None
) -> Iterator[Metric]:
    """Yield every metric of the judges. now: Unix seconds; None: the present."""
    now = time.time() if now is None else now
    yield from _calls(counters)
    yield from _costs(counters)
    yield from _groups(counters)
    yield from _breakers(session)
    yield from _budgets(session, settings, now)


def _calls(counters: Counters) -> Iterator[Metric]:
    calls = CounterMetricFamily(
        "sidecar_judge_calls", "Calls of a judge, by outcome.", labels=["judge", "outcome"]
    )
    numbers: dict[str, int] = {}
    for reason, number in counters.get(ASKED, {}).items():
        outcome, _, judge = reason.partition(" ")
        calls.add_metric([judge, outcome], number)
        numbers[judge] = numbers.get(judge, 0) + number
    seconds = SummaryMetricFamily(
        "sidecar_judge_call_seconds", "Time of a call, whatever its outcome.", labels=["judge"]
    )
    milliseconds = counters.get(MILLISECONDS, {})
    for judge, number in numbers.items():
        total_s = milliseconds.get(judge, 0) / 1_000
        seconds.add_metric([judge], count_value=number, sum_value=total_s)
    yield from (calls, seconds)


def _costs(counters: Counters) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "sidecar_judge_tokens",
        "Tokens as the provider reported them.",
        labels=["judge", "kind"],
    )
    for stage, kind in ((PROMPTS, "prompt"), (REPLIES, "reply")):
        for judge, number in counters.get(stage, {}).items():
            tokens.add_metric([judge, kind], number)
    dollars = CounterMetricFamily(
        "sidecar_judge_cost_usd", "US dollars, by known prices.", labels=["judge"]
    )
    for judge, number in counters.get(PAID, {}).items():
        dollars.add_metric([judge], number / NANO)
    estimated = CounterMetricFamily(
        "sidecar_judge_estimated_calls",
        "Calls whose use nobody reported, in the budgets by an estimate.",
        labels=["judge"],
    )
    for judge, number in counters.get(ESTIMATED, {}).items():
        estimated.add_metric([judge], number)
    yield from (tokens, dollars, estimated)


def _groups(counters: Counters) -> Iterator[Metric]:
    for stage, name, what, unit in (
        (TOKENS, "sidecar_judge_group_tokens", "Tokens of judging one group.", 1),
        (NANO_USD, "sidecar_judge_group_cost_usd", "US dollars of judging one group.", NANO),
    ):
        found = counters.get(stage, {})
        total, buckets = 0, []
        for bound in BOUNDS[stage]:
            total += found.get(f"le_{bound}", 0)
            buckets.append((f"{bound / unit:g}", total))
        buckets.append(("+Inf", total + found.get(LAST, 0)))
        family = HistogramMetricFamily(name, what)
        family.add_metric([], buckets, sum_value=found.get(SUM, 0) / unit)
        yield family


def _breakers(session: Session) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "sidecar_judge_breaker",
        "1: the judge is in this state of its circuit breaker, as score last saw it.",
        labels=["judge", "state"],
    )
    state = read_judge_state(session)
    for judge in () if state is None else state.judges:
        for name in BREAKERS:
            family.add_metric([judge.model, name], float(judge.breaker == name))
    yield family
    family = GaugeMetricFamily(
        "sidecar_judge_without",
        "1: the judge refused this part of a request, and is asked without it.",
        labels=["judge", "part"],
    )
    for judge in () if state is None else state.judges:
        for part in judge.without:
            family.add_metric([judge.model, part], 1.0)
    yield family


def _budgets(session: Session, settings: JudgeSettings, now: float) -> Iterator[Metric]:
    spending = read_spending(session, now=now)
    spent = GaugeMetricFamily(
        "sidecar_judge_spent_usd",
        "US dollars of this day (UTC), with what calls in flight may cost.",
        labels=["period"],
    )
    budget = GaugeMetricFamily(
        "sidecar_judge_budget_usd", "The budget in US dollars; 0: no limit.", labels=["period"]
    )
    spent.add_metric(["day"], spending.nano_usd_today / NANO)
    budget.add_metric(["day"], settings.budget)
    yield from (spent, budget)
    yield GaugeMetricFamily(
        "sidecar_judge_spent_tokens",
        "Tokens of this day (UTC), with what calls in flight may use.",
        value=spending.tokens_today,
    )
    yield GaugeMetricFamily(
        "sidecar_judge_budget_tokens",
        "The budget of tokens a day; 0: no limit.",
        value=settings.budget_tokens,
    )
