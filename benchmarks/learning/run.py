"""`make bench BENCH=learning`: what one night of many groups teaches, three seeds a task.

A gain is the difference of one prompt's mean reward, after less before. The interval of one run is
a bootstrap over the prompts of the exam, which nothing was trained on: it is about other prompts.
That of several runs is about other prompts and other seeds (`interval_over_runs`).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Final

from benchmarks import results
from benchmarks.learning.instructions import instructions
from benchmarks.learning.kept import Kept
from benchmarks.learning.play import OLDEST, Kind, Plan, Played, play, play_ages
from benchmarks.learning.tasks import Task, support
from benchmarks.learning.tools import NoDataError, tools
from ingest.reward_watch.rules import t_of
from sidecar.settings import Learner

TASKS: Final[dict[str, Callable[[], Task]]] = {
    "support": support,
    "instructions": instructions,
    "tools": tools,
}
WORK: Final = Path(__file__).resolve().parents[2] / ".bench/learning"
"""The answers, adapters and logs of the latest night of each task and seed stay here."""
RESAMPLES: Final = 4_000
TAIL: Final = 0.025
"""Probability on each side of a 95% interval."""
ROUNDING: Final = 1e-9
"""Degrees of freedom that come out as 1.9999999999 are 2."""
LEAST_GAIN: Final = 0.001
"""No gain at all is not one."""
NULL_UPDATE: Final = 0.2
"""The update of a null run is at most this share of a real run's."""
KINDS: Final[tuple[Kind, ...]] = ("few", "real", "noisy", "squeezed", "null")
AGES: Final = tuple(f"{kind}-{age}" for age in range(1, OLDEST + 1) for kind in ("fresh", "old"))
EACH_SEED: Final = ("few", "real")
"""The other kinds run with the first seed alone."""


