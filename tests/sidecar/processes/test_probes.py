"""What probes are told, and when they are those of a load balancer."""

from __future__ import annotations

from sidecar.processes import TELL_S, WATCHED_S, Readiness


def test_two_probes_within_the_time_are_a_load_balancers_and_one_is_whoever_waits_for_a_start() -> (
    None
):
    now, told = [0.0], list[float]()
    readiness = Readiness(lambda: told.append(now[0]), lambda: now[0])

    def probe(at: float, *, works: bool = True) -> int:
        now[0] = at
        return readiness.status(works=works)

    assert [probe(at, works=False) for at in (0.0, 0.2, 0.4)] == [503] * 3  # until vLLM is there
    assert (probe(1.0), told) == (200, [])
    assert (probe(1.0 + WATCHED_S), told) == (200, [])
    assert (probe(110.0), told) == (200, [110.0])
    assert (probe(110.0 + TELL_S - 1), probe(110.0 + TELL_S)) == (200, 200)
    assert told == [110.0, 110.0 + TELL_S]


def test_a_process_that_leaves_is_not_ready() -> None:
    readiness = Readiness()
    before = readiness.status(works=True)

    readiness.leaving = True

    assert (before, readiness.status(works=True)) == (200, 503)
