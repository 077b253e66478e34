"""Records a second and CPU a record, from a full bus into an empty store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.ingest.cells import BUSES, ROOT, STORES, Consumer, Json, KafkaSink, migrated
from benchmarks.ingest.servers import NoServerError, Servers
from benchmarks.ingest.traffic import exchanges

BATCH = 200
PEER = "executemany"
FORWARD = "forward"
CELLS = ("outbox to sqlite", "outbox to postgres", "kafka to sqlite", "kafka to postgres")


@dataclass(frozen=True, slots=True)
class Contender:
    """A version of ingest, and when it decides."""

    tree: Path
    """Its checkout."""
    settle_s: float | None
    """`groups.settle_s`; None where there is no such setting."""


AT_ONCE = Contender(ROOT, 0.0)
"""Exchanges are decided in the transaction that stores them."""
LATER = Contender(ROOT, 0.001)
"""Exchanges are read from the store to be decided, as with the default of a minute."""


def measure(
    folder: Path,
    *,
    records: int,
    rounds: int,
    contenders: Mapping[str, Contender],
    cells: Sequence[str] = CELLS,
) -> tuple[list[Json], list[Json], dict[str, str]]:
    """Measure each bus with each store, by turns with the peer.

    cells: such as "outbox to sqlite". Only of this one, the first, contenders that decide later and
        the peer are measured.
    Returns: the figures of each round, their medians by contender, and why a cell was left out.
    """
    found: list[Json] = []
    missing: dict[str, str] = {}
    with Servers(folder) as servers:
        for number in range(rounds):
            for cell in cells:
                try:
                    found += _round(folder, servers, cell, number, records, contenders)
                except NoServerError as error:
                    missing[cell] = str(error)
    return found, _medians(found), missing


def _round(
    folder: Path,
    servers: Servers,
    cell: str,
    number: int,
    records: int,
    contenders: Mapping[str, Contender],
) -> list[Json]:
    bus, _, store = cell.partition(" to ")
    found: list[Json] = []
    for name, contender in contenders.items():
        if contender is LATER and cell != CELLS[0]:
            continue
        place = folder / f"{bus}-{store}-{name}-{number}"
        place.mkdir()
        figures, filled = _consume(place, servers, bus, store, records, contender)
        found.append(_row(f"{name}: {cell}", number, records, figures))
        if filled:
            found.append(_row(f"{FORWARD} to {bus}, then {store}", number, records, filled))
        if contender is AT_ONCE and cell == CELLS[0]:
            found.append(_row(f"{PEER}: {cell}", number, records, _peer(place)))
        shutil.rmtree(place)
    return found


def _consume(
    place: Path, servers: Servers, bus: str, store: str, records: int, contender: Contender
) -> tuple[Json, Json]:
    """Returns: the figures of ingest, and of the forwarder where there is one."""
    with BUSES[bus](place, servers) as source, STORES[store](place, servers) as url:
        sink = source.fill(exchanges(), records)
        consumer = Consumer(
            source.url, url, tree=contender.tree, settle_s=contender.settle_s, batch=BATCH
        )
        try:
            return consumer.until_done(), sink.figures if isinstance(sink, KafkaSink) else {}
        finally:
            consumer.stop()


def _peer(place: Path) -> Json:
    """Insert the rows that ingest has just made."""
    into = place / "peer"
    into.mkdir()
    with migrated(into):
        command = [sys.executable, "-m", "benchmarks.ingest.peer"]
        paths = [str(place / "store.db"), str(into / "store.db"), str(BATCH)]
        done = subprocess.run([*command, *paths], cwd=ROOT, check=True, capture_output=True)
    figures: Json = json.loads(done.stdout)
    return figures


def _row(name: str, number: int, records: int, figures: Json) -> Json:
    records = figures.get("records", records)
    return {
        "what": name,
        "round": number,
        "records": records,
        "records_per_s": records / figures["wall_s"],
        "cpu_us_per_record": 1e6 * figures["cpu_s"] / records,
        "peak_mb": figures.get("peak_mb"),
    }


def _medians(found: list[Json]) -> list[Json]:
    names = list(dict.fromkeys(row["what"] for row in found))
    rows = []
    for name in names:
        mine = [row for row in found if row["what"] == name]
        row: Json = {"what": name, "records": mine[0]["records"]}
        for field in ("records_per_s", "cpu_us_per_record"):
            row[field] = median(one[field] for one in mine)
        if mine[0]["peak_mb"] is not None:
            row["peak_mb"] = max(one["peak_mb"] for one in mine)
        rows.append(row)
    return rows


def ratio(found: list[Json], name: str, other: str) -> float:
    """CPU of a record over that of another in the same round; the median over the rounds."""
    by_round = {row["round"]: row["cpu_us_per_record"] for row in found if row["what"] == other}
    return median(
        float(row["cpu_us_per_record"] / by_round[row["round"]])
        for row in found
        if row["what"] == name
    )
