"""`make bench BENCH=canary`: levels, power and the anchor, on simulated canaries; exit 1 when a
target does not hold.

    python -m benchmarks canary [--canaries 1000] [--parts replay equal limits power stopped ...]

Each part is written to `benchmarks/results/canary-PART.json` as soon as it has ended.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import structlog

from benchmarks import results
from benchmarks.canary import breaker, limits, ratchet, small
from benchmarks.canary.play import Ended, History, compared, play
from benchmarks.canary.rivals import Peeking, Shares, asymptotic_half_width
from benchmarks.canary.traffic import World, differences
from benchmarks.results import Target, at_least, at_most
from deploy.canary.replay import verdict_of
from deploy.evidence.live import GUARDS
from deploy.evidence.quality import FLAWS, OF_GROUPS, Quality
from deploy.registry import proof_rule
from deploy.registry.canary_rule import quality_of
from deploy.registry.proof_rule import (
    GUARD_LEVEL,
    GUARD_RATIO,
    HARM_LEVEL,
    PROMOTE_LEVEL,
    SPLIT_LEVEL,
    level_of,
)
from sidecar.settings import Canary as CanarySettings

STEPS = (500, 1_000, 2_500, 5_000)
RULES = CanarySettings(steps=STEPS, step_min_s=600.0)
PLAIN = CanarySettings(steps=(2_000, 5_000))
SESSIONS = 100
"""Sessions of a canary of which 30% of the turns fail, within which it must be stopped."""
LOW_BASE = 0.02
"""Rate of failing turns of the champion up to which that is promised."""
FALSE_ROLLBACK = HARM_LEVEL + (len(GUARDS) + len(OF_GROUPS)) * GUARD_LEVEL
"""What the levels of the rule add up to."""
WITHIN_DAYS = 10.0
"""Days within which a small site promotes a candidate of +0.06."""
COLUMNS = (
    "part", "case", "canaries", "promoted", "rolled_back", "inconclusive", "held", "better",
    "peeking_better", "peeking_rollback", "shares_rollback", "groups", "canary_sessions",
    "most_sessions", "end", "worst", "proven", "in_time", "days", "days_90",
    "agreed", "undecided",
)  # fmt: skip


def equal_canary(world: World, rules: CanarySettings, seed: int) -> tuple[Ended, bool, bool, bool]:
    """Play one canary beside the rules that look for nothing."""
    peeking, shares = Peeking(), Shares()

    def watch(history: History) -> None:
        peeking(history)
        shares(history)

    ended = play(world, rules, seed=seed, watch=watch)
    return ended, peeking.promotes, peeking.rolls_back, shares.rolls_back


def a_world(seed: int) -> World:
    """Draw a world without a difference of quality: drift, an outage of both arms, popular
    openings, flawed answers, lost ones in every third world; the arms' replies take their own
    time."""
    rng = random.Random(f"world-{seed}")
    low = rng.uniform(0.02, 0.10)
    return World(
        low=low,
        high=rng.uniform(low, 0.20),
        swing_s=rng.uniform(1_800.0, 14_400.0),
        sessions_per_hour=rng.uniform(100.0, 400.0),
        popular=(0.0, 1.0 / 3.0)[seed % 2],
        outage_at_s=rng.uniform(0.0, 10_000.0),
        champion_s=rng.uniform(1.0, 40.0),
        candidate_s=rng.uniform(1.0, 40.0),
        lost=(0.0, 0.0, 0.02)[seed % 3],
        flawed=rng.uniform(0.0, 0.2),
    )


def drawn(seed: int) -> tuple[Ended, bool, bool, bool]:
    """Play the canary of a drawn world without a difference."""
    return equal_canary(a_world(seed), RULES, seed)


def steady(rate: float, seed: int) -> tuple[Ended, bool, bool, bool]:
    """Play an equal canary at one rate of bad turns."""
    return equal_canary(World(low=rate, high=rate), PLAIN, seed)


def with_effect(effect: float, rules: CanarySettings, seed: int) -> Ended:
    """Play a canary whose judged score differs."""
    return play(World(effect=effect), rules, seed=seed)


def failing(base: float, weight_bp: int, capture: float, seed: int) -> breaker.Stopped:
    """Play a canary of which 30% of the turns fail."""
    world = World(low=base, high=base, error_rate=0.3, hours=16.0)
    return breaker.stop(world, PLAIN, seed=seed, weight_bp=weight_bp, capture=capture)


def line(anchored: bool, seed: int) -> ratchet.Slide:
    """Play one line of champions."""
    return ratchet.slide(PLAIN, seed=seed, anchored=anchored)


def be_quiet() -> None:
    """The breaker logs each canary that it takes out."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks canary", description=__doc__)
    parser.add_argument("--canaries", type=int, default=1_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    asked = parser.parse_args(argv)
    codes = []
    with ProcessPoolExecutor(asked.processes, initializer=be_quiet) as pool:
        for name in asked.parts:
            machine, began = results.machine(), time.monotonic()
            rows, targets = PARTS[name](pool, asked.canaries)
            machine["took_s"] = round(time.monotonic() - began, 1)
            written = results.write(f"canary-{name}", rows, targets, machine=machine)
            print(results.table(rows, COLUMNS))
            print(f"\n{results.targets_table(targets)}\n\n{written}\n", flush=True)
            codes.append(results.exit_code(targets))
    return max(codes)


Part = tuple[list[results.Row], list[Target]]


def equal(pool: ProcessPoolExecutor, canaries: int) -> Part:
    """Canaries without a difference: what is decided about them is false."""
    cases: dict[str, Callable[[int], tuple[Ended, bool, bool, bool]]] = {"drawn worlds": drawn}
    cases |= {f"{rate:.0%} bad turns": partial(steady, rate) for rate in (0.02, 0.05, 0.10, 0.20)}
    rows: list[results.Row] = []
    targets = []
    for name, one in cases.items():
        count = canaries if one is drawn else max(10, canaries // 5)
        played = list(pool.map(one, range(count), chunksize=8))
        row = _row("A/A", name, [ended for ended, *_ in played])
        row |= {
            "better": sum("better" in ended.claims for ended, *_ in played) / count,
            "peeking_better": sum(better for _, better, _, _ in played) / count,
            "peeking_rollback": sum(peeked for *_, peeked, _ in played) / count,
            "shares_rollback": sum(shares for *_, shares in played) / count,
        }
        rows.append(row)
        row["held"] = sum(ended.held for ended, *_ in played) / count
        targets += [
            at_most(f"A/A, {name}: rolled back", _number(row, "rolled_back"), FALSE_ROLLBACK),
            at_most(
                f"A/A, {name}: held for the split",
                _number(row, "held"),
                allowed(SPLIT_LEVEL, count),
            ),
        ]
        if one is drawn:
            better, peeking = _number(row, "better"), _number(row, "peeking_better")
            targets += [
                at_most(f"A/A, {name}: called better", better, PROMOTE_LEVEL),
                at_least(f"A/A, {name}: peeking calls it better", peeking, 0.25),
                at_least(
                    f"A/A, {name}: peeking rolls back", _number(row, "peeking_rollback"), 0.25
                ),
            ]
    return rows, targets


def allowed(level: float, count: int) -> float:
    """Return the share of `count` canaries that three standard errors over a level are: where a
    level is used up, half of all runs would find more than the level."""
    return level + 3.0 * math.sqrt(level * (1.0 - level) / count)


def at_limits(pool: ProcessPoolExecutor, canaries: int) -> Part:
    """Candidates exactly as bad as is accepted: what is proven against them, or for them, is
    false."""
    flaws = {kind: level_of(kind) for kind in (*FLAWS, *OF_GROUPS)}
    sessions = {"guard": GUARD_LEVEL, "held": SPLIT_LEVEL}
    busy = {"guard": level_of("evasive"), "held": SPLIT_LEVEL}
    cases: dict[str, tuple[Callable[[int], dict[str, bool]], dict[str, float]]] = {
        f"sessions: {GUARD_RATIO:g} times as many bad": (
            partial(limits.guard, PLAIN), sessions,
        ),
        "busy site: replies of 8 s beside 30 s": (partial(limits.busy, PLAIN, 1, 0.2), busy),
        "busy agents without pauses: 8 s beside 30 s": (
            partial(limits.busy, PLAIN, 20, 0.05), busy,
        ),
        "long sessions that begin together, better at every turn": (
            partial(limits.together, PLAIN), sessions,
        ),
        "groups: no difference": (
            partial(limits.groups, PLAIN, 0.0),
            {"better": PROMOTE_LEVEL, "harm": HARM_LEVEL, **flaws},
        ),
        "groups: worse by the margin": (
            partial(limits.groups, PLAIN, -PLAIN.margin), {"no_worse": PROMOTE_LEVEL},
        ),
        "groups: 0.06 worse, but 70% of the sessions end in small talk": (
            partial(limits.small_talk, PLAIN, -0.06), {"no_worse": PROMOTE_LEVEL},
        ),
    }  # fmt: skip
    rows: list[results.Row] = []
    targets = []
    for name, (one, levels) in cases.items():
        played = list(pool.map(one, range(canaries), chunksize=8))
        for what, level in levels.items():
            share = sum(proved[what] for proved in played) / canaries
            case = f"{name}: {what}"
            rows.append({"part": "limits", "case": case, "canaries": canaries, "proven": share})
            targets.append(at_most(case, share, allowed(level, canaries)))
    return rows, targets


def power(pool: ProcessPoolExecutor, canaries: int) -> Part:
    """Canaries with a difference of judged scores."""
    count = max(20, canaries // 5)
    superior = PLAIN.model_copy(update={"promote_on": "better"})
    cases = {
        "+0.06, promoted as no worse": (0.06, PLAIN),
        "+0.06, promoted as better": (0.06, superior),
        "0.00, promoted as no worse": (0.0, PLAIN),
        "-0.05, at the margin": (-PLAIN.margin, PLAIN),
        "-0.30": (-0.3, PLAIN),
    }
    rows: list[results.Row] = []
    for name, (effect, rules) in cases.items():
        played = list(pool.map(partial(with_effect, effect, rules), range(count), chunksize=8))
        rows.append(_row("power", name, played))
    by_name = {str(row["case"]): row for row in rows}
    better, edge = by_name["+0.06, promoted as better"], by_name["-0.05, at the margin"]
    plain = by_name["+0.06, promoted as no worse"]
    width = asymptotic_half_width(variance=0.35**2, count=500, level=0.05)
    rows.append({"part": "power", "case": f"gbstats half-width at 500 groups: {width:.4f}"})
    return rows, [
        at_most("+0.06 as no worse: groups, median", _number(plain, "groups"), 500),
        at_least("+0.06 as no worse: promoted", _number(plain, "promoted"), 0.9),
        at_most("+0.06 as better: groups, median", _number(better, "groups"), 500),
        at_least("+0.06 as better: promoted", _number(better, "promoted"), 0.9),
        at_most("at the margin: promoted", _number(edge, "promoted"), PROMOTE_LEVEL),
    ]


def stopped(pool: ProcessPoolExecutor, canaries: int) -> Part:
    """Canaries that fail 30% of their turns."""
    canaries = max(20, canaries // 5)
    rows: list[results.Row] = []
    targets = []
    for base, weight_bp, capture in (
        (0.0, 500, 1.0), (0.02, 500, 1.0), (0.02, 2_000, 1.0), (0.02, 5_000, 1.0),
        (0.02, 2_000, 0.02), (0.02, 2_000, 0.0), (0.10, 2_000, 1.0),
    ):  # fmt: skip
        case = f"base {base:.0%}, weight {weight_bp / 100:g}%, capture {capture:g}"
        one = partial(failing, base, weight_bp, capture)
        played = list(pool.map(one, range(canaries), chunksize=4))
        alone = ("breaker",) if capture < 1.0 else ("breaker", "control", "first of both")
        for who in alone:
            known = sorted(one for one in (_noticed(each, who) for each in played) if one)
            rows.append(
                {
                    "part": "30% errors",
                    "case": f"{case}: {who}",
                    "canaries": canaries,
                    "rolled_back": len(known) / canaries,
                    "canary_sessions": statistics.median(known) if known else None,
                    "most_sessions": known[-1] if known else None,
                }
            )
            if base > LOW_BASE:
                continue  # shown, not promised: docs/canary.md says what long sessions hide
            share = sum(one <= SESSIONS for one in known) / canaries
            least = 0.99 if who == "first of both" else 0.9
            what = f"{case}: stopped within {SESSIONS} sessions, {who}"
            targets.append(at_least(what, share, least))
    return rows, targets


def _noticed(stopped: breaker.Stopped, who: str) -> int | None:
    """Return the canary's sessions until somebody noticed; None: never."""
    if who != "first of both":
        found: int | None = getattr(stopped, who)
        return found
    known = [one for one in (stopped.breaker, stopped.control) if one is not None]
    return min(known, default=None)


def slides(pool: ProcessPoolExecutor, canaries: int) -> Part:
    """Forty slightly bad candidates in a row, with and without the anchor."""
    lines = max(10, canaries // 20)
    rows: list[results.Row] = []
    ends = {}
    for anchored in (True, False):
        played = list(pool.map(partial(line, anchored), range(lines), chunksize=1))
        ends[anchored] = sorted(one.end for one in played)
        rows.append(
            {
                "part": "ratchet",
                "case": "with the anchor" if anchored else "without the anchor",
                "canaries": ratchet.CANDIDATES * lines,
                "promoted": sum(one.promoted for one in played) / (ratchet.CANDIDATES * lines),
                "end": statistics.fmean(ends[anchored]),
                "worst": ends[anchored][0],
            }
        )
    above = list(pool.map(partial(ratchet.from_above, PLAIN), range(lines), chunksize=1))
    lost = sum(one.end < -PLAIN.margin for one in above) / lines
    rows.append(
        {
            "part": "ratchet",
            "case": f"12 of -0.03, from +{ratchet.WON:g} above the anchor",
            "canaries": 12 * lines,
            "promoted": sum(one.promoted for one in above) / (12 * lines),
            "end": statistics.fmean(one.end for one in above),
            "worst": min(one.end for one in above),
        }
    )
    return rows, [
        at_most(
            f"12 candidates of -0.03 from +{ratchet.WON:g}: {lines} lines that lose over 0.05",
            lost,
            allowed(0.05, lines),
        ),
        at_most(
            f"{ratchet.CANDIDATES} bad candidates, anchored: {lines} lines that lose over 0.05",
            sum(end < -PLAIN.margin for end in ends[True]) / lines,
            allowed(0.05, lines),
        ),
        at_most(
            f"{ratchet.CANDIDATES} bad candidates, not anchored: mean end",
            statistics.fmean(ends[False]),
            -PLAIN.margin,
        ),
    ]


def small_sites(pool: ProcessPoolExecutor, canaries: int) -> Part:
    """Candidates at sites of a few sessions a day, with a month of records."""
    count = max(20, canaries // 10)
    rows: list[results.Row] = []
    targets = []
    for a_day, least in ((20.0, 0.9), (50.0, 0.98), (100.0, 0.98)):
        for effect in (0.06, 0.0, -PLAIN.margin):
            one = partial(small.tried, a_day, effect, PLAIN)
            found = small.summary(list(pool.map(one, range(count), chunksize=4)), WITHIN_DAYS)
            case = f"{a_day:g} sessions a day, {effect:+.2f}"
            rows.append({"part": "small", "case": case, "canaries": count, **found})
            if effect > 0.0:
                what = f"{case}: promoted within {WITHIN_DAYS:g} days"
                targets.append(at_least(what, found["in_time"], least))
            elif effect < 0.0:
                level = allowed(PROMOTE_LEVEL, count)
                targets.append(at_most(f"{case}: promoted", found["promoted"], level))
            if effect >= 0.0:
                level = allowed(FALSE_ROLLBACK, count)
                targets.append(at_most(f"{case}: rolled back", found["rolled_back"], level))
    return rows, targets


PLANTED = tuple(
    sign * size
    for size in (0.06, 0.08, 0.1, 0.12, 0.15, 0.18, 0.2, 0.25, 0.3, 0.35)
    for sign in (1.0, -1.0)
)
"""Mean differences of twenty candidates to their champion."""
REPLAYED = 200
"""Prompts of a replay, as the command has it."""
SMALL = (0.0, 0.02, -0.02, 0.04, -0.04, -0.05)
"""Differences that 200 prompts seldom prove; -0.05 is the margin of "no worse"."""
AGREEING = 18
"""Candidates of twenty on which a replay's verdict is the one of the canary that follows."""
ENDS = {"promoted": ("better", "no worse"), "rolled_back": ("worse",)}
"""How a canary ends -> the verdicts that agree."""
MOST_WRONG = 0.05
"""Share of wrong or contradicted verdicts; each has a level of 5%."""


def replayed(effect: float, seed: int) -> tuple[str, str]:
    """Return the verdict of a replay of one candidate, and how its canary ends with other
    prompts."""
    world, rng = World(effect=effect), random.Random(f"replay-{effect}-{seed}")
    scores, quality = differences(world, rng), Quality()
    while quality.groups + quality.unknown < REPLAYED and proof_rule.harm(quality) is None:
        one = compared(world, scores, rng)
        quality = quality_of([one], proof_rule.limits_of(PLAIN), anchored=False, start=quality)
    return verdict_of(quality, PLAIN)[0], play(world, PLAIN, seed=seed).phase


def replays(pool: ProcessPoolExecutor, canaries: int) -> Part:
    """Twenty planted candidates, and some that hardly differ, first in a replay and then in a
    canary: the evidence alone, without vLLM, judge and store."""
    rounds = max(5, canaries // 20)
    rows: list[results.Row] = []
    agreed = contradicted = 0.0
    wrong = {0.0: 0.0, -0.05: 0.0}
    for effect in (*PLANTED, *SMALL):
        played = list(pool.map(partial(replayed, effect), range(rounds), chunksize=4))
        same = sum(verdict in ENDS.get(phase, ("undecided",)) for verdict, phase in played)
        agreed += same / rounds if effect in PLANTED else 0.0
        opposite = {"promoted": ENDS["rolled_back"], "rolled_back": ENDS["promoted"]}
        against = sum(verdict in opposite.get(phase, ()) for verdict, phase in played)
        contradicted += against / rounds
        if effect in wrong:
            false = ENDS["promoted" if effect else "rolled_back"]
            wrong[effect] = sum(verdict in false for verdict, _ in played) / rounds
        row = {"part": "replay", "case": f"{effect:+.2f}", "canaries": rounds}
        phases, verdicts = Counter(end for _, end in played), Counter(one for one, _ in played)
        row |= {name: phases[name] / rounds for name in ("promoted", "rolled_back")}
        row |= {"agreed": same / rounds, "undecided": verdicts["undecided"] / rounds}
        rows.append(row | {"contradicted": against / rounds})
    share = contradicted / len((*PLANTED, *SMALL))
    return rows, [
        at_least(f"replay and canary agree, of {len(PLANTED)} candidates", agreed, AGREEING),
        at_most("replay's verdict is against the end of the canary", share, MOST_WRONG),
        at_most("replay calls an equal candidate worse", wrong[0.0], MOST_WRONG),
        at_most("replay calls one at the margin no worse or better", wrong[-0.05], MOST_WRONG),
    ]


PARTS = {
    "replay": replays,
    "equal": equal,
    "limits": at_limits,
    "power": power,
    "stopped": stopped,
    "slides": slides,
    "small": small_sites,
}


def _row(part: str, case: str, played: Sequence[Ended]) -> dict[str, object]:
    phases = Counter(one.phase for one in played)
    return {
        "part": part,
        "case": case,
        "canaries": len(played),
        **{
            name: phases[name] / len(played) for name in ("promoted", "rolled_back", "inconclusive")
        },
        "groups": statistics.median(one.groups for one in played),
        "canary_sessions": statistics.median(one.canary_sessions for one in played),
    }


def _number(row: results.Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float)
    return float(value)
