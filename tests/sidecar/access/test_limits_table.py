"""The workers' table of limits: exact across processes, bounded, and never in anyone's way."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sidecar.access.limits import (
    DAY_S,
    LOCK_PAUSE_S,
    MAX_TOKENS,
    WINDOW,
    Allowance,
    TableLimiter,
    Usage,
)
from sidecar.metrics.families import map_regions, shared_memory

NOON = 20_000 * float(DAY_S) + 43_200.0
ONE = Allowance(requests_per_minute=1)
Open = Callable[[], TableLimiter]


class Seen:
    """What the limiters counted."""

    def __init__(self) -> None:
        self.unchecked: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def limiter(self, memory: int, **named: float) -> TableLimiter:
        return TableLimiter(
            memory,
            unchecked=lambda reason: self.unchecked.update([reason]),
            lost=lambda reason: self.lost.update([reason]),
            **named,
        )


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def memory() -> int:
    return shared_memory(1)


@pytest.fixture
def opened(memory: int, seen: Seen) -> Open:
    """Make one more limiter over the same memory."""
    return lambda: seen.limiter(memory)


def child(memory: int, program: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that inherited the memory, as a worker does."""
    return subprocess.Popen(
        [sys.executable, "-c", program, str(memory), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(memory,),
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


ASKER = """
import sys
from sidecar.access.limits import Allowance
from sidecar.access.limits import TableLimiter

memory, now = int(sys.argv[1]), float(sys.argv[2])
asks, per_minute, key_count = map(int, sys.argv[3:])
limiter = TableLimiter(memory, unchecked=sys.exit, lost=sys.exit, lock_wait_s=60.0)
allowance = Allowance(requests_per_minute=per_minute, tokens_per_day=10**9)
print("ready", flush=True)
sys.stdin.readline()
passed = [0] * key_count
for turn in range(asks):
    for key in range(key_count):
        passed[key] += limiter.take(f"k{key}", allowance, now).refused is None
        limiter.charge(f"k{key}", allowance, 3, now)
print(*passed)
"""


@pytest.mark.tier_2
def test_four_processes_together_admit_exactly_the_limit(memory: int, opened: Open) -> None:
    asks, limit, keys = 500, 700, 3
    processes = [child(memory, ASKER, NOON, asks, limit, keys) for _ in range(4)]
    for process in processes:
        assert said(process) == "ready"
    for process in processes:  # all of them, before the first is waited for
        tell(process, "go")
    outputs = [process.communicate(timeout=60)[0] for process in processes]

    passed = [[int(word) for word in output.split()] for output in outputs]
    assert [sum(of_key) for of_key in zip(*passed, strict=True)] == [limit] * keys
    # No charge was lost either: 4 processes, 500 turns, 3 tokens.
    allowance = Allowance(tokens_per_day=10**9)
    left = [opened().take(f"k{key}", allowance, NOON).tokens_left for key in range(keys)]
    assert left == [10**9 - 4 * asks * 3] * keys


HOLDER = """
import fcntl, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX, 0, 0)
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def held(memory: int) -> Iterator[None]:
    """Another process has the lock, and never gives it back."""
    holder = child(memory, HOLDER)
    assert said(holder) == "held"
    yield
    kill(holder)


def test_a_stopped_holder_of_the_lock_delays_nobody_and_its_death_frees_the_lock(
    memory: int, opened: Open, seen: Seen
) -> None:
    limiter = opened()
    limiter.take("k", ONE, NOON)
    with held(memory):  # a blocking lock would never return: only `kill` ends the holder
        meanwhile = [limiter.take("k", ONE, NOON).refused for _ in range(2)]

    assert meanwhile == ["requests_per_minute"] * 2, "what the worker saw spent stays spent"
    assert seen.unchecked == {"locked": 2}
    assert limiter.take("k", ONE, NOON).refused == "requests_per_minute"
    assert seen.unchecked == {"locked": 2}


def test_what_a_worker_decided_without_the_lock_is_in_the_table_once_it_has_it(
    memory: int, opened: Open, seen: Seen
) -> None:
    allowance = Allowance(requests_per_minute=10, tokens_per_day=1_000)
    limiter, other = opened(), opened()
    limiter.take("k", allowance, NOON)
    with held(memory):
        meanwhile = [limiter.take("k", allowance, NOON).refused for _ in range(4)]
        limiter.charge("k", allowance, 600, NOON)
        limiter.charge("new", allowance, 70, NOON)
    limiter.take("another", allowance, NOON)  # any request brings the debts of all keys

    assert meanwhile == [None] * 4
    standing = other.take("k", allowance, NOON)
    assert (standing.requests_left, standing.tokens_left) == (4, 400)
    assert other.take("new", allowance, NOON).tokens_left == 930
    limiter.charge("k", allowance, 400, NOON)
    assert other.take("k", allowance, NOON).refused == "tokens_per_day"


def test_while_the_lock_is_stuck_only_one_request_in_a_while_waits_for_it(
    memory: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = seen.limiter(memory, lock_wait_s=0.5)
    clock = [100.0]
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        clock[0] += 0.25

    monkeypatch.setattr("sidecar.access.limits.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("sidecar.access.limits.os.sched_yield", wait)
    with held(memory):
        for _ in range(5):
            limiter.take("k", ONE, NOON)
        waits_of_five = waits
        clock[0] += LOCK_PAUSE_S
        limiter.take("k", ONE, NOON)

    assert (waits_of_five, waits) == (2, 4)  # two steps of 0.25 s each time
    assert seen.unchecked == {"locked": 6}


DIES_WRITING = """
import fcntl, os, signal, sys
from sidecar.metrics.families import map_regions

memory, place = map(int, sys.argv[1:])
fcntl.lockf(memory, fcntl.LOCK_EX, 1, 0)
map_regions(memory)[0][place + 20 : place + 24] = b"half"
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_killed_while_it_writes_costs_one_keys_usage_and_no_more(
    memory: int, opened: Open, seen: Seen
) -> None:
    limiter = opened()
    for key in ("k", "other"):
        limiter.take(key, ONE, NOON)
    place = bytes(map_regions(memory)[0]).index(b"k\0\0\0")
    child(memory, DIES_WRITING, place).communicate(timeout=60)

    again = limiter.take("k", ONE, NOON)

    assert (again.refused, again.requests_left) == (None, 0)
    assert limiter.take("k", ONE, NOON).refused == "requests_per_minute"
    assert limiter.take("other", ONE, NOON).refused == "requests_per_minute"
    assert (seen.lost, seen.unchecked) == ({"torn": 1}, {})


def test_a_lock_that_the_kernel_refuses_is_counted_and_own_memory_decides(
    opened: Open, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = opened()

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    passed = [limiter.take("k", ONE, NOON).refused for _ in range(2)]
    limiter.charge("k", ONE, 1, NOON)

    assert passed == [None, "requests_per_minute"]
    assert seen.unchecked == {"lock_failed": 3}
    assert limiter.records() == []


@pytest.fixture
def one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys want the same 64 slots."""
    monkeypatch.setattr("sidecar.access.limits.SLOTS", WINDOW)


@pytest.mark.usefixtures("one_window")
def test_keys_beyond_the_slots_are_limited_by_each_worker_and_counted(
    opened: Open, seen: Seen
) -> None:
    limiter = opened()
    for number in range(WINDOW):
        limiter.take(f"k{number}", ONE, NOON)

    passed = [limiter.take("late", ONE, NOON).refused for _ in range(2)]

    assert passed == [None, "requests_per_minute"]
    assert seen.unchecked == {"full": 2}
    assert limiter.take("k0", ONE, NOON).refused == "requests_per_minute"


@pytest.mark.usefixtures("one_window")
def test_a_slot_whose_usage_is_spent_goes_to_another_key(opened: Open, seen: Seen) -> None:
    one, other = opened(), opened()
    for number in range(WINDOW):
        one.take(f"k{number}", ONE, NOON)
    next_day = NOON + DAY_S

    other.take("late", ONE, next_day)
    theirs = one.take("late", ONE, next_day).refused
    # The key that lost its slot finds another, and has its full allowance, as it would have had.
    back = [one.take(f"k{number}", ONE, next_day).refused for number in range(WINDOW - 1)]

    assert theirs == "requests_per_minute"
    assert back == [None] * (WINDOW - 1)
    assert (seen.lost, seen.unchecked) == ({}, {})


@pytest.mark.usefixtures("one_window")
def test_a_debt_and_the_request_that_brings_it_get_a_slot_each(memory: int, opened: Open) -> None:
    allowance = Allowance(requests_per_minute=10, tokens_per_day=1_000)
    limiter, other = opened(), opened()
    with held(memory):
        limiter.take("owing", allowance, NOON)
        limiter.charge("owing", allowance, 300, NOON)

    limiter.take("another", allowance, NOON)  # the first free slot is the same for both keys

    owing, another = (other.take(key, allowance, NOON) for key in ("owing", "another"))
    assert (owing.requests_left, owing.tokens_left) == (8, 700)
    assert (another.requests_left, another.tokens_left) == (8, 1_000)


TRIES = """
import fcntl, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB, 0, 0)
print("free")
"""


@pytest.mark.parametrize("told", [2**63, 10**400])
def test_a_reply_that_tells_more_tokens_than_a_slot_holds_is_charged_what_it_holds(
    opened: Open, seen: Seen, told: int
) -> None:
    limiter = opened()
    daily = Allowance(tokens_per_day=MAX_TOKENS)

    limiter.charge("a", daily, told, NOON)
    limiter.charge("a", daily, told, NOON)

    assert limiter.records() == [("a", Usage(NOON, 0.0, 20_000, MAX_TOKENS))]
    assert limiter.take("a", daily, NOON).refused == "tokens_per_day"
    assert seen.lost == {"too_large": 2}


def test_no_lock_is_left_behind(memory: int, opened: Open) -> None:
    limiter = opened()
    for number in range(5):
        limiter.take(f"k{number}", ONE, NOON)
        limiter.charge(f"k{number}", ONE, 1, NOON)
    limiter.restore(limiter.records())

    # Another process asks: a process's own locks never stand in its way.
    tried = child(memory, TRIES)

    assert tried.communicate(timeout=60)[0] == "free\n"


def test_an_error_leaves_the_table_unlocked(memory: int, opened: Open) -> None:
    limiter, odd = opened(), Allowance(requests_per_minute="many")  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        limiter.take("k1", odd, NOON)
    program = (
        "import fcntl, sys\n"
        "fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0); print('free')"
    )

    with child(memory, program) as other:
        assert said(other) == "free"
