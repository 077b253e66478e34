"""`make bench BENCH=sabotage`: what becomes of a good candidate and of sabotaged ones.

The real vLLM and the shipped model, with users all the time. Each candidate is tried twice: by the
default rule, where a replay of its folder should say what it is, and the gate should stop a bad one
before it meets a user; and behind a gate that lets everything pass, where only users' sessions and
the proxy's breaker speak. The judge is the demo's stand-in. exit 1 when a sabotaged candidate is
promoted, the good one is not, a replay is wrong, or a request fails that no sabotage explains.

    python -m benchmarks sabotage [--parts gated open] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.results import Target, at_least, at_most
from benchmarks.sabotage.adapters import GOOD, HANGING, NOISE, OVERLONG, REFUSING, make
from benchmarks.sabotage.play import OPEN_GATE, PROVEN, Outcome, play
from sidecar.settings.kinds import ask_loopback_directly

CASES = (GOOD, NOISE, REFUSING, OVERLONG, HANGING)
PARTS = {"gated": PROVEN, "open": OPEN_GATE}
GATE_STOPS = (NOISE, REFUSING, OVERLONG)
"""What the gate must see. The hanging one answers there, and hangs before users."""
MOST_EXPOSED = 100
"""As of a canary with 30% errors, which must be stopped within so many of its sessions."""
COLUMNS = (
    "part", "case", "state", "decided_s", "ramp_s", "groups", "exposed_sessions", "failed",
    "replay", "replay_prompts",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks sabotage", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it")
    asked = parser.parse_args(argv)
    ask_loopback_directly(os.environ)
    machine, began = results.machine(), time.monotonic()
    rows: list[results.Row] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as made:
        folder = asked.keep or Path(made)
        adapters = make(folder / "candidates", CASES)
        for part in asked.parts:
            print(f"{part}:", flush=True)
            cases = list(adapters.items())
            outcome = play(folder / part, cases, PARTS[part], replayed=part == "gated")
            rows += rows_of(part, outcome)
            targets += targets_of(part, outcome)
    print(results.table(rows, COLUMNS))
    print()
    print(results.targets_table(targets))
    machine["took_s"] = round(time.monotonic() - began, 1)
    print(f"\n{results.write('sabotage', rows, targets, machine=machine)}")
    return results.exit_code(targets)


def rows_of(part: str, outcome: Outcome) -> list[results.Row]:
    """Return one row a candidate, and one for everybody else."""
    rows: list[results.Row] = [
        {
            "part": part,
            "case": one.case,
            "state": one.state,
            "reason": one.reason,
            "decided_s": one.decided_s,
            "ramp_s": one.ramp_s,
            "groups": one.groups,
            "exposed_sessions": outcome.exposed[one.case].sessions,
            "failed": outcome.exposed[one.case].failed,
            "replay": one.replay,
            "replay_prompts": one.replay_prompts,
        }
        for one in outcome.played
    ]
    others = len(outcome.visits) - sum(one.sessions for one in outcome.exposed.values())
    everybody = {"case": "all other users", "sessions": others, "failed": outcome.failed_elsewhere}
    return [*rows, {"part": part, **everybody}]


def targets_of(part: str, outcome: Outcome) -> list[Target]:
    """Return what must hold."""
    targets = []
    innocent = outcome.failed_elsewhere
    for one in outcome.played:
        exposed, promoted = outcome.exposed[one.case], float(one.state == "promoted")
        if one.case == GOOD:
            targets.append(at_least(f"{part}, {one.case}: promoted", promoted, 1.0))
        else:
            targets.append(at_most(f"{part}, {one.case}: promoted", promoted, 0.0))
            most = 0 if part == "gated" and one.case in GATE_STOPS else MOST_EXPOSED
            what = f"{part}, {one.case}: sessions exposed"
            targets.append(at_most(what, exposed.sessions, most))
        if one.replay:
            caught, bad = float(one.replay == "worse"), float(one.case != GOOD)
            targets.append(at_most(f"{part}, {one.case}: replay is wrong", abs(caught - bad), 0.0))
        if one.case != HANGING:
            innocent += exposed.failed
    what = f"{part}: failed requests that no sabotage explains"
    return [*targets, at_most(what, innocent, 0)]
