"""Memory of the consumer over many records, and with prompts of 100,000 tokens; and how long it
takes a new one to know the sessions again."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.ingest.cells import ROOT, Consumer, Json, outbox, sqlite
from benchmarks.ingest.traffic import exchanges, long_exchanges
from ingest.intake.bus import open_bus
from ingest.intake.choose import RESTORED, Sessions
from sidecar.store.database import Database

PART = 5_000
"""Records that are put on the bus at once."""
LONG_TOKENS = 100_000


def flat(folder: Path, *, records: int, tree: Path = ROOT) -> Json:
    """Consume many records with one consumer; its memory in each fifth."""
    folder.mkdir()
    with outbox(folder) as bus, sqlite(folder) as store:
        source = exchanges()
        reader = open_bus(bus.url)
        consumer = Consumer(bus.url, store, tree=tree, stay=True, settle_s=1.0)
        next(consumer.lines())
        samples: list[tuple[int, float, float]] = []  # records, MB, CPU seconds
        try:
            for done in range(PART, records + 1, PART):
                bus.fill(source, PART)
                while reader.lag():
                    consumer.check()
                    time.sleep(0.05)
                samples.append((done, consumer.rss_mb(), consumer.cpu_s()))
                if done % (4 * PART) == 0:
                    print(f"  {done} records: {samples[-1][1]:.0f} MB", file=sys.stderr)
        finally:
            consumer.stop()
            reader.close()
        row: Json = {"what": "memory, many records", "records": records}
        for fifth in range(5):
            part = samples[fifth * len(samples) // 5 : (fifth + 1) * len(samples) // 5]
            row[f"rss_mb_{fifth + 1}"] = median(memory for _, memory, _ in part)
        (first, _, before), (last, _, after) = samples[-len(samples) // 5 - 1], samples[-1]
        row["cpu_us_per_record"] = 1e6 * (after - before) / (last - first)
        row["growth"] = row["rss_mb_5"] / row["rss_mb_4"] - 1
        return row


def rebuild(folder: Path, *, stored: int) -> Json:
    """What a restart costs with this many exchanges in the store. The newest `RESTORED` of them are
    read, whatever there is; they are of this benchmark's traffic, the others are filled in by SQL.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from support.large_store import make_large_store

    folder.mkdir()
    make_large_store(folder / "store.db", exchanges=max(1, stored - RESTORED))
    with outbox(folder) as bus:
        bus.fill(exchanges(), min(stored, RESTORED))
        store = f"sqlite:///{folder}/store.db"
        consumer = Consumer(bus.url, store)
        try:
            consumer.until_done()
        finally:
            consumer.stop()
    return _rebuild(store, stored)


def _rebuild(store: str, stored: int) -> Json:
    database = Database(store)
    began, cpu = time.monotonic(), time.process_time()
    found = Sessions(held_out_rate=0.1).restore(database, now=time.time())
    row: Json = {
        "what": f"sessions after a restart, of {stored} exchanges",
        "records": found,
        "rebuild_s": time.monotonic() - began,
        "cpu_us_per_record": 1e6 * (time.process_time() - cpu) / max(1, found),
    }
    database.close()
    return row


def long_prompts(folder: Path, *, records: int, tree: Path = ROOT) -> Json:
    """Consume records with long prompts; the highest memory."""
    folder.mkdir()
    with outbox(folder) as bus, sqlite(folder) as store:
        bus.fill(long_exchanges(LONG_TOKENS), records)
        consumer = Consumer(bus.url, store, tree=tree)
        try:
            lines = consumer.lines()
            idle = next(lines)
            *_, last = lines
        finally:
            consumer.stop()
    return {
        "what": f"memory, prompts of {LONG_TOKENS} tokens",
        "records": records,
        "idle_mb": idle["rss_mb"],
        "peak_mb": last["peak_mb"],
        "records_per_s": records / last["wall_s"],
        "cpu_us_per_record": 1e6 * last["cpu_s"] / records,
    }
