"""SIGKILL at any moment: the outbox stays readable, and only the last flush interval is missing."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.capture.outbox import OutboxReader
from sidecar.records import decode_exchange

FLUSH_INTERVAL_S = 0.02
KILLS = 20
PATIENCE_S = 60.0
CHILD = Path(__file__).with_name("capturing_child.py")


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    """Makes a child for each line; says its pid when it is under load, and how it ended."""
    with subprocess.Popen(
        [sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def _killed_at_random(
    nursery: subprocess.Popen[str], path: Path, log: Path, rng: random.Random
) -> list[list[str]]:
    """Kill a child under load; the words of the lines that it had written by then."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(f"{path}\t{FLUSH_INTERVAL_S}\t{log}\n")
    nursery.stdin.flush()
    pid = int(nursery.stdout.readline())
    _await_flushes(log, rng.randrange(7))
    time.sleep(rng.uniform(0.0, FLUSH_INTERVAL_S))
    os.kill(pid, signal.SIGKILL)
    assert nursery.stdout.readline() == "-9\n"
    return [line.split() for line in log.read_text().split("\n")[:-1]]


def _await_flushes(log: Path, number: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (log.read_text() if log.exists() else "").count("flush ") < number:
        assert time.monotonic() < deadline, f"no {number} flushes in {PATIENCE_S:g} s"
        time.sleep(0.001)


def _stored(path: Path) -> list[str]:
    reader = OutboxReader(path)
    rows = reader.read(0, 1_000_000)
    reader.delete_through(1_000_000)
    reader.close()
    exchanges = [decode_exchange(row.payload) for row in rows]
    assert all(item.untrainable_reason is None for item in exchanges)
    return [item.exchange_id for item in exchanges]


def test_a_kill_costs_what_came_since_the_last_flush_and_nothing_else(
    nursery: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The child writes `offer NAME TIME` after each hand-over, and `flush BEGAN ENDED` after each
    flush. Everything that it offered before the beginning of a flush must be there, and the flushes
    must come every interval."""
    path = tmp_path / "outbox.db"
    rng = random.Random(20)
    kept = lost = 0
    waits: list[float] = []
    for kill in range(KILLS):
        lines = _killed_at_random(nursery, path, tmp_path / f"{kill}.log", rng)
        offered = {words[1]: float(words[2]) for words in lines if words[0] == "offer"}
        flushed = [(float(words[1]), float(words[2])) for words in lines if words[0] == "flush"]
        stored = _stored(path)

        begun = max((began for began, _ in flushed), default=0.0)
        missing = offered.keys() - set(stored)
        assert [name for name in missing if offered[name] < begun] == [], f"kill {kill}"
        # In order and without a hole: what is missing is the end.
        assert stored == [f"ex_{number}" for number in range(len(stored))]
        waits += [later - ended for (_, ended), (later, _) in itertools.pairwise(flushed)]
        kept, lost = kept + len(stored), lost + len(missing)
    assert kept > 0
    assert lost > 0, "no kill came at a bad moment: this has shown nothing"
    assert len(waits) > KILLS
    # The least: a busy machine makes some of them longer.
    assert min(waits) < 5 * FLUSH_INTERVAL_S, "from a flush's end to the next one"