def main(argv: Sequence[str]) -> int:
    """Print tables, write the results. Returns: 1 when a target does not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks learning")
    parser.add_argument("--task", action="append", choices=list(TASKS))
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    parser.add_argument("--seeds", type=int, default=3, help="of few and real; the others have one")
    parser.add_argument("--groups", type=int, default=128, help="of a night")
    parser.add_argument("--few", type=int, default=16, help="groups of the run `few`")
    parser.add_argument("--size", type=int, default=8, help="answers in a group")
    parser.add_argument("--exam-answers", type=int, default=6, help="to each prompt of the exam")
    parser.add_argument("--per-step", type=int, help="learner.groups_per_step; else its default")
    parser.add_argument("--rate", type=float, help="learner.learning_rate; else its default")
    parser.add_argument("--ages", action="store_true", help="play old groups, not kinds")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="where the JSON goes")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the runs of the same options that a broken-off call finished, same code",
    )
    options = parser.parse_args(argv)
    machine = results.machine()
    sizes = {
        name: value
        for name, value in sorted(vars(options).items())
        if name not in ("task", "kind", "out", "resume", "seeds", "ages")
    }
    machine["options"] = sizes | {"seeds": options.seeds}
    given = {"groups_per_step": options.per_step, "learning_rate": options.rate}
    plan = Plan(
        groups=options.groups,
        few=options.few,
        size=options.size,
        exam_answers=options.exam_answers,
        learner=Learner(
            pack_tokens=2048, **{key: value for key, value in given.items() if value is not None}
        ),
    )
    played: list[Played] = []
    missing: dict[str, str] = {}
    for name in options.task or TASKS:
        try:
            task = TASKS[name]()
        except NoDataError as error:
            missing[name] = str(error)
            continue
        for seed in range(1, options.seeds + 1):
            folder = WORK / f"{name}-{'ages-' * options.ages}{seed}"
            kept = Kept(folder, sizes, resume=options.resume)
            wanted = options.kind or KINDS
            kinds = [kind for kind in wanted if seed == 1 or kind in EACH_SEED]
            if options.ages:
                night = play_ages(task, seed, plan, kept)
            else:
                made = Kept(options.out / f"learning/{name}-{seed}", sizes, resume=options.resume)
                night = play(task, kinds, seed, plan, kept, made)
            played += night
            for one in night:
                print(f"  {row(one)}", file=sys.stderr, flush=True)
    rows = [row(one) for one in played]
    columns = list(rows[0]) if rows else []
    for name in options.task or TASKS:
        for kind in AGES if options.ages else EACH_SEED:
            if len(runs := _of(played, name, kind)) > 1:
                rows.append(row_of_all(runs))
    print(results.table(rows, columns))
    judged = _targets_of_ages if options.ages else _targets
    targets = [one for name in options.task or TASKS for one in judged(name, played, missing)]
    print(f"\n{results.targets_table(targets)}")
    what = "learning-ages" if options.ages else "learning"
    print(results.write(what, rows, targets, machine=machine, folder=options.out))
    return results.exit_code(targets)


def row(one: Played) -> results.Row:
    """Return a run as one line of the table."""
    gain, low, high = interval(gains(one))
    return {
        "task": one.task,
        "kind": one.kind,
        "seed": one.seed,
        "before": round(fmean(one.before.rewards), 3),
        "after": round(fmean(one.after.rewards), 3),
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


def row_of_all(runs: Sequence[Played]) -> results.Row:
    """Return the runs of one task and kind, two or more, as one line of the table."""
    gain, low, high = interval_over_runs([gains(one) for one in runs])
    return {
        "task": runs[0].task,
        "kind": runs[0].kind,
        "seed": "all",
        "gain": round(gain, 3),
        "low": round(low, 3),
        "high": round(high, 3),
    }


def gains(one: Played) -> list[float]:
    """Return the gain of each prompt of the exam."""
    pairs = zip(one.before.rewards, one.after.rewards, strict=True)
    return [after - before for before, after in pairs]


def interval_over_runs(gains_SP: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the mean over seeds and prompts, and its 95% interval for other seeds and prompts.

    gains_SP: [S, P] of S seeds, two or more, on the same P prompts.

    The variance of the mean is that of the seeds' means over S plus that of the prompts' means over
    P, and the limits are those of Student's t with Satterthwaite's degrees of freedom (1946,
    doi 10.2307/3002019), rounded down. What is of one seed and one prompt counts in both parts,
    which errs on the safe side. A bootstrap over both has S values to draw seeds from: with 3 it
    covers 0.74 to 0.97 of true gains where this covers 0.93 to 0.97 (docs/log.md, 2026-11-27).
    """
    by_seed = [fmean(values) for values in gains_SP]
    by_prompt = [fmean(values) for values in zip(*gains_SP, strict=True)]
    of_seeds = variance(by_seed) / len(by_seed)
    of_prompts = variance(by_prompt) / len(by_prompt)
    mean, total = fmean(by_seed), of_seeds + of_prompts
    if total == 0:
        return mean, mean, mean
    freedom = total**2 / (of_seeds**2 / (len(by_seed) - 1) + of_prompts**2 / (len(by_prompt) - 1))
    reach = t_of(TAIL, math.floor(freedom + ROUNDING)) * math.sqrt(total)
    return mean, mean - reach, mean + reach


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of one run's gains and its 95% bootstrap interval, for other prompts."""
    rng = random.Random(1)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return fmean(values), means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def _targets(name: str, played: Sequence[Played], missing: dict[str, str]) -> list[results.Target]:
    few, real, noisy, squeezed, null = (_of(played, name, kind) for kind in KINDS)
    why = missing.get(name, "it was not run")
    by_seed = [interval(gains(one)) for one in real]
    least = min((low for _, low, _ in by_seed), default=None)
    lost = interval(gains(null[0])) if null else None
    update = fmean(one.update_norm for one in real) if real else 0.0
    more = [fmean(gains(one)) - fmean(gains(less)) for less, one in zip(few, real, strict=False)]
    return [
        results.at_least(
            f"{name}: lower end of the held-out gain's interval, the least of the seeds",
            least,
            LEAST_GAIN,
            _over_seeds(real) or why,
        ),
        results.at_least(
            f"{name}: gain of all groups less that of a few, the least of the seeds",
            min(more, default=None),
            LEAST_GAIN,
            f"few: {_over_seeds(few)}" if more else why,
        ),
        *(
            results.at_least(
                f"{name}, {one.kind} scores: lower end of the held-out gain's interval",
                interval(gains(one))[1],
                LEAST_GAIN,
                f"gain {fmean(gains(one)):+.3f}",
            )
            for one in (*noisy, *squeezed)
        ),
        results.at_most(
            f"{name}, null: lower end of the held-out gain's interval",
            lost[1] if lost else None,
            0.0,
            f"gain {lost[0]:+.3f} ({lost[1]:+.3f} to {lost[2]:+.3f})" if lost else why,
        ),
        results.at_most(
            f"{name}, null: upper end of its interval over the least lower end of the real runs",
            lost[2] / least if lost and least is not None and least > 0 else None,
            1.0,
            "the intervals lie apart" if lost and by_seed else why,
        ),
        results.at_most(
            f"{name}, null: update over that of the real runs",
            fmean(one.update_norm for one in null) / update if null and update else None,
            NULL_UPDATE,
            "L2 norms of the weights' changes" if null and update else why,
        ),
    ]


def _targets_of_ages(
    name: str, played: Sequence[Played], missing: dict[str, str]
) -> list[results.Target]:
    """Groups that `learner.max_age_versions` allows teach something; older ones are shown."""
    targets = []
    for age in range(1, OLDEST + 1):
        fresh, old = (_of(played, name, f"{kind}-{age}") for kind in ("fresh", "old"))
        why = f"fresh: {_over_seeds(fresh)}; old: {_over_seeds(old)}"
        mean = fmean(fmean(gains(one)) for one in old) if old else None
        allowed = age <= Learner().max_age_versions
        targets.append(
            results.at_least(
                f"{name}: gain by groups {age} versions old, mean of the seeds",
                mean,
                LEAST_GAIN if allowed else -1.0,
                why if old else missing.get(name, "it was not run"),
            )
        )
    return targets


def _of(played: Sequence[Played], task: str, kind: str) -> list[Played]:
    return [one for one in played if (one.task, one.kind) == (task, kind)]


def _over_seeds(runs: Sequence[Played]) -> str:
    """Say what the runs of one task tell of other seeds; empty without a run."""
    if len(runs) < 2:
        return f"gain {interval(gains(runs[0]))[0]:+.3f}, one seed" if runs else ""
    gain, low, high = interval_over_runs([gains(one) for one in runs])
    return f"gain {gain:+.3f}; for other seeds and prompts {low:+.3f} to {high:+.3f}"
