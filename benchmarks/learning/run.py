"""`make bench BENCH=learning`: held-out reward before and after, three seeds a task, and null runs.

A gain is the difference of one prompt's mean reward, after less before; its interval is a bootstrap
over the prompts of the exam, which nothing was trained on.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks import results
from benchmarks.learning.instructions import instructions
from benchmarks.learning.play import Kind, Plan, Played, play
from benchmarks.learning.played import kept, write
from benchmarks.learning.tasks import Task, support
from benchmarks.learning.tools import NoDataError, tools
from sidecar.settings import Learner

TASKS: Final[dict[str, Callable[[], Task]]] = {
    "support": support,
    "instructions": instructions,
    "tools": tools,
}
WORK: Final = Path(__file__).resolve().parents[2] / ".bench/learning"
"""The adapters and logs of the latest run of each kind stay here."""
RESAMPLES: Final = 4_000
LEAST_GAIN: Final = 0.001
"""No gain at all is not one."""
NULL_UPDATE: Final = 0.2
"""The update of a null run is at most this share of a real run's."""
KINDS: Final[tuple[Kind, ...]] = ("real", "null", "null, gate off")


def main(argv: Sequence[str]) -> int:
    """Print tables, write the results. Returns: 1 when a target does not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks learning")
    parser.add_argument("--task", action="append", choices=list(TASKS))
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    parser.add_argument("--seeds", type=int, default=3, help="of real runs; null runs have one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--groups", type=int, default=16, help="prompts in a round")
    parser.add_argument("--size", type=int, default=8, help="answers in a group")
    parser.add_argument("--exam-answers", type=int, default=6, help="to each prompt of the exam")
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps in a round")
    parser.add_argument("--rate", type=float, default=1e-3, help="learner.learning_rate")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="where the JSON goes")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the runs of the same options that a broken-off call finished with the same code",
    )
    options = parser.parse_args(argv)
    machine = results.machine()
    sizes = {
        name: value
        for name, value in sorted(vars(options).items())
        if name not in ("task", "kind", "out", "resume")
    }
    machine["options"] = sizes
    plan = Plan(
        rounds=options.rounds,
        groups=options.groups,
        size=options.size,
        exam_answers=options.exam_answers,
        learner=Learner(steps=options.steps, learning_rate=options.rate, pack_tokens=2048),
    )
    played: list[Played] = []
    rows: list[results.Row] = []
    missing: dict[str, str] = {}
    for name in options.task or TASKS:
        try:
            task = TASKS[name]()
        except NoDataError as error:
            missing[name] = str(error)
            continue
        for kind in options.kind or KINDS:
            for seed in range(1, options.seeds + 1 if kind == "real" else 2):
                folder = WORK / f"{name}-{kind.replace(', ', '-').replace(' ', '-')}-{seed}"
                one = kept(folder, sizes) if options.resume else None
                if one is None:
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)
                    one = play(task, kind, seed, plan, folder)
                    write(one, folder, sizes)
                played.append(one)
                rows.append(row(played[-1]))
                print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    print(results.table(rows, list(rows[0]) if rows else []))
    targets = [one for name in options.task or TASKS for one in _targets(name, played, missing)]
    print(f"\n{results.targets_table(targets)}")
    print(results.write("learning", rows, targets, machine=machine, folder=options.out))
    return results.exit_code(targets)


def row(one: Played) -> results.Row:
    """Return a run as one line of the table."""
    gain, low, high = interval(gains([one]))
    return {
        "task": one.task,
        "kind": one.kind,
        "seed": one.seed,
        "before": round(_mean(one.before.rewards), 3),
        "after": round(_mean(one.after.rewards), 3),
        "gain": round(gain, 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "passed_before": round(one.before.passed, 3),
        "passed_after": round(one.after.passed, 3),
        "tokens_before": round(one.before.tokens, 1),
        "tokens_after": round(one.after.tokens, 1),
        "groups": one.groups,
        "dropped": one.dropped,
        "steps": one.steps,
        "update_norm": round(one.update_norm, 3),
        "minutes": round(one.seconds / 60, 1),
    }


def gains(runs: Sequence[Played]) -> list[float]:
    """Return the gain of each prompt of the exam, as the mean over the runs of one task."""
    by_run = [
        [
            after - before
            for before, after in zip(one.before.rewards, one.after.rewards, strict=True)
        ]
        for one in runs
    ]
    return [sum(values) / len(values) for values in zip(*by_run, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95% bootstrap interval."""
    rng = random.Random(1)
    means = sorted(_mean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return _mean(values), means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def _targets(name: str, played: Sequence[Played], missing: dict[str, str]) -> list[results.Target]:
    real = [one for one in played if (one.task, one.kind) == (name, "real")]
    null = [one for one in played if (one.task, one.kind) == (name, "null")]
    why = missing.get(name, "it was not run")
    found = interval(gains(real)) if real else None
    lost = interval(gains(null)) if null else None
    update = _mean([one.update_norm for one in real]) if real else 0.0
    return [
        results.at_least(
            f"{name}: lower end of the held-out gain's interval",
            found[1] if found else None,
            LEAST_GAIN,
            f"gain {found[0]:+.3f} over {len(real)} seeds" if found else why,
        ),
        results.at_most(
            f"{name}, null: lower end of the held-out gain's interval",
            lost[1] if lost else None,
            0.0,
            f"gain {lost[0]:+.3f} ({lost[1]:+.3f} to {lost[2]:+.3f})" if lost else why,
        ),
        results.at_most(
            f"{name}, null: upper end of its interval over the lower end of the real runs'",
            lost[2] / found[1] if lost and found and found[1] > 0 else None,
            1.0,
            "the two intervals lie apart" if lost and found else why,
        ),
        results.at_most(
            f"{name}, null: update over that of the real runs",
            _mean([one.update_norm for one in null]) / update if null and update else None,
            NULL_UPDATE,
            "L2 norms of the weights' changes" if null and update else why,
        ),
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
