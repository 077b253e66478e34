"""A cached assignment or counter equals a computed one, and the caches are bounded."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from sidecar.metrics.proxy import Metrics
from sidecar.records import Assignment
from sidecar.relay.context import REMEMBERED, Accounts
from sidecar.routing import assignment
from sidecar.routing.assignment import CompiledRouting, bucket
from sidecar.routing.table import RoutingTable

TABLE = RoutingTable(
    model="m", champion="m--v1", canary="m--v2", canary_weight_bp=3_000, salt="s", generation=1
)
FULL = [f"h:full-{number}" for number in range(assignment.REMEMBERED)]
LIMIT_BYTES = 4 * 2**20
"""What the assignments of one table may hold."""
keys = st.text(max_size=20) | st.sampled_from(FULL)


def expected(table: RoutingTable, key: str) -> list[str]:
    """Who answers, and who instead, worked out without the class."""
    in_canary = bucket(table.salt, key) < table.canary_weight_bp
    return ["m--v2", "m--v1", "base"] if in_canary else ["m--v1", "base"]


def adapters(routing: CompiledRouting, key: str) -> list[str]:
    return [route.adapter for route in routing.routes(key)]


@pytest.fixture(scope="module")
def full_routing() -> CompiledRouting:
    routing = CompiledRouting(TABLE)
    for key in FULL:
        routing.routes(key)
    return routing


@given(st.lists(keys, max_size=30))
def test_an_assignment_is_the_same_whatever_was_asked_before(
    full_routing: CompiledRouting, asked: list[str]
) -> None:
    fresh = CompiledRouting(TABLE)
    for key in asked:
        assert adapters(fresh, key) == expected(TABLE, key)
        assert fresh.routes(key) is fresh.routes(key)
        assert adapters(full_routing, key) == expected(TABLE, key)


def test_more_sessions_than_are_remembered_keep_their_assignment() -> None:
    routing = CompiledRouting(TABLE)
    sessions = [f"m:{number}" for number in range(2 * assignment.REMEMBERED + 3)]

    first = [adapters(routing, key) for key in sessions]
    again = [adapters(routing, key) for key in sessions]

    assert first == again == [expected(TABLE, key) for key in sessions]
    arms = Counter(routes[0] for routes in first)
    assert 2_200 < arms["m--v2"] < 2_720  # 30 % of 8195, six deviations each way


def names(count: int, chars: int) -> Iterable[str]:
    return (f"h:{number}-".ljust(chars, "x") for number in range(count))


def test_sessions_with_long_and_longer_keys_keep_their_assignment() -> None:
    routing = CompiledRouting(TABLE)
    long, longer = assignment.REMEMBERED_CHARS, assignment.REMEMBERED_CHARS + 1
    keys = [*names(20, long), *names(20, longer)]

    for _ in range(2):
        assert [adapters(routing, key) for key in keys] == [expected(TABLE, key) for key in keys]


def kept_bytes(table: RoutingTable, keys: Iterable[str]) -> int:
    """What a table's routing holds after it was asked for these sessions."""
    routing = CompiledRouting(table)
    tracemalloc.start()
    try:
        for key in keys:
            routing.routes(key)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_the_assignments_of_all_sessions_together_hold_a_bounded_number_of_bytes() -> None:
    sessions, chars = assignment.REMEMBERED, assignment.REMEMBERED_CHARS

    full = kept_bytes(TABLE, names(sessions, chars))
    over = kept_bytes(TABLE, names(10 * sessions, chars))

    assert sessions * chars < full < LIMIT_BYTES
    assert over < 1.1 * full


def test_a_key_as_long_as_a_head_is_not_kept() -> None:
    chars = assignment.REMEMBERED_CHARS

    assert kept_bytes(TABLE, names(1_000, chars)) > 1_000 * chars
    assert kept_bytes(TABLE, names(1_000, chars + 1)) < 50_000


