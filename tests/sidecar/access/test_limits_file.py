"""The limits' file: right across processes, kept over restarts, and never in anyone's way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.access.limits import DAY_S, Allowance
from sidecar.access.limits_file import (
    FILE_BYTES,
    HEADER,
    WINDOW,
    FileLimiter,
)

NOON = 20_000 * float(DAY_S) + 43_200.0
ONE = Allowance(requests_per_minute=1)
Open = Callable[[], FileLimiter]


class Seen:
    """What a limiter counted."""

    def __init__(self) -> None:
        self.unchecked: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def count_unchecked(self, reason: str) -> None:
        self.unchecked[reason] += 1

    def count_lost(self, reason: str) -> None:
        self.lost[reason] += 1


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "limits"


@pytest.fixture
def opened(path: Path, seen: Seen) -> Iterator[Open]:
    made: list[FileLimiter] = []

    def make() -> FileLimiter:
        limiter = FileLimiter(path, unchecked=seen.count_unchecked, lost=seen.count_lost)
        made.append(limiter)
        return limiter

    yield make
    for limiter in made:
        limiter.close()


CHILD = """
import sys
from pathlib import Path
from sidecar.access.limits import Allowance
from sidecar.access.limits_file import FileLimiter

path, now = Path(sys.argv[1]), float(sys.argv[2])
asks, per_minute, key_count = map(int, sys.argv[3:])
limiter = FileLimiter(path, unchecked=sys.exit, lost=sys.exit, lock_wait_s=60.0)
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


def test_four_processes_together_let_exactly_the_limit_through(path: Path, opened: Open) -> None:
    asks, limit, keys = 500, 700, 3
    arguments = [str(path), str(NOON), str(asks), str(limit), str(keys)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all of them, before the first is waited for
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]

    passed = [[int(word) for word in output.split()] for output in outputs]
    assert [sum(of_key) for of_key in zip(*passed, strict=True)] == [limit] * keys
    # Not one charge was lost either: 4 processes, 500 turns, 3 tokens.
    allowance = Allowance(tokens_per_day=10**9)
    left = [opened().take(f"k{key}", allowance, NOON).tokens_left for key in range(keys)]
    assert left == [10**9 - 4 * asks * 3] * keys


def test_a_restart_renews_nothing(opened: Open) -> None:
    allowance = Allowance(requests_per_minute=2, tokens_per_day=100)
    first = opened()
    first.take("k", allowance, NOON)
    first.charge("k", allowance, 60, NOON)
    first.close()

    standing = opened().take("k", allowance, NOON)

    assert (standing.refused, standing.requests_left, standing.tokens_left) == (None, 0, 40)


def test_the_file_is_for_its_owner_alone(path: Path, opened: Open) -> None:
    opened()

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == FILE_BYTES


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x", "short"),
        (HEADER, "short"),
        (b"\xff" * FILE_BYTES, "foreign"),
        (HEADER + bytes(FILE_BYTES), "foreign"),
    ],
    ids=["a byte", "cut after the header", "another format", "longer"],
)
def test_a_file_that_is_not_ours_is_made_anew_and_counted(
    content: bytes, reason: str, path: Path, opened: Open, seen: Seen
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)

    limiter = opened()

    assert [limiter.take("k", ONE, NOON).refused for _ in range(2)] == [
        None,
        "requests_per_minute",
    ]
    assert path.stat().st_size == FILE_BYTES
    assert (seen.lost, seen.unchecked) == ({reason: 1}, {})


def test_a_slot_that_was_torn_is_begun_anew_and_counted(
    path: Path, opened: Open, seen: Seen
) -> None:
    limiter = opened()
    limiter.take("k", ONE, NOON)
    offset = path.read_bytes().index(b"k\0\0\0")
    with path.open("r+b") as file:
        file.seek(offset + 30)
        file.write(b"\xaa\xbb\xcc")

    again = limiter.take("k", ONE, NOON)

    assert (again.refused, again.requests_left) == (None, 0)
    assert limiter.take("k", ONE, NOON).refused == "requests_per_minute"
    assert (seen.lost, seen.unchecked) == ({"torn": 1}, {})


def test_a_file_emptied_under_a_running_proxy_is_made_anew(
    path: Path, opened: Open, seen: Seen
) -> None:
    limiter = opened()
    limiter.take("k", ONE, NOON)
    os.truncate(path, 0)

    passed = [limiter.take("k", ONE, NOON).refused for _ in range(2)]

    assert passed == [None, "requests_per_minute"]
    assert path.stat().st_size == FILE_BYTES
    assert seen.unchecked == {}


def test_a_file_deleted_under_a_running_proxy_is_left_for_the_new_one(
    path: Path, opened: Open, seen: Seen
) -> None:
    old = opened()
    old.take("k", ONE, NOON)
    path.unlink()
    new = opened()
    new.take("k", ONE, NOON)

    assert old.take("other", ONE, NOON + 11.0).refused is None
    assert new.take("other", ONE, NOON + 11.0).refused == "requests_per_minute"
    assert (seen.lost, seen.unchecked) == ({"deleted": 1}, {})


