"""`python -m benchmarks ruler`: RULER beside openpipe-art's, or a part of it for whoever tunes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import at_least, at_most
from benchmarks.ruler import conditions, ranking, speed
from benchmarks.ruler.ranking import AS_GOOD, WORSE, Findings
from benchmarks.ruler.server import ROOT
from benchmarks.ruler.users import ttft

BENCH = ROOT / ".bench"
IN_FLIGHT = 50.0
"""Least groups that the judge is asked about at once."""
REQUESTS = 1_000
"""Fewest requests of an arm that have a p99 to compare: ten of them are slower."""
TTFT = 1.05
"""Most that the sampling of candidates may add to users' p99 of the time to first token."""
MEMORY_MB = 300.0
"""Most resident memory of the scoring process meanwhile."""
COLUMNS = (
    *("condition", "side", "groups", "unusable", "wrong", "tau", "tau_low", "tau_high"),
    *("tau_of_all", "tau_per_call", "over_art", "order", "first_bias", "twins_apart"),
    *("calls", "prompt_tokens", "completion_tokens", "tokens_over_art", "steered"),
)


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    machine = results.machine()
    BENCH.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ruler-", dir=BENCH))
    found = Findings()
    try:
        for name in options.part or DEFAULT:
            print(f"  {name}", file=sys.stderr)
            (folder / name).mkdir()
            before = len(found.rows)
            PARTS[name](folder / name, options, found)
            print(results.table(found.rows[before:], _columns(found.rows[before:])), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(results.targets_table(found.targets))
    print("\n".join(where_art_is_as_good(found.rows)))
    path = results.write(
        "ruler-part" if options.part else "ruler",
        found.rows,
        found.targets,
        machine=machine,
        folder=options.out,
    )
    print(f"\nwritten to {path}")
    return results.exit_code(found.targets)


def where_art_is_as_good(rows: Sequence[results.Row]) -> list[str]:
    """Say under which conditions the published function is as good or better."""
    said = []
    for side in dict.fromkeys(str(row["side"]) for row in rows if "order" in row):
        ours = [row for row in rows if row.get("side") == side and "order" in row]
        equal = [str(row["condition"]) for row in ours if row["order"] == AS_GOOD]
        worse = [str(row["condition"]) for row in ours if row["order"] == WORSE]
        fewer = [row for row in ours if float(str(row.get("tokens_over_art", 0.0))) > 1]
        said += [
            f"{side}: ART orders answers as well under {', '.join(equal) or 'no condition'};",
            f"{side}: it orders them better under {', '.join(worse) or 'no condition'};",
            f"{side}: it takes fewer tokens under {len(fewer)} of {len(ours)} conditions.",
        ]
    return said


def _columns(rows: Sequence[results.Row]) -> tuple[str, ...]:
    """Those of the ranking, else all that the rows have."""
    if rows and "condition" in rows[0]:
        return COLUMNS
    return tuple(dict.fromkeys(name for row in rows for name in row))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ruler", description=__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="several may be given")
    parser.add_argument("--groups", type=int, default=200, help="of each condition of rank")
    parser.add_argument(
        "--condition", action="append", default=[], choices=list(conditions.CONDITIONS)
    )
    parser.add_argument("--each", type=int, default=8, help="groups for each injection and place")
    parser.add_argument("--stored", type=int, default=3_000, help="groups in the store of speed")
    parser.add_argument("--seconds", type=float, default=60.0, help="that speed is measured for")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--killed", type=int, default=1_000, help="groups in the store of kills")
    parser.add_argument("--blocks", type=int, default=5, help="of ttft, for each arm")
    parser.add_argument("--block-seconds", type=float, default=55.0)
    parser.add_argument("--rate", type=float, default=4.0, help="users' requests a second in ttft")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer in ttft")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        help="one more arm of ttft, with sampling on and groups.concurrency=4,... changed",
    )
    parser.add_argument("--seed", default="1")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="where the JSON goes")
    return parser.parse_args(argv)


def _rank(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    ranking.rank(
        folder, count=options.groups, seed=options.seed, only=options.condition, found=found
    )


def _injections(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    ranking.inject(folder, each=options.each, seed=options.seed, found=found)


def _speed(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    row = speed.speed(folder, stored=options.stored, seconds=options.seconds)
    found.rows.append(row)
    found.targets += [
        at_least("groups in flight, median", row["in_flight_median"], IN_FLIGHT),
        at_most("highest memory of score, MB", row["peak_mb"], MEMORY_MB),
    ]


def _kills(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    row = speed.kills(folder, stored=options.killed, times=options.kills)
    found.rows.append(row)
    what = f"SIGKILL of score, {row['times']} times"
    found.targets += [
        at_most(f"{what}: groups without scores", row["lost"], 0),
        at_most(f"{what}: scores written twice", row["doubled"], 0),
        at_most(f"{what}: scored by the product's count", row["counted"], row["groups"]),
    ]


def _ttft(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    plan = ttft.Plan(
        blocks=options.blocks,
        block_s=options.block_seconds,
        rate=options.rate,
        max_tokens=options.max_tokens,
        also={f"{ttft.ON}, {one}": _changes(one) for one in options.also},
    )
    rows = ttft.measure(folder, plan)
    found.rows += rows
    found.targets.append(ttft_target(rows))


def ttft_target(rows: Sequence[results.Row]) -> results.Target:
    """Judge the p99 with sampling on, over off; fewer than REQUESTS in an arm say nothing of it."""
    arms = {row["sampling"]: row for row in rows}
    on = arms[ttft.ON]
    least = min(int(str(arms[arm]["requests"])) for arm in (ttft.OFF, ttft.ON))
    over = float(str(on["p99_over_off"])) if least >= REQUESTS else None
    why = f"95% interval {on['p99_interval']}, {least} requests an arm; {REQUESTS} are needed"
    return at_most("users' p99 TTFT, on over off", over, TTFT, why)


def _changes(given: str) -> dict[str, dict[str, Any]]:
    """Read `section.key=value,...`, each value as JSON. Raises: SystemExit when one is not so."""
    changes: dict[str, dict[str, Any]] = {}
    for one in given.split(","):
        name, _, value = one.partition("=")
        section, _, key = name.partition(".")
        try:
            changes.setdefault(section, {})[key] = json.loads(value)
        except ValueError as error:
            raise SystemExit(f"--also {given}: not section.key=JSON: {error}") from error
    return changes


PARTS: Mapping[str, Callable[[Path, argparse.Namespace, Findings], None]] = {
    "rank": _rank,
    "injections": _injections,
    "speed": _speed,
    "kills": _kills,
    "ttft": _ttft,
}
DEFAULT = ("rank", "injections", "speed", "kills")
"""Parts of a whole run; `ttft` starts vLLM and is asked for by name."""