def test_a_new_table_remembers_nothing_of_the_old_one() -> None:
    sessions = [f"m:{number}" for number in range(500)]
    old, new = CompiledRouting(TABLE), CompiledRouting(replace(TABLE, salt="other"))
    changed = [key for key in sessions if expected(TABLE, key) != expected(new.table, key)]
    assert len(changed) > 100

    for key in sessions:
        assert adapters(old, key) == expected(TABLE, key)
        assert adapters(new, key) == expected(new.table, key)


def test_where_nobody_is_split_no_session_is_kept() -> None:
    for table in (replace(TABLE, canary_weight_bp=0), RoutingTable(model="m")):
        assert kept_bytes(table, names(1_000, 200)) < 50_000
        routing = CompiledRouting(table)
        assert {routing.routes(f"k{number}") for number in range(100)} == {routing.routes("")}


# -- counters


class Counted:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.accounts = Accounts(self.metrics)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"sidecar_{name}_total", labels) or 0.0


def route(adapter: str, arm: str = "champion") -> Assignment:
    return Assignment(
        adapter=adapter,
        arm=arm,  # type: ignore[arg-type]
        propensity=1.0,
        upstream_model=adapter,
    )


def answered(counted: Counted, adapter: str, arm: str = "champion") -> float:
    return counted.value("adapter_replies", adapter=adapter, arm=arm)


def test_a_new_routing_table_moves_other_counters() -> None:
    counted = Counted()
    before = CompiledRouting(replace(TABLE, canary=None))
    after = CompiledRouting(replace(TABLE, champion="m--v2", canary=None))

    for routing, times in ((before, 3), (after, 2), (before, 1)):
        for number in range(times):
            counted.accounts.exchange("ok", routing.routes(f"k{number}")[0])

    assert (answered(counted, "m--v1"), answered(counted, "m--v2")) == (4, 2)


def test_the_same_adapter_in_two_arms_and_two_tables_is_counted_by_its_labels() -> None:
    counted = Counted()
    for arm in ("champion", "canary", "champion"):
        counted.accounts.exchange("ok", route("m--v1", arm))  # each time another object

    assert answered(counted, "m--v1", "champion") == 2
    assert answered(counted, "m--v1", "canary") == 1


def test_assignments_that_come_and_go_are_counted_right_however_many_there_are() -> None:
    """They are known by their address, which Python gives to another when one is gone."""
    counted = Counted()
    told: Counter[str] = Counter()
    for number in range(1_000):
        adapter = f"m--v{number % 7}"
        counted.accounts.exchange("ok", route(adapter))
        told[adapter] += 1

    assert {adapter: answered(counted, adapter) for adapter in told} == dict(told)
    assert counted.value("exchanges", outcome="ok") == 1_000


def test_assignments_of_old_tables_are_not_kept() -> None:
    counted = Counted()
    given = [route(f"m--v{number}") for number in range(1_000)]
    before = [sys.getrefcount(one) for one in given]
    for one in given:
        counted.accounts.exchange("ok", one)

    after = [sys.getrefcount(one) for one in given]
    kept = [number for number in range(1_000) if after[number] > before[number]]
    assert kept == list(range(1_000 - len(kept), 1_000))
    assert 0 < len(kept) <= REMEMBERED


@given(st.lists(st.sampled_from([200, 401, 404, 429, 500, 0]), max_size=30))
def test_requests_are_counted_by_their_status(statuses: list[int]) -> None:
    counted = Counted()
    for status in statuses:
        counted.accounts.request(status)

    for status, label in ((200, "200"), (401, "401"), (404, "404"), (0, "499")):
        assert counted.value("requests", status=label) == statuses.count(status)


@given(st.lists(st.sampled_from(["ok", "client_abort", "upstream_error"]), max_size=30))
def test_exchanges_are_counted_by_their_outcome(outcomes: list[str]) -> None:
    counted = Counted()
    one = route("base")
    for outcome in outcomes:
        counted.accounts.exchange(outcome, one)  # type: ignore[arg-type]

    for outcome in set(outcomes):
        assert counted.value("exchanges", outcome=outcome) == outcomes.count(outcome)
    assert answered(counted, "base") == len(outcomes)
