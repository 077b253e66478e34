"""What the judges cost, as Prometheus reads it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from deploy.funnel import read_counters
from deploy.judging import judge_metrics
from ingest.judge_watch import (
    NANO_USD,
    TOKENS,
    JudgeSeen,
    JudgeState,
    bucket_of,
    count_group,
    write_judge_state,
)
from ingest.judges.spending import ASKED, Amount, Ledger, Meter
from ingest.ruler.judge import Usage
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database
from support.stores import NewStore

NOON = 1_795_262_400.0
SETTINGS = JudgeSettings(model="openai/a", budget=5.0, budget_tokens=900)


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def scraped(database: Database, now: float = NOON) -> list[str]:
    with database.read() as session:
        found = list(judge_metrics(session, read_counters(session), SETTINGS, now=now))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(found))
    return generate_latest(registry).decode().splitlines()


@pytest.fixture
def database(new_store: NewStore) -> Database:
    return new_store()


def test_calls_time_tokens_and_money_by_judge(database: Database) -> None:
    async def ask() -> None:
        ledger = Ledger(database, SETTINGS, clock=lambda: NOON)
        meter = Meter(SETTINGS, ledger)
        meter.paid(Usage(prompt_tokens=100, completion_tokens=20, cost_usd=0.25))
        ledger.note({(ASKED, "answered openai/a"): 3, (ASKED, "judge_busy openai/a"): 1})
        ledger.note({("judge_ms", "openai/a"): 2_500, ("judge_estimated", "openai/a"): 1})
        await ledger.reserve(Amount(nano_usd=500_000_000, tokens=30), begun=False)
        await ledger.aclose()

    asyncio.run(ask())

    told = scraped(database)
    assert {
        'sidecar_judge_calls_total{judge="openai/a",outcome="answered"} 3.0',
        'sidecar_judge_calls_total{judge="openai/a",outcome="judge_busy"} 1.0',
        'sidecar_judge_call_seconds_count{judge="openai/a"} 4.0',
        'sidecar_judge_call_seconds_sum{judge="openai/a"} 2.5',
        'sidecar_judge_tokens_total{judge="openai/a",kind="prompt"} 100.0',
        'sidecar_judge_tokens_total{judge="openai/a",kind="reply"} 20.0',
        'sidecar_judge_cost_usd_total{judge="openai/a"} 0.25',
        'sidecar_judge_estimated_calls_total{judge="openai/a"} 1.0',
        'sidecar_judge_spent_usd{period="day"} 0.75',
        'sidecar_judge_budget_usd{period="day"} 5.0',
        "sidecar_judge_spent_tokens 150.0",
        "sidecar_judge_budget_tokens 900.0",
    } <= set(told)
    tomorrow = scraped(database, NOON + 86_400.0)
    assert 'sidecar_judge_spent_usd{period="day"} 0.0' in tomorrow
    assert 'sidecar_judge_cost_usd_total{judge="openai/a"} 0.25' in tomorrow


def test_the_cost_of_a_group_is_a_histogram(database: Database) -> None:
    with database.write() as session:
        count_group(session, tokens=1_000, nano_usd=100_000)
        count_group(session, tokens=1_001, nano_usd=2_000_000)
        count_group(session, tokens=999_999, nano_usd=None)

    told = scraped(database)
    assert {
        'sidecar_judge_group_tokens_bucket{le="1000"} 1.0',
        'sidecar_judge_group_tokens_bucket{le="2000"} 2.0',
        'sidecar_judge_group_tokens_bucket{le="100000"} 2.0',
        'sidecar_judge_group_tokens_bucket{le="+Inf"} 3.0',
        "sidecar_judge_group_tokens_count 3.0",
        "sidecar_judge_group_tokens_sum 1.002e+06",
        'sidecar_judge_group_cost_usd_bucket{le="0.0001"} 1.0',
        'sidecar_judge_group_cost_usd_bucket{le="0.003"} 2.0',
        'sidecar_judge_group_cost_usd_bucket{le="+Inf"} 2.0',
        "sidecar_judge_group_cost_usd_sum 0.0021",
    } <= set(told)
    assert [bucket_of(TOKENS, n) for n in (0, 1_000, 1_001)] == ["le_1000", "le_1000", "le_2000"]
    assert bucket_of(NANO_USD, 10**12) == "le_inf"


def test_each_breaker_is_in_one_state(database: Database) -> None:
    judges = (JudgeSeen(model="openai/a", breaker="open"), JudgeSeen(model="b"))
    with database.write() as session:
        write_judge_state(session, JudgeState(since=NOON, judges=judges), now=NOON)

    told = [one for one in scraped(database) if one.startswith("sidecar_judge_breaker{")]
    assert [one for one in told if one.endswith(" 1.0")] == [
        'sidecar_judge_breaker{judge="openai/a",state="open"} 1.0',
        'sidecar_judge_breaker{judge="b",state="closed"} 1.0',
    ]
    assert len(told) == 6


def test_what_a_judge_is_asked_without_is_named(database: Database) -> None:
    judges = (JudgeSeen(model="openai/a", without=("max_tokens", "seed")), JudgeSeen(model="b"))
    with database.write() as session:
        write_judge_state(session, JudgeState(since=NOON, judges=judges), now=NOON)

    assert [one for one in scraped(database) if one.startswith("sidecar_judge_without{")] == [
        'sidecar_judge_without{judge="openai/a",part="max_tokens"} 1.0',
        'sidecar_judge_without{judge="openai/a",part="seed"} 1.0',
    ]


def test_a_store_without_a_judge_has_every_family(tmp_path: Path, database: Database) -> None:
    told = "\n".join(scraped(database))
    assert "# TYPE sidecar_judge_breaker gauge" in told
    assert "# TYPE sidecar_judge_group_cost_usd histogram" in told
