"""The relay's own counters: what they cost in correctness is nothing."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sidecar.metrics.families import (
    REGION_BYTES,
    MetricTable,
    map_regions,
    mark_dead,
    private_region,
    read_region,
    shared_memory,
)
from sidecar.metrics.hot import MetricSet

BOUNDS = (0.1, 0.5, 2.0)
WHEN = 1_700_000_000.5


def metric_set(
    region: memoryview | None = None, others: tuple[memoryview, ...] = (), at: float = WHEN
) -> tuple[MetricSet, CollectorRegistry, MetricTable]:
    registry = CollectorRegistry()
    table = MetricTable(region)
    return MetricSet(registry, table, others, clock=lambda: at), registry, table


def test_the_exposition_is_what_prometheus_client_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: WHEN)
    theirs = CollectorRegistry()
    plain = Counter("a", "Plain.", registry=theirs)
    labelled = Counter("b", "With labels.", ["x", "y"], registry=theirs)
    gauge = Gauge("c", "Number now.", registry=theirs)
    histogram = Histogram("d_seconds", "How long.", buckets=BOUNDS, registry=theirs)
    Counter("e", "Never counted.", ["x"], registry=theirs)
    make, ours, _ = metric_set()
    our_plain = make.counter("a", "Plain.")
    our_labelled = make.labelled_counter("b", "With labels.", ["x", "y"])
    our_gauge = make.gauge("c", "Number now.")
    our_histogram = make.histogram("d_seconds", "How long.", bounds=BOUNDS)
    make.labelled_counter("e", "Never counted.", ["x"])
    assert generate_latest(ours) == generate_latest(theirs), "before anything is counted"

    plain.inc(3)
    our_plain.inc(3)
    labelled.labels("200", 'quo"te').inc(3)
    our_labelled.inc((b"200", 'quo"te'), by=3)
    gauge.set(7)
    gauge.dec()
    our_gauge.set(7)
    our_gauge.dec()
    for value in (0.05, 0.1, 0.3, 2.0, 2.1):  # a value at a bound belongs to it
        histogram.observe(value)
        our_histogram.observe(value)

    assert generate_latest(ours) == generate_latest(theirs)


@given(st.lists(st.one_of(st.sampled_from([0.0, -1.0, math.inf, *BOUNDS]), st.floats(-5, 5))))
def test_a_histogram_counts_each_value_where_it_belongs_whatever_came_before(
    values: list[float],
) -> None:
    make, registry, _ = metric_set()
    histogram = make.histogram("t", "Time.", bounds=BOUNDS)

    for value in values:
        histogram.observe(value)

    for bound in (*BOUNDS, math.inf):
        label = "+Inf" if bound == math.inf else repr(bound)
        assert registry.get_sample_value("t_bucket", {"le": label}) == sum(
            value <= bound for value in values
        )


def test_counters_and_histograms_of_all_processes_are_added_up_by_hand() -> None:
    left_region, right_region = private_region(), private_region()
    left, registry, left_table = metric_set(left_region, (right_region,), at=20.0)
    right, _, right_table = metric_set(right_region, at=10.0)
    left_table.open()
    right_table.open()
    for make, counts, values in ((left, 3, (0.1, 5.0)), (right, 4, (0.2,))):
        make.labelled_counter("n", "Number.", ["k"]).inc(("a",), by=counts)
        histogram = make.histogram("t", "Time.", bounds=BOUNDS)
        for value in values:
            histogram.observe(value)
        make.gauge("g", "Sum.").set(counts)
        make.gauge("m", "Least.", merge="min").set(counts)

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert sample("n_total", k="a") == 3 + 4
    assert sample("n_created", k="a") == 10.0, "the earliest"
    assert [sample("t_bucket", le=le) for le in ("0.1", "0.5", "2.0", "+Inf")] == [1, 2, 2, 3]
    assert sample("t_count") == 3
    assert sample("t_sum") == pytest.approx(5.3)
    assert (sample("g"), sample("m")) == (7, 3)


def test_a_dead_process_keeps_its_counters_and_loses_its_gauges() -> None:
    memory = shared_memory(2)
    own, other = map_regions(memory)
    assert len(own) == REGION_BYTES
    make, _, table = metric_set(other)
    table.open()
    counter, gauge = make.counter("n", "Number."), make.gauge("g", "Number now.")
    counter.inc(5)
    gauge.set(2)
    reader, registry, _ = metric_set(own, (other,))
    reader.counter("n", "Number.")
    reader.gauge("g", "Number now.").set(1)
    assert registry.get_sample_value("g") == 3

    mark_dead(other)
    assert (registry.get_sample_value("n_total"), registry.get_sample_value("g")) == (5, 1)

    # Its successor takes the memory over and goes on counting.
    successor, _, table = metric_set(other, at=99.0)
    again, fresh = successor.counter("n", "Number."), successor.gauge("g", "Number now.")
    assert registry.get_sample_value("g") == 1, "it does not serve yet"
    table.open()
    again.inc()
    fresh.inc()
    assert (registry.get_sample_value("n_total"), registry.get_sample_value("g")) == (6, 2)
    assert registry.get_sample_value("n_created") == WHEN


def test_a_labelled_gauge_that_the_successor_has_not_set_is_not_shown() -> None:
    region = private_region()
    make, _, table = metric_set(region)
    table.open()
    make.labelled_gauge("up", "Up.", ["replica"]).set(("http://gone",), 1)

    make, registry, table = metric_set(region)
    table.open()
    up = make.labelled_gauge("up", "Up.", ["replica"])
    assert registry.get_sample_value("up", {"replica": "http://gone"}) is None
    up.labels("http://new").set(0)
    assert registry.get_sample_value("up", {"replica": "http://new"}) == 0
    up.labels("http://new").forget()
    assert registry.get_sample_value("up", {"replica": "http://new"}) is None


def test_another_releases_numbers_of_another_shape_are_left_out() -> None:
    region = private_region()
    old, _, _ = metric_set(region)
    old.histogram("t", "Time.", bounds=(1.0,)).observe(0.5)

    new, registry, _ = metric_set(None, (region,))
    new.histogram("t", "Time.", bounds=BOUNDS).observe(0.2)

    assert registry.get_sample_value("t_count") == 1


def test_a_full_region_goes_on_counting_for_nobody() -> None:
    small = memoryview(bytearray(200))
    table = MetricTable(small)
    first, second = table.cells(b"counter first", 10), table.cells(b"counter second", 20)

    first[0] += 1
    second[0] += 1

    assert list(read_region(small)) == [b"counter first"]
    assert table.cells(b"counter second", 20) is second


def test_threads_may_share_a_counter_that_is_made_for_it() -> None:
    make, registry, _ = metric_set()
    lost = make.labelled_counter("lost", "Lost.", ["reason"], threads=True)

    def count() -> None:
        for _ in range(20_000):
            lost.inc(("full",))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert registry.get_sample_value("lost_total", {"reason": "full"}) == 80_000
