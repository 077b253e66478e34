"""What vLLM's metrics say of its load, and when it leaves room."""

from __future__ import annotations

import pytest

from ingest.errors import SamplingError
from ingest.vllm.load import EngineLoad, LoadGate, LoadLimits, parse_load

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2-135m"} 3.0
vllm:num_requests_running{engine="1",model_name="smollm2-135m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="smollm2-135m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="smollm2-135m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2-135m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2-135m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="smollm2-135m"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="smollm2-135m"} 1e+06
"""


def test_the_load_is_summed_over_engines_and_the_fullest_cache_counts() -> None:
    assert parse_load(METRICS) == EngineLoad(running=7, waiting=2, kv_cache_usage=0.5)


def test_metrics_without_the_load_are_an_error_and_not_an_idle_engine() -> None:
    with pytest.raises(SamplingError, match="disable-log-stats"):
        parse_load("vllm:prompt_tokens_total 3\n")
    with pytest.raises(SamplingError, match="cannot read"):
        parse_load('vllm:num_requests_running{engine="0"} many\n')


@pytest.mark.parametrize(
    "line",
    ['{engine="0"', "{,\t=x} 1", "{} NaN", "{} +Inf", '{engine="0"} 1_0', " many", "{" * 9_000],
)
def test_a_load_that_cannot_be_read_is_an_error(line: str) -> None:
    with pytest.raises(SamplingError, match="cannot"):
        parse_load(f"vllm:num_requests_running{line}\n{METRICS}")


def test_garbage_in_other_metrics_costs_nothing() -> None:
    garbage = '}{ x="\n\x00\nvllm:num_requests_waiting_by_reason{,= many\n# TYPE\n'

    assert parse_load(garbage + METRICS) == parse_load(METRICS)


def test_a_load_without_labels_or_with_odd_ones_is_read() -> None:
    metrics = (
        "vllm:num_requests_running 2\n"
        'vllm:num_requests_waiting{model_name="a}b{\\"c 9",engine="0"} 1.0 1700000000\n'
    )

    kv = "vllm:kv_cache_usage_perc\t0.5\n"

    assert parse_load(metrics + kv) == EngineLoad(running=2, waiting=1, kv_cache_usage=0.5)


@pytest.mark.parametrize("missing", ["running", "waiting", "kv_cache"])
def test_a_load_of_which_one_metric_is_missing_is_an_error(missing: str) -> None:
    left = [line for line in METRICS.splitlines() if missing not in line]

    with pytest.raises(SamplingError, match=f"hold no vllm:.*{missing}"):
        parse_load("\n".join(left))


def gate_of(*, requests: int = 8, kv_cache_usage: float = 0.8) -> LoadGate:
    return LoadGate(LoadLimits(requests=requests, kv_cache_usage=kv_cache_usage))


def measure(
    gate: LoadGate, running: int = 0, waiting: int = 0, kv: float = 0.0, own: int = 0
) -> bool:
    return gate.update(EngineLoad(running=running, waiting=waiting, kv_cache_usage=kv), own=own)


def test_the_gate_closes_above_the_limit_of_users_and_opens_at_three_quarters_of_it() -> None:
    gate = gate_of(requests=8)

    assert measure(gate, 8)
    assert not measure(gate, 9)
    assert not measure(gate, 7)  # under the limit, but not well under it
    assert not measure(gate, 6)
    assert measure(gate, 6)  # the second in a row
    assert measure(gate, 8)  # and going up again it stays open to the limit
    assert measure(gate, 24, own=16)  # 8 users' and 16 of ours
    assert not measure(gate, 25, own=16)
    assert not measure(gate, 3, own=16)  # the figures lag behind what was just sent
    assert measure(gate, 3, own=16)


def test_the_gate_closes_when_a_request_waits_whoever_sent_it() -> None:
    gate = gate_of()

    assert not measure(gate, running=1, waiting=1)
    assert not measure(gate, running=8, waiting=1, own=16)
    assert not measure(gate, running=1)
    assert measure(gate, running=1)


def test_the_gate_closes_above_the_limit_of_the_kv_cache_and_opens_at_three_quarters() -> None:
    gate = gate_of(kv_cache_usage=0.8)

    assert measure(gate, kv=0.8)
    assert not measure(gate, kv=0.81)
    assert not measure(gate, kv=0.61)
    assert not measure(gate, kv=0.59)
    assert not measure(gate, kv=0.61)  # not two in a row
    assert not measure(gate, kv=0.59)
    assert measure(gate, kv=0.59)
    assert measure(gate, kv=0.79)


def test_a_limit_of_one_lets_the_cache_fill() -> None:
    assert measure(gate_of(kv_cache_usage=1.0), kv=1.0)
