"""Assignment: sticky, frozen, and the share that was asked for."""

from __future__ import annotations

import pytest

from sidecar.records import Assignment
from sidecar.routing.assignment import CompiledRouting, bucket
from sidecar.routing.table import RoutingTable, decode_table, encode_table


@pytest.mark.parametrize(
    ("salt", "key", "expected"),
    # Frozen: another value would move sessions between arms on the day of an upgrade.
    [
        ("", "m:0", 6256),
        ("s", "h:s-1", 4071),
        ("canary-2026", "m:9f3a", 3941),
        ("s", "Grüße", 9177),
    ],
)
def test_buckets_never_change(salt: str, key: str, expected: int) -> None:
    assert bucket(salt, key) == expected


def _table(weight: int) -> RoutingTable:
    return RoutingTable(
        model="m", champion="m--v1", canary="m--v2", canary_weight_bp=weight, salt="s"
    )


def assign(table: RoutingTable, session_key: str) -> Assignment:
    """Who answers this session."""
    return CompiledRouting(table).routes(session_key)[0]


@pytest.mark.parametrize("weight", [100, 2_000, 5_000])
def test_the_canary_gets_its_share(weight: int) -> None:
    keys = [f"m:{number}" for number in range(20_000)]

    share = sum(assign(_table(weight), key).arm == "canary" for key in keys) / len(keys)

    # Four standard deviations of a binomial at n = 20000.
    assert (
        abs(share - weight / 10_000) < 4 * (weight / 10_000 * (1 - weight / 10_000) / 20_000) ** 0.5
    )


def test_an_assignment_says_the_odds_it_had() -> None:
    table = _table(2_500)
    arms = {assign(table, f"k{number}") for number in range(100)}

    assert arms == {
        Assignment(adapter="m--v2", arm="canary", propensity=0.25, upstream_model="m--v2"),
        Assignment(adapter="m--v1", arm="champion", propensity=0.75, upstream_model="m--v1"),
    }


def test_without_adapters_the_base_answers_under_the_public_name() -> None:
    assert assign(RoutingTable(model="m"), "k") == Assignment(
        adapter="base", arm="champion", propensity=1.0, upstream_model="m"
    )


def test_a_missing_champion_is_answered_for_by_the_base() -> None:
    routes = CompiledRouting(RoutingTable(model="m", champion="m--v1")).routes("k")

    assert routes[1:] == (
        Assignment(adapter="base", arm="champion", propensity=1.0, upstream_model="m"),
    )


def test_a_table_survives_the_store() -> None:
    assert decode_table(encode_table(_table(7))) == _table(7)
