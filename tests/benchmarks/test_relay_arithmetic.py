"""The relay benchmark's figures, worked by hand."""

from __future__ import annotations

import pytest

from benchmarks.relay.ends import LoadReport
from benchmarks.relay.histogram import Histogram, percentile_us
from benchmarks.relay.measure import Sample
from benchmarks.relay.memory import Soak, soak_target
from benchmarks.relay.scan import growth_us_per_mb, scan_rows, scan_targets
from benchmarks.relay.summary import Samples, cpu_per_request, targets


def sample(
    contender: str,
    scenario: str = "small32",
    number: int = 0,
    *,
    cpu: float | None = None,
    requests: int = 1_000,
    events: int = 0,
    latency: Histogram = ((1_000, 1),),
    proxy_core: float = 1.0,
) -> Sample:
    """One window of one second."""
    report = LoadReport(
        seconds=1.0,
        requests=requests,
        events=events,
        refused=0,
        broken=0,
        replies_ever=requests,
        fewest_events=0,
        most_events=0,
        latency=latency,
        first_byte=latency,
    )
    return Sample(
        contender=contender,
        scenario=scenario,
        round=number,
        report=report,
        cpu_share=cpu,
        proxy_core=proxy_core,
        ends_core=0.5,
        rss_mb=10.0,
        peak_rss_mb=11.0,
    )


def test_a_percentile_is_the_smallest_value_that_reaches_the_share() -> None:
    histogram = [(1_000, 50), (2_000, 49), (9_000, 1)]

    assert percentile_us(histogram, 0.50) == 1.0
    assert percentile_us(histogram, 0.51) == 2.0
    assert percentile_us(histogram, 0.99) == 2.0
    assert percentile_us(histogram, 1.0) == 9.0


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    # Rounds: 20/10, 90/30, 40/40. The medians' ratio would be 40/30.
    pairs = [(0.02, 0.01), (0.09, 0.03), (0.04, 0.04)]
    samples = Samples(
        one
        for number, (mine, theirs) in enumerate(pairs)
        for one in (
            sample("ours-off", number=number, cpu=mine),
            sample("nginx", number=number, cpu=theirs),
        )
    )

    assert samples.ratio("ours-off", "nginx", "small32", cpu_per_request) == pytest.approx(2.0)


def test_other_work_is_what_the_core_did_beside_the_contender() -> None:
    samples = Samples(
        [
            sample("upstream", proxy_core=1.0),
            sample("nginx", cpu=0.5, proxy_core=0.9),
            sample("ours-off", cpu=0.8, proxy_core=0.9),
            sample("ours-on", cpu=0.92, proxy_core=0.9),
        ]
    )

    assert samples.other_work() == pytest.approx(0.1)


BOUNDS = {
    "CPU per request, ours-off / nginx, 32 connections": 2.0,
    "CPU per request, ours-off / vllm-router, 32 connections": 0.5,
    "CPU per request, ours-on / vllm-router, 32 connections": 1.5,
    "CPU per request, ours-on / litellm, 32 connections": 1 / 60,
    "CPU per SSE event, ours-off / nginx, 8 streams": 1.5,
    "CPU per SSE event, ours-on / nginx, 8 streams": 2.0,
    "CPU per SSE event, ours-off / nginx, 100 streams": 1.5,
    "CPU per SSE event, ours-on / nginx, 100 streams": 2.0,
}


def full_run(*, ours: float = 1.0) -> Samples:
    """Every contender, each at its bound with ours = 1. CPU shares of 1,000 replies or events."""
    found = []
    for scenario in ("small32", "sse8", "sse100"):
        streams = scenario != "small32"
        off, on = (0.03, 0.04) if streams else (0.04, 0.12)
        shares = {
            "nginx": 0.02,
            "vllm-router": 0.08,
            "litellm": 7.2,
            "ours-off": off * ours,
            "ours-on": on * ours,
        }
        found += [sample(name, scenario, cpu=share, events=1_000) for name, share in shares.items()]
    # One connection: each of ours adds a millisecond to the upstream's 20 us.
    latencies = {"upstream": 20_000, "ours-off": 1_020_000, "ours-on": 1_020_000}
    found += [
        sample(name, "small1", cpu=0.02, latency=[(value, 1)]) for name, value in latencies.items()
    ]
    return Samples(found)


def test_all_targets_hold_at_their_bounds() -> None:
    judged = targets(full_run(ours=0.999_999))

    assert len(judged) == 11
    assert [target.what for target in judged if not target.holds] == []


def test_a_sidecar_that_costs_more_fails_the_cpu_targets_and_no_other() -> None:
    judged = targets(full_run(ours=1.01))

    assert {target.what for target in judged if not target.holds} == set(BOUNDS)


def test_a_load_that_does_not_fill_nginx_is_no_measure() -> None:
    judged = targets(Samples([sample("nginx", cpu=0.5, proxy_core=0.9)]))

    last = judged[-1]
    assert "nginx's core is full" in last.what
    assert not last.holds


def soaked(rss_mb: tuple[float, ...]) -> Soak:
    return Soak(
        contender="ours-on",
        seconds=8.0,
        requests=1_000,
        rss_mb=rss_mb,
        peak_rss_mb=max(rss_mb),
        captures_kept=1_000.0,
        captures_lost=0.0,
    )


def test_memory_that_settles_after_the_warm_up_is_flat() -> None:
    assert soak_target(soaked((50.0, 90.0, 100.0, 100.0, 100.0, 100.0, 103.0, 103.0))).holds


def test_memory_that_goes_on_growing_is_not_flat() -> None:
    target = soak_target(soaked((50.0, 90.0, 100.0, 100.0, 102.0, 104.0, 106.0, 108.0)))

    assert not target.holds
    assert target.value == 0.07


def test_the_growth_by_prompt_is_measured_in_scans() -> None:
    # 1,000 replies a second: a share of 0.1 is 100 microseconds each; 0.999 MB lie between.
    samples = Samples(
        [
            sample("nginx", "prompt1k", cpu=0.1),
            sample("nginx", "prompt1m", cpu=0.1 + 0.999 * 0.7),
            sample("ours-off", "prompt1k", cpu=0.2),
            sample("ours-off", "prompt1m", cpu=0.2 + 0.999 * 1.0),
            sample("nginx", "opening1m", cpu=0.1 + 0.999 * 0.7),
            sample("ours-off", "opening1m", cpu=0.2 + 0.999 * 1.3),
        ]
    )
    scans = {"msgspec peek": 400.0, "memchr": 10.0}

    target, of_one_message = scan_targets(samples, scans)

    assert growth_us_per_mb(samples, "nginx") == pytest.approx(700.0)
    assert target.value == pytest.approx(0.75)
    assert target.holds
    assert of_one_message.value == pytest.approx(1.5)
    assert not of_one_message.holds
    assert [one["contender"] for one in scan_rows(samples, ("nginx", "ours-off"), scans)] == [
        "nginx",
        "ours-off",
        "msgspec peek",
        "memchr",
    ]
