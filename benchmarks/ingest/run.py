"""`python -m benchmarks ingest`: from the bus to the store, or a part of it for whoever tunes."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import results
from benchmarks.ingest import live, memory, sizes, throughput
from benchmarks.ingest.cells import ROOT, Json
from benchmarks.ingest.servers import NoServerError, Servers
from benchmarks.results import Target, at_least, at_most

BENCH = ROOT / ".bench"
OURS, LATER = "ours", "ours, decided later"
COLUMNS = (
    *("what", "records", "records_per_s", "cpu_us_per_record"),
    *("cpu_over_executemany", "cpu_over_before", "idle_mb", "peak_mb"),
    *(f"rss_mb_{fifth}" for fifth in range(1, 6)),
    *("growth", "rebuild_s", "p50_s", "p99_s", "max_s"),
    *("bytes", "request_body", "prompt_token_ids", "base_id", "sampling", "timings"),
    *("message_body", "token_ids", "logprobs", "encode_us", "store_us", "read_us"),
    *("times", "lost", "doubled", "undecided", "stored_while_full"),
)
RECORDS_PER_S = {"outbox to sqlite": 2_000.0, "kafka to postgres": 1_500.0}
GROWTH = 0.03
"""Share by which memory may grow from the fourth fifth of the records to the last one."""
LONG_MB = 182.0
"""Memory that records with long prompts may add, 150 MB and 32: 4 MB on the bus, 32 MB in a portion
of records, as much again that Python and SQLite have freed and keep, and a vocabulary; what
messages say is remembered in 24 MB, and which of them hold no secret in 8 MB."""
LATENCY_S = 2.0
CPU_OF_DELTAS = 1.25
"""CPU of storing and of reading once, over that of rows that are compressed alone. Storing takes as
much or less; reading takes twice as much, because it decodes bases too."""
SMALLER = 5.0
"""Times by which an exchange of multi-turn traffic is smaller than one that is compressed alone."""


@dataclass(slots=True)
class Findings:
    """What was measured so far."""

    rows: list[Json] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    machine = results.machine()
    BENCH.mkdir(exist_ok=True)
    parent = options.folder or BENCH
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ingest-", dir=parent))
    found = Findings()
    try:
        for name in options.part or PARTS:
            print(f"  {name}", file=sys.stderr)
            PARTS[name](folder / name, options, found)
            print(results.table(found.rows, COLUMNS), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(results.targets_table(found.targets))
    path = results.write(
        "ingest-part" if options.part else "ingest",
        found.rows,
        found.targets,
        machine=machine,
        folder=options.out,
    )
    print(f"\nwritten to {path}")
    return results.exit_code(found.targets)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ingest", description=__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="several may be given")
    parser.add_argument(
        "--cell", action="append", choices=throughput.CELLS, help="of throughput; default all"
    )
    parser.add_argument("--records", type=int, default=6_000, help="of a round of throughput")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--many", type=int, default=150_000, help="records of the memory part; a million take long"
    )
    parser.add_argument(
        "--stored", type=int, default=1_000_000, help="exchanges of the store of the rebuild part"
    )
    parser.add_argument("--long", type=int, default=100, help="records with long prompts")
    parser.add_argument("--requests", type=int, default=1_500, help="of each mix of sizes")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the latency part")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--before", type=Path, help="checkout of an older version to compare with")
    parser.add_argument("--folder", type=Path, help="where the databases go; default .bench")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="where the JSON goes")
    return parser.parse_args(argv)


def _throughput(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    folder.mkdir()
    contenders = {OURS: throughput.AT_ONCE, LATER: throughput.LATER}
    if options.before:
        contenders["before"] = throughput.Contender(options.before, None)
    rounds, medians, missing = throughput.measure(
        folder,
        records=options.records,
        rounds=options.rounds,
        contenders=contenders,
        cells=options.cell or throughput.CELLS,
    )
    by_name = {row["what"]: row for row in medians}
    for cell in options.cell or throughput.CELLS:
        ours, peer = f"{OURS}: {cell}", f"{throughput.PEER}: {cell}"
        if (bound := RECORDS_PER_S.get(cell)) is not None:
            rate = None if cell in missing else by_name[ours]["records_per_s"]
            why = missing.get(cell, "")
            found.targets.append(at_least(f"{cell}: records a second", rate, bound, why))
        elif cell in missing:
            print(f"  {cell} is left out: {missing[cell]}", file=sys.stderr)
        for name in (ours, f"{LATER}: {cell}"):
            for other in (peer, f"before: {cell}"):
                if name in by_name and other in by_name:
                    column = f"cpu_over_{other.partition(':')[0]}"
                    by_name[name][column] = throughput.ratio(rounds, name, other)
    found.rows += medians


def _memory(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    many = memory.flat(folder, records=options.many)
    found.rows.append(many)
    found.targets.append(at_most("memory: growth in the last fifth", many["growth"], GROWTH))


def _rebuild(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    found.rows.append(memory.rebuild(folder, stored=options.stored))


def _long(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    row = memory.long_prompts(folder, records=options.long)
    found.rows.append(row)
    grown = row["peak_mb"] - row["idle_mb"]
    found.targets.append(at_most(f"{row['what']}: MB over an idle consumer", grown, LONG_MB))
    if options.before:
        before = memory.long_prompts(
            folder.with_name("long-before"), records=options.long, tree=options.before
        )
        found.rows.append({**before, "what": f"before: {before['what']}"})


def _latency(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    row = live.latency(folder, rate=200.0, seconds=options.seconds)
    found.rows.append(row)
    found.targets.append(at_most("from reply to queryable at 200/s: p99", row["p99_s"], LATENCY_S))


def _kills(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    _nothing_lost(live.kills(folder, times=options.kills, rate=200.0), found)
    servers_folder = folder / "servers"
    servers_folder.mkdir()
    with Servers(servers_folder) as servers:
        try:
            row = live.kills_of_forwarder(
                folder / "forward", servers, times=options.kills, rate=200.0
            )
        except NoServerError as error:
            found.targets.append(at_most("SIGKILL of forward: lost", None, 0.0, str(error)))
        else:
            _nothing_lost(row, found)


def _disk(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    _nothing_lost(live.full_disk(folder, rate=200.0), found)


def _sizes(folder: Path, options: argparse.Namespace, found: Findings) -> None:
    folder.mkdir()
    try:
        pairs = list(sizes.measure(folder, BENCH / "data", requests=options.requests))
    except OSError as error:
        why = f"no data ({error}); run benchmarks/sessions/setup"
        found.targets.append(at_least("bytes an exchange", None, SMALLER, why))
        return
    for ours, peer in pairs:
        found.rows += [ours, peer]
        mix = ours["what"].partition(": ")[2]
        smaller = peer["bytes"] / ours["bytes"]
        cpu = [one["store_us"] + one["read_us"] for one in (ours, peer)]
        found.targets += [
            at_least(f"{mix}: times smaller than rows compressed alone", smaller, SMALLER),
            at_most(f"{mix}: CPU to store and read over theirs", cpu[0] / cpu[1], CPU_OF_DELTAS),
        ]


def _nothing_lost(row: Json, found: Findings) -> None:
    found.rows.append(row)
    for what in ("lost", "doubled", "undecided"):
        found.targets.append(at_most(f"{row['what']}: {what}", row[what], 0))


PARTS: Mapping[str, Callable[[Path, argparse.Namespace, Findings], None]] = {
    "throughput": _throughput,
    "latency": _latency,
    "long": _long,
    "kills": _kills,
    "disk": _disk,
    "rebuild": _rebuild,
    "memory": _memory,
    "sizes": _sizes,
}
