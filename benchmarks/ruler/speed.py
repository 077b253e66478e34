"""The parts `speed` and `kills`: the real scoring process before a judge that takes its time."""

from __future__ import annotations

import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.ruler.material import MadeGroup, groups
from benchmarks.ruler.scorer import account, claimed, cpu, fill, highest_mb, scored, scoring
from benchmarks.ruler.server import Json, running

CONCURRENCY = 64
"""`judge.concurrency` of the part `speed`."""
PASSES = 2
"""`judge.passes` as shipped."""
JUDGE_S = 2.0
WARM_UP_S = 5.0
KILLED_CONCURRENCY = 16
KILLED_JUDGE_S = 0.1
KILLED_TIMEOUT_S = 2.0
"""`judge.timeout_s` while it is killed: the lease of a group is four of these and a minute."""
PATIENCE_S = 180.0
"""How long nothing may move before an account is closed; leases take 68 s."""
CLAIMS_S = 60.0
POLL_S = 0.2


def speed(folder: Path, *, stored: int, seconds: float) -> Json:
    """Groups a second, groups in flight as the judge sees it, and highest memory."""
    made = groups("text", stored, "speed")
    store = fill(folder, made)
    with (
        running(folder, _truth(made), delay_s=JUDGE_S) as judge,
        scoring(folder, judge.url, concurrency=CONCURRENCY, timeout_s=60.0) as process,
    ):
        _until_first(store)
        time.sleep(WARM_UP_S)
        began, before, cpu_s, in_flight = time.monotonic(), scored(store), cpu(process.pid), []
        while time.monotonic() < began + seconds:
            in_flight.append(judge.load()["in_flight"])
            time.sleep(POLL_S)
        done, took = scored(store) - before, time.monotonic() - began
        cpu_s = cpu(process.pid) - cpu_s
        peak_mb = highest_mb(process.pid)
    ideal = CONCURRENCY / (PASSES * JUDGE_S)
    return {
        "what": f"judge of {JUDGE_S:g} s, {PASSES} passes, concurrency {CONCURRENCY}",
        "stored": stored,
        "scored": done,
        "groups_per_s": round(done / took, 2),
        "of_ideal": round(done / took / ideal, 3),
        "cpu_ms_per_group": round(1e3 * cpu_s / max(1, done), 1),
        "in_flight_median": median(in_flight),
        "in_flight_least": min(in_flight),
        "in_flight_most": max(in_flight),
        "peak_mb": round(peak_mb, 1),
    }


def kills(folder: Path, *, stored: int, times: int) -> Json:
    """SIGKILL at random moments while groups are judged, then one life in peace."""
    made = groups("text", stored, "kills")
    store = fill(folder, made)
    rng = random.Random(times)
    at_kill = []
    life = partial(scoring, folder, concurrency=KILLED_CONCURRENCY, timeout_s=KILLED_TIMEOUT_S)
    with running(folder, _truth(made), delay_s=KILLED_JUDGE_S) as judge:
        for number in range(times):
            began = time.time()
            with life(judge.url) as process:
                _wait_for_claims(store, began)
                time.sleep(rng.uniform(0.0, 1.0))
                process.send_signal(signal.SIGKILL)
                process.wait()
            at_kill.append(claimed(store, began))
            print(f"  kill {number + 1} of {times}: {scored(store)} scored", file=sys.stderr)
        with life(judge.url):
            last = time.monotonic()
            _until_all(store, stored)
            last_s = time.monotonic() - last
        asked = judge.load()["asked"]
    once = {" ".join(sorted(group.cases)): PASSES for group in made}
    calls = {question: count for question, count in asked.items() if question in once}
    return {
        "what": "SIGKILL of score",
        "times": times,
        **account(store),
        "claimed_at_kill": round(sum(at_kill) / len(at_kill), 1),
        "last_life_s": round(last_s, 1),
        "calls": sum(calls.values()),
        "calls_paid_twice": sum(max(0, count - PASSES) for count in calls.values()),
    }


def _truth(made: list[MadeGroup]) -> dict[str, float]:
    return {
        case: worth for group in made for case, worth in zip(group.cases, group.truth, strict=True)
    }


def _wait_for_claims(store: Path, since: float) -> None:
    """Wait until this life has claimed groups, or CLAIMS_S when there are none that it may claim:
    what a killed process had claimed is nobody's until its lease runs out."""
    deadline = time.monotonic() + CLAIMS_S
    while not claimed(store, since) and time.monotonic() < deadline:
        time.sleep(0.02)


def _until_first(store: Path) -> None:
    """Wait until a group has scores. Raises: RuntimeError with the end of the log."""
    deadline = time.monotonic() + PATIENCE_S
    while not scored(store):
        if time.monotonic() > deadline:
            log = store.with_name("score.log").read_text(errors="replace")
            raise RuntimeError(f"the scoring process does nothing; its log ends: {log[-2000:]}")
        time.sleep(POLL_S)


def _until_all(store: Path, stored: int) -> None:
    """Wait until all groups have scores, as long as there is progress."""
    most, deadline = -1, time.monotonic() + PATIENCE_S
    while (now := scored(store)) < stored and time.monotonic() < deadline:
        if now > most:
            most, deadline = now, time.monotonic() + PATIENCE_S
        time.sleep(POLL_S)
