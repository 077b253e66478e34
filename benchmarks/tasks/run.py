"""`make bench BENCH=tasks`: the acceptance list of whole tasks, on a simulated site.

Grouping, rewards and advantages are the product's. With the real model: `make demo-tasks`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from benchmarks import results
from benchmarks.tasks import world
from ingest.sessions.node import MAX_CALLERS, MAX_OPENINGS
from ingest.tasks.keys import Step, why_excluded

Learned = tuple[float, float]
"""(share of the possible gain, norm of all updates together) of one seed."""


def main(argv: Sequence[str]) -> int:
    """Print tables, write the results. Returns: 1 when a target does not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks tasks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--nights", type=int, default=16)
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="where the JSON goes")
    options = parser.parse_args(argv)
    machine = results.machine()
    seeds, nights = range(options.seeds), options.nights

    def learn(change: world.Change) -> list[Learned]:
        return [_of_seed(seed, nights, change) for seed in seeds]

    def each(case: Callable[[np.random.Generator], float]) -> list[float]:
        return [case(np.random.default_rng((seed, 7))) for seed in seeds]

    whole, null, told = learn(world.as_played), learn(world.shuffled), learn(world.survivors)
    few, one_user, liar = learn(world.few), learn(world.one_user), learn(world.liar)
    looks = each(lambda rng: _next_action(rng, nights))
    flat = each(lambda rng: _turns(rng, nights))
    refused = [float(why_excluded(steps) is not None) for steps in merged()]
    cases = {
        "next action": looks,
        "whole tasks": _gains(whole),
        "null: outcomes of other sessions": _gains(null),
        "survivors: half of the failures never tell": _gains(told),
        "a tenth of the sessions": _gains(few),
        "the same, and one user with the other nine tenths": _gains(one_user),
        "a liar with 100 invented sources": _gains(liar),
        "turns a session, change": flat,
    }
    rows: list[results.Row] = [
        {"case": name, "mean": round(fmean(values), 3), "se": round(_error(values), 3)}
        for name, values in cases.items()
    ]
    gain = fmean(_gains(whole))
    targets = [
        results.at_most("i: next action, share of the possible gain", fmean(looks), 0.0),
        results.at_least("i: whole tasks, share of the possible gain", gain, 0.5),
        results.at_most(
            "ii: null, mean change in standard errors", abs(_scores(_gains(null))), 2.0
        ),
        results.at_most(
            "ii: null, net update over that of (i)",
            fmean(one for _, one in null) / fmean(one for _, one in whole),
            0.2,
        ),
        results.at_most("iii: turns a session, change", abs(fmean(flat)), 0.05),
        results.at_most(
            "iv: one user of nine tenths, change of the share",
            abs(fmean(_gains(one_user)) - fmean(_gains(few))),
            0.1,
        ),
        results.at_most("iv: liar, change of the share", abs(fmean(_gains(liar)) - gain), 0.0),
        results.at_least("v: survivors, over (i)", fmean(_gains(told)) / gain, 0.6),
        results.at_least("vii: merged sessions that are refused", fmean(refused), 1.0),
    ]
    print(results.table(rows, list(rows[0])))
    print(f"\n{results.targets_table(targets)}")
    print(results.write("tasks", rows, targets, machine=machine, folder=options.out))
    return results.exit_code(targets)


def _of_seed(seed: int, nights: int, change: world.Change) -> Learned:
    rng = np.random.default_rng(seed)
    place = world.site(rng)
    logits = world.whole_tasks(place, nights, rng, change)
    return place.gained(logits), float(np.linalg.norm(logits))


def _next_action(rng: np.random.Generator, nights: int) -> float:
    place = world.site(rng)
    return place.gained(world.next_action(place, nights, rng))


def _turns(rng: np.random.Generator, nights: int) -> float:
    before, after = world.turns(nights, rng)
    return after / before - 1.0


def merged() -> list[list[Step]]:
    """Return sessions that became one by mistake: too many users, too many openings, two tasks."""

    def step(at: int, *, user: str = "u", parent: str | None = "ex_0", task: str = "t") -> Step:
        return Step(
            exchange_id=f"ex_{at}", began_at=float(at), parent=parent, adapter="base",
            held_out=False, answered=True, trainable=True, task=task, origin="user",
            caller=("default", "", user),
        )  # fmt: skip

    return [
        [step(at, user=f"u{at}") for at in range(MAX_CALLERS)],
        [step(at, parent=None) for at in range(MAX_OPENINGS)],
        [step(0), step(1, task="other")],
    ]


def _gains(learned: Sequence[Learned]) -> list[float]:
    return [gain for gain, _ in learned]


def _error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _scores(values: Sequence[float]) -> float:
    return fmean(values) / max(_error(values), 1e-9)
