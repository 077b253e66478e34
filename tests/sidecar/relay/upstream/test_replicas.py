"""Which replica answers: affinity, bounded load, ejection, health, models. Pure."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from sidecar.relay.replicas import FAILURES_TO_EJECT, Replica, Replicas
from sidecar.relay.upstream import endpoint

MODEL = "m"
SESSIONS = [f"h:session-{number}" for number in range(300)]


def replicas(count: int) -> Replicas:
    urls = [f"http://10.0.0.{number}:8000" for number in range(1, count + 1)]
    return Replicas([Replica(endpoint(url), connect_timeout_s=1.0) for url in urls])


def chosen(pool: Replicas, session: str, now: float = 0.0, model: str = MODEL) -> Replica:
    replica = pool.choose(model, session, (), now)
    assert replica is not None
    return replica


def homes(pool: Replicas, now: float = 0.0) -> dict[str, str]:
    return {session: chosen(pool, session, now).url for session in SESSIONS}


def eject(replica: Replica, now: float) -> None:
    assert [replica.failed(now) for _ in range(FAILURES_TO_EJECT)] == [False, False, True]


def test_a_single_replica_is_asked_whatever_is_known_of_it() -> None:
    pool = replicas(1)
    pool.all[0].healthy = False
    pool.all[0].models = frozenset()
    eject(pool.all[0], 0.0)

    assert chosen(pool, "h:a") is pool.all[0]
    assert pool.choose(MODEL, "h:a", pool.all, 0.0) is None


def test_a_session_has_one_home_in_every_process_and_homes_are_spread() -> None:
    first, second = homes(replicas(3)), homes(replicas(3))

    assert first == second
    assert min(Counter(first.values()).values()) > 60  # 100 each, if chance were perfect


def test_one_replica_less_moves_only_the_sessions_that_it_had() -> None:
    pool = replicas(4)
    before = homes(pool)

    pool.all[2].healthy = False
    after = homes(pool)

    moved = {session for session in SESSIONS if before[session] != after[session]}
    assert moved == {session for session in SESSIONS if before[session] == pool.all[2].url}
    assert len({after[session] for session in moved}) == 3
    pool.all[2].healthy = True
    assert homes(pool) == before


def test_a_home_over_its_share_sends_new_work_to_the_least_loaded() -> None:
    pool = replicas(3)
    home = chosen(pool, "h:a")
    others = [replica for replica in pool.all if replica is not home]
    for replica, load in zip((home, *others), (4, 5, 3), strict=True):
        replica.in_flight = load
    # (4 + 5 + 3 + 1) / 3 * 1.25 = 5.4, so up to 6 in flight a home takes its own.
    assert chosen(pool, "h:a") is home

    home.in_flight = 6  # (6 + 5 + 3 + 1) / 3 * 1.25 = 6.25: 7
    assert chosen(pool, "h:a") is home
    home.in_flight = 7  # (7 + 5 + 3 + 1) / 3 * 1.25 = 6.7: 7
    assert chosen(pool, "h:a") is others[1]


@given(st.lists(st.integers(0, 299), min_size=1, max_size=200), st.integers(2, 5))
def test_no_replica_gets_more_than_its_share(arrivals: list[int], count: int) -> None:
    """Nothing ends: the hottest session cannot pile its work on one replica."""
    pool = replicas(count)

    for number in arrivals:
        total = sum(replica.in_flight for replica in pool.all)
        replica = chosen(pool, SESSIONS[number])
        replica.in_flight += 1
        assert replica.in_flight <= -(-1.25 * (total + 1) // count)


def test_without_a_session_the_least_loaded_answers() -> None:
    pool = replicas(3)
    pool.all[0].in_flight, pool.all[1].in_flight, pool.all[2].in_flight = 2, 1, 3

    assert chosen(pool, "") is pool.all[1]


def test_three_failures_in_a_row_eject_and_the_time_doubles_up_to_a_minute() -> None:
    replica = replicas(2).all[0]
    now, times_s = 100.0, []
    for _ in range(7):
        eject(replica, now)
        times_s.append(replica.ejected_until - now)
        assert not replica.usable(replica.ejected_until - 0.001)
        now = replica.ejected_until
        assert replica.usable(now)

    assert times_s == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_an_answer_between_failures_starts_the_count_and_the_times_anew() -> None:
    replica = replicas(2).all[0]
    replica.failed(0.0)
    replica.failed(0.0)
    replica.answered()
    assert [replica.failed(0.0), replica.failed(0.0), replica.failed(0.0)] == [False, False, True]
    eject(replica, 2.0)
    assert replica.ejected_until == 6.0

    replica.answered()
    eject(replica, 100.0)

    assert replica.ejected_until == 102.0


def test_when_none_is_in_health_all_are_asked_rather_than_none() -> None:
    pool = replicas(2)
    before = homes(pool)
    for replica in pool.all:
        replica.healthy = False
    eject(pool.all[1], 0.0)

    assert homes(pool) == before


def test_one_in_health_that_is_ejected_is_preferred_to_one_that_is_known_to_be_away() -> None:
    pool = replicas(2)
    pool.all[0].healthy = False
    eject(pool.all[1], 0.0)

    assert set(homes(pool).values()) == {pool.all[1].url}
    assert pool.least_loaded(0.0) is pool.all[1]


def test_requests_that_fail_while_it_is_ejected_do_not_eject_it_for_longer() -> None:
    replica = replicas(2).all[0]
    eject(replica, 0.0)

    assert [replica.failed(1.9) for _ in range(30)] == [False] * 30

    assert replica.usable(2.0)
    eject(replica, 2.0)
    assert replica.ejected_until == 6.0


def test_one_in_health_is_preferred_to_one_that_has_the_adapter_and_is_not() -> None:
    pool = replicas(2)
    pool.all[0].models, pool.all[1].models = frozenset({MODEL, "x"}), frozenset({MODEL})
    pool.all[0].healthy = False

    assert {chosen(pool, session, model="x").url for session in SESSIONS} == {pool.all[1].url}


def test_a_model_that_one_lists_is_asked_for_there() -> None:
    pool = replicas(3)
    for replica in pool.all:
        replica.models = frozenset({MODEL})
    pool.all[1].models = frozenset({MODEL, "x"})

    assert {chosen(pool, session, model="x") for session in SESSIONS} == {pool.all[1]}
    assert len({chosen(pool, session) for session in SESSIONS}) == 3


@pytest.mark.parametrize("said", [None, frozenset({MODEL})])
def test_a_model_that_none_lists_is_asked_for_all_the_same(said: frozenset[str] | None) -> None:
    """The lists are seconds old, or were not given."""
    pool = replicas(3)
    before = homes(pool)
    for replica in pool.all:
        replica.models = said

    assert {session: chosen(pool, session, model="x").url for session in SESSIONS} == before


def test_a_replica_that_said_it_lacks_a_model_is_asked_for_others_only() -> None:
    pool = replicas(2)
    for replica in pool.all:
        replica.models = frozenset({MODEL, "x"})
    pool.all[0].lacks("x")

    assert {chosen(pool, session, model="x") for session in SESSIONS} == {pool.all[1]}
    assert len({chosen(pool, session) for session in SESSIONS}) == 2
    assert not pool.another_serves("x", [pool.all[1]])
    assert pool.another_serves("x", [pool.all[0]])


def test_who_has_not_said_what_it_serves_is_not_known_to_serve_it() -> None:
    pool = replicas(2)

    assert pool.all[0].serves("x")  # it may be asked
    assert not pool.another_serves("x", ())  # but nobody counts on it


def test_who_was_tried_is_not_asked_again_and_at_the_end_nobody_is_left() -> None:
    pool = replicas(3)
    tried: list[Replica] = []
    while (replica := pool.choose(MODEL, "h:a", tried, 0.0)) is not None:
        assert replica not in tried
        tried.append(replica)

    assert set(tried) == set(pool.all)


def test_what_has_no_model_goes_to_the_least_loaded_in_health() -> None:
    pool = replicas(3)
    pool.all[0].healthy = False
    pool.all[1].in_flight = 1
    assert pool.least_loaded(0.0) is pool.all[2]

    pool.all[1].healthy = pool.all[2].healthy = False
    assert pool.least_loaded(0.0) in (pool.all[0], pool.all[2])
