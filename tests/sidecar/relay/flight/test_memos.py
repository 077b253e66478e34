"""A cached assignment equals a computed one, and the cache is bounded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

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


def names(count: int, chars: int) -> Iterable[str]:
    return (f"h:{number}-".ljust(chars, "x") for number in range(count))


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
