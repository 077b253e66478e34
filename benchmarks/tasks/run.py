"""`make bench BENCH=tasks`: the acceptance list of whole tasks, on a simulated site; and the same
groups beside ART's own trajectory path.

Grouping, rewards and advantages are the product's. With the real model: `make demo-tasks`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from benchmarks import results
from benchmarks.tasks import world
from ingest.sessions.node import MAX_CALLERS, MAX_OPENINGS
from ingest.tasks.keys import Step, why_excluded

Learned = tuple[float, float]
"""(share of the possible gain, norm of all updates together) of one seed."""
Found = tuple[Sequence[results.Row], list[results.Target]]
COLUMNS: Final = (
    "case", "mean", "se", "update", "null_update", "side", "rows", "tokens", "trained", "as_seen",
    "cosine", "reward", "advantage", "art_advantage", "part", "art_part", "why",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print tables, write the results. Returns: 1 when a target does not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks tasks", description=__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="several may be given")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--nights", type=int, default=16)
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="where the JSON goes")
    options = parser.parse_args(argv)
    machine = results.machine()
    rows, targets = list[results.Row](), list[results.Target]()
    for part in options.part or PARTS:
        found = PARTS[part](options.seeds, options.nights)
        print(f"{results.table(found[0], COLUMNS)}\n\n{results.targets_table(found[1])}\n")
        rows, targets = [*rows, *found[0]], targets + found[1]
    name = "tasks-part" if options.part else "tasks"
    print(results.write(name, rows, targets, machine=machine, folder=options.out))
    return results.exit_code(targets)


def _site(seed_count: int, nights: int) -> Found:
    """Play the acceptance list."""
    seeds = range(seed_count)

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
    return rows, targets


def _beside_art(seed_count: int, nights: int) -> Found:
    """Compare the gradients of the same groups; and play the site with ART's advantages, which make
    longer steps at the same rate, so that each side is also played with the other's steps."""
    try:
        from benchmarks.tasks import art

        peer = art.load()
    except ImportError as error:
        why = f"art cannot be imported: {error}"
        return [{"case": "ART", "why": why}], _art_targets(None, None, None, None, why)
    with TemporaryDirectory() as folder:
        rows = art.compare(peer, Path(folder))
    own, its = world.leave_one_out, peer.advantages
    ways = {
        "whole tasks": (own, True),
        "whole tasks, no gate": (own, False),
        "whole tasks, ART's steps": (world.as_large(own, its), True),
        "whole tasks, ART's advantages": (its, False),
        "whole tasks, ART's advantages, our steps": (world.as_large(its, own), False),
    }
    gains, nulls = [], []
    for name, (advantages, gate) in ways.items():
        played, null = (
            [_of_seed(seed, nights, change, advantages, gate) for seed in range(seed_count)]
            for change in (world.as_played, world.shuffled)
        )
        gains.append(fmean(_gains(played)))
        nulls.append(fmean(one for _, one in null))
        rows.append(
            {
                "case": name,
                "mean": round(gains[-1], 3),
                "se": round(_error(_gains(played)), 3),
                "update": round(fmean(one for _, one in played), 3),
                "null_update": round(nulls[-1], 3),
            }
        )
    as_seen = min(one["as_seen"] / one["trained"] for one in rows if one.get("side") == "ours")
    (cosine,) = (one["cosine"] for one in rows if one.get("side") == art.SAME)
    lost = min(gains[0] - gains[4], gains[2] - gains[3])
    return rows, _art_targets(as_seen, cosine, lost, max(nulls[0] / nulls[4], nulls[2] / nulls[3]))


def _art_targets(
    as_seen: float | None,
    cosine: float | None,
    gain: float | None,
    null: float | None,
    why: str = "",
) -> list[results.Target]:
    return [
        results.at_least("ART: our tokens that are trained on as vLLM saw them", as_seen, 1.0, why),
        results.at_least("ART: cosine where each session counts alike", cosine, 0.99, why),
        results.at_least("ART: our gain minus its, steps of one size", gain, -0.02, why),
        results.at_most("ART: our null update over its, steps of one size", null, 1.0, why),
    ]


PARTS: Final[Mapping[str, Callable[[int, int], Found]]] = {"site": _site, "art": _beside_art}


def _of_seed(
    seed: int,
    nights: int,
    change: world.Change,
    advantages: world.Advantages = world.leave_one_out,
    gate: bool = True,
) -> Learned:
    rng = np.random.default_rng(seed)
    place = world.site(rng)
    logits = world.whole_tasks(place, nights, rng, change, advantages=advantages, gate=gate)
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
            exchange_id=f"ex_{at}", began_at=float(at), stored_at=float(at), parent=parent,
            adapter="base", held_out=False, answered=True, trainable=True, task=task, origin="user",
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