def test_without_the_file_each_process_limits_by_itself_and_counts_it(
    path: Path, opened: Open, seen: Seen
) -> None:
    path.parent.write_text("a file where the folder should be")
    limiter = opened()
    limiter.charge("k", Allowance(tokens_per_day=5), 5, NOON)

    by_tokens = limiter.take("k", Allowance(tokens_per_day=5), NOON)
    by_requests = [limiter.take("r", ONE, NOON).refused for _ in range(2)]

    assert by_tokens.refused == "tokens_per_day"
    assert by_requests == [None, "requests_per_minute"]
    assert seen.unchecked == {"away": 4}


def test_a_file_that_can_be_made_later_is_used_from_then_on(
    path: Path, opened: Open, seen: Seen
) -> None:
    path.parent.write_text("in the way")
    limiter = opened()
    limiter.take("k", ONE, NOON)
    path.parent.unlink()

    limiter.take("k", ONE, NOON + 5.0)
    limiter.take("k", ONE, NOON + 10.0)

    assert opened().take("k", ONE, NOON + 10.0).refused == "requests_per_minute"
    assert seen.unchecked == {"away": 2}


def test_a_disk_that_refuses_is_counted_and_the_memory_decides(
    opened: Open, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = opened()
    limiter.take("k", ONE, NOON)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sidecar.access.limits_file.os.pwrite", refuse)
    passed = [limiter.take("k", ONE, NOON).refused for _ in range(2)]

    assert passed == [None, "requests_per_minute"]
    assert seen.unchecked == {"io": 2}


HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(fd, fcntl.LOCK_EX, 0, 0)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_lock_whose_holder_stands_still_delays_nobody_and_ends_with_it(
    path: Path, opened: Open, seen: Seen
) -> None:
    limiter = opened()
    limiter.take("k", ONE, NOON)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"

    started = time.monotonic()
    meanwhile = [limiter.take("k", ONE, NOON).refused for _ in range(2)]
    waited_s = time.monotonic() - started
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert holder.stdin is not None
    holder.stdin.close()

    assert meanwhile == [None, "requests_per_minute"]
    assert seen.unchecked == {"locked": 2}
    assert waited_s < 5.0  # 2 ms each; a blocking lock would never have returned
    assert limiter.take("k", ONE, NOON).refused == "requests_per_minute"
    assert seen.unchecked == {"locked": 2}


@pytest.fixture
def one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys want the same 64 slots."""
    monkeypatch.setattr("sidecar.access.limits_file.SLOTS", WINDOW)


@pytest.mark.usefixtures("one_window")
def test_keys_beyond_the_slots_are_limited_by_each_process_and_counted(
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
def test_a_slot_that_says_nothing_any_more_goes_to_another_key(opened: Open, seen: Seen) -> None:
    one, other = opened(), opened()
    for number in range(WINDOW):
        one.take(f"k{number}", ONE, NOON)
    next_day = NOON + DAY_S

    other.take("late", ONE, next_day)
    theirs = one.take("late", ONE, next_day).refused
    # Whichever key lost its slot finds another, and has its full allowance, as it would have had.
    back = [one.take(f"k{number}", ONE, next_day).refused for number in range(WINDOW - 1)]

    assert theirs == "requests_per_minute"
    assert back == [None] * (WINDOW - 1)
    assert (seen.lost, seen.unchecked) == ({}, {})


def test_a_slot_under_way_is_not_taken_for_a_torn_one(
    path: Path, opened: Open, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().take("k", ONE, NOON)
    whole = path.read_bytes()
    offset = whole.index(b"k\0\0\0")
    half = bytearray(whole)
    half[offset + 20 : offset + 24] = b"half"
    path.write_bytes(half)
    late = opened()
    lock = late._lock

    def finish_writing(at: int, wait_s: float) -> None:
        lock(at, wait_s)
        if at == offset:
            path.write_bytes(whole)  # who held the lock has written the rest

    monkeypatch.setattr(late, "_lock", finish_writing)

    assert late.take("k", ONE, NOON).refused == "requests_per_minute"
    assert (seen.lost, seen.unchecked) == ({}, {})


def test_no_lock_is_left_behind(path: Path, opened: Open) -> None:
    limiter = opened()
    for number in range(5):
        limiter.take(f"k{number}", ONE, NOON)
        limiter.charge(f"k{number}", ONE, 1, NOON)

    # Asked by another process: one's own locks never stand in one's way.
    probe = (
        "import fcntl,os,sys; fd=os.open(sys.argv[1], os.O_RDWR);"
        "fcntl.lockf(fd, fcntl.LOCK_EX|fcntl.LOCK_NB, 0, 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe, str(path)], check=False)

    assert done.returncode == 0
