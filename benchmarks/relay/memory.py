"""Memory at a long load: does it stay where it was after the warm-up?"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.relay import process_tree
from benchmarks.relay.ends import Ends, run_load
from benchmarks.relay.measure import captures, request_file
from benchmarks.relay.scenarios import BY_NAME
from benchmarks.relay.stage import Cores, Running
from benchmarks.results import Row, Target, at_most

SCENARIO = "small32"
WARMUP_S = 3.0
SAMPLE_S = 0.25
MAX_GROWTH = 0.03
"""Resident memory moves by a percent or two as the allocator's arenas come and go; a leak of 100
bytes a request at 5,000 a second is 5 MB in ten seconds, over this for any process under 160 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """Resident memory of one contender over one long load."""

    contender: str
    seconds: float
    requests: int
    rss_mb: tuple[float, ...]
    """Evenly spaced, in order."""
    peak_rss_mb: float
    captures_kept: float | None
    captures_lost: float | None


def growth(rss_mb: Sequence[float]) -> tuple[float, float]:
    """(from, to) in the unit given: medians of the second and of the last quarter.

    The first quarter is the warm-up: pools fill, arenas grow. Raises: ValueError of under 4 values.
    """
    if len(rss_mb) < 4:
        raise ValueError(f"{len(rss_mb)} values are too few to see a growth; load for longer")
    quarter = len(rss_mb) // 4
    return median(rss_mb[quarter : 2 * quarter]), median(rss_mb[-quarter:])


def soak(running: Running, *, ends: Ends, cores: Cores, seconds: float, folder: Path) -> Soak:
    """Load one contender for long and watch its memory. Raises: RuntimeError."""
    assert running.pid is not None
    scenario = BY_NAME[SCENARIO]
    command = [
        *("taskset", "-c", str(cores.ends), str(ends.load), str(running.port)),
        *(str(scenario.connections), str(WARMUP_S), str(seconds), "0"),
        str(request_file(running, scenario, folder)),
    ]
    values: list[float] = []
    stop = threading.Event()

    def watch(pid: int) -> None:
        while not stop.wait(SAMPLE_S):
            values.append(process_tree.rss_mb(pid))

    watcher = threading.Thread(target=watch, args=(running.pid,), daemon=True)
    process_tree.reset_peak(running.pid)
    before = captures(running)
    try:
        limit_s = WARMUP_S + seconds
        report = run_load(command, limit_s=limit_s, at_begin=watcher.start, at_end=stop.set)
    finally:
        stop.set()
    watcher.join()
    peak = process_tree.peak_rss_mb(running.pid)
    time.sleep(0.5)  # what is captured is written every tenth of a second
    after = captures(running)
    counted = before is not None and after is not None
    return Soak(
        contender=running.name,
        seconds=report.seconds,
        requests=report.requests,
        rss_mb=tuple(values),
        peak_rss_mb=peak,
        captures_kept=after[0] - before[0] if counted and before and after else None,
        captures_lost=after[1] - before[1] if counted and before and after else None,
    )


def soak_row(one: Soak) -> Row:
    """The line of the result."""
    first, last = growth(one.rss_mb)
    return {
        "scenario": "soak",
        "contender": one.contender,
        "seconds": round(one.seconds, 1),
        "rps": round(one.requests / one.seconds),
        "rss_after_warmup_mb": round(first, 2),
        "rss_end_mb": round(last, 2),
        "growth_mb": round(last - first, 2),
        "growth_bytes_per_request": round((last - first) * 2**20 / (one.requests * 0.625), 2)
        if one.requests
        else None,  # the middles of the two quarters lie five eighths of the window apart
        "peak_rss_mb": round(one.peak_rss_mb, 2),
        "captures_kept": one.captures_kept,
        "captures_lost": one.captures_lost,
    }


def soak_target(one: Soak) -> Target:
    """Memory is flat."""
    first, last = growth(one.rss_mb)
    share = (last - first) / first if first else None
    what = f"memory growth at load, {one.contender}, {one.seconds:.0f} s, share of resident memory"
    return at_most(what, share, MAX_GROWTH)
