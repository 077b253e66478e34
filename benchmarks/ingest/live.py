"""The real `python -m ingest` behind a recorder under load: how long until a reply can be queried,
and what is left after 20 SIGKILLs, and after a full disk.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.ingest.cells import ROOT, Bus, Consumer, Json, kafka, migrated, outbox
from benchmarks.ingest.servers import Servers
from benchmarks.ingest.traffic import MODEL
from ingest.intake.bus import open_bus
from sidecar.capture.outbox import Outbox, OutboxReader, outbox_path

PATIENCE_S = 120.0
"""How long nothing may move before an account fails."""
MOST_WAITING = 2_000
"""Records that wait while ingest is killed again and again. Without a bound they grow by `rate` for
as long as ingest takes to start, and the last drain takes longer than all kills together."""
SETTLE_S = 1.0
"""`groups.settle_s`: so that the accounts need not wait a minute for the last decision."""
WARM_UP_S = 5.0
"""Ingest loads its tokenizer and asks for vLLM at its first steps; replies of this time do not
count."""


@contextmanager
def ingest(
    folder: Path, bus: str, store: str, *, tree: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process, with the settings as they are shipped; no vLLM answers its probe."""
    config = folder / "sidecar.toml"
    lines = [
        f"state_dir = {json.dumps(str(folder))}",
        "[serving]",
        'upstreams = ["http://127.0.0.1:1"]',
        f'model = "{MODEL}"',
        "sampling_defaults = {}",
        'grammar = "as_asked"',
        f'[bus]\nurl = "{bus}"',
        f'[store]\nurl = "{store}"',
        f"[groups]\nsettle_s = {SETTLE_S}",
    ]
    config.write_text("\n".join(lines) + "\n")
    with (folder / "ingest.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ingest", "--config", str(config)],
            env={**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def feeder(
    bus: Bus, log: Path, *, rate: float, seconds: float, most: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.ingest.feeder", bus.url, str(rate), str(seconds)]
    limits = [] if most is None else [str(most)]
    process = subprocess.Popen(
        [*command, str(log), "live-", *limits], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def offered(log: Path) -> dict[str, float]:
    """Exchange id -> when its reply ended, Unix seconds."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return {name: float(at) for name, at in lines}


def stored(store: Path) -> Counter[str]:
    with closing(sqlite3.connect(store)) as connection:
        return Counter(name for (name,) in connection.execute("SELECT exchange_id FROM exchange"))


def drain(bus: Bus, store: str, log: Path) -> None:
    """Wait until the bus is empty and all is decided, as long as there is progress.

    Raises: RuntimeError with the end of the log.
    """
    reader, path = open_bus(bus.url), Path(store.removeprefix("sqlite:///"))
    for left in (reader.lag, partial(undecided, path)):
        least, deadline = left() + 1, time.monotonic() + PATIENCE_S
        while now := left():
            if now < least:
                least, deadline = now, time.monotonic() + PATIENCE_S
            elif time.monotonic() > deadline:
                why = f"nothing moves, {now} records wait"
                raise RuntimeError(f"{why}; {log.read_text()[-2000:]}")
            time.sleep(0.05)
    reader.close()


def undecided(store: Path) -> int:
    """Count the exchanges that selection has not decided."""
    with closing(sqlite3.connect(store)) as connection:
        rows = connection.execute("SELECT COUNT(*) FROM exchange WHERE selection = 'new'")
        number: int = rows.fetchone()[0]
        return number


def latency(folder: Path, *, rate: float, seconds: float, tree: Path = ROOT) -> Json:
    """From the end of a reply until a query of the store finds its exchange."""
    folder.mkdir()
    seen: dict[str, float] = {}
    with (
        outbox(folder) as bus,
        migrated(folder) as store,
        ingest(folder, bus.url, store, tree=tree),
    ):
        wait_for(folder / "ingest.log", "ingest_ready")
        with feeder(bus, folder / "offered", rate=rate, seconds=seconds + WARM_UP_S) as feeding:
            path, last, ended = folder / "store.db", 0, 0.0
            with closing(sqlite3.connect(path, isolation_level=None)) as reader:
                query = "SELECT seq, exchange_id FROM exchange WHERE seq > ? ORDER BY seq"
                while not ended or time.time() < ended + 5.0:
                    for seq, name in reader.execute(query, (last,)).fetchall():
                        last, seen[name] = seq, time.time()
                    if not ended and feeding.poll() is not None:
                        ended = time.time()
                    time.sleep(0.01)
    began = offered(folder / "offered")
    warm = min(began.values()) + WARM_UP_S
    waits = sorted(seen.get(name, float("inf")) - at for name, at in began.items() if at > warm)
    return {
        "what": f"reply to queryable at {rate:g}/s",
        "records": len(waits),
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[len(waits) * 99 // 100],
        "max_s": waits[-1],
    }


def wait_for(log: Path, event: str) -> None:
    """Raises: RuntimeError after ten minutes; on a busy machine the first batch takes one."""
    deadline = time.monotonic() + 600
    while not log.exists() or event not in log.read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {event} in {log}")
        time.sleep(0.02)


def kills(folder: Path, *, times: int, rate: float) -> Json:
    """Kill ingest at random moments under load. Then let one drain the bus."""
    folder.mkdir()
    rng = random.Random(12)
    log = folder / "ingest.log"
    with outbox(folder) as bus, migrated(folder) as store:
        offered_at = folder / "offered"
        with feeder(bus, offered_at, rate=rate, seconds=1e6, most=MOST_WAITING) as feeding:
            for number in range(times):
                with ingest(folder, bus.url, store) as process:
                    log.write_bytes(b"")
                    wait_for(log, "consumed")
                    time.sleep(rng.uniform(0.0, 0.5))
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                print(f"  kill {number + 1} of {times}", file=sys.stderr)
            _end(feeding)
        with ingest(folder, bus.url, store):
            drain(bus, store, log)
        return _account("SIGKILL of ingest", times, set(offered(offered_at)), folder / "store.db")


def kills_of_forwarder(folder: Path, servers: Servers, *, times: int, rate: float) -> Json:
    """Kill the forwarding process at random moments under load, then let one drain the outbox, and
    a consumer the topic. Raises: NoServerError."""
    folder.mkdir()
    rng = random.Random(13)
    with kafka(folder, servers) as bus:
        config, offered_at = folder / "sidecar.toml", folder / "offered"
        config.write_text(
            f"state_dir = {json.dumps(str(folder))}\n[bus]\nurl = {json.dumps(bus.url)}\n"
            "[kafka]\npartitions = 1\n"
        )
        path = outbox_path(bus.url, folder)
        Outbox(path, max_rows=1_000_000).close()  # makes the file
        with feeder(bus, offered_at, rate=rate, seconds=1e6) as feeding:
            waiting = OutboxReader(path)
            for number in range(times):
                with forwarder(config) as process:
                    _wait_for_less(waiting)
                    time.sleep(rng.uniform(0.0, 0.5))
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                print(f"  kill {number + 1} of {times}", file=sys.stderr)
            _end(feeding)
        with forwarder(config):
            while waiting.count():
                time.sleep(0.1)
        store = f"sqlite:///{folder}/store.db"
        consumer = Consumer(bus.url, store, settle_s=0.0)
        try:
            consumer.until_done()
        finally:
            consumer.stop()
        return _account("SIGKILL of forward", times, set(offered(offered_at)), folder / "store.db")


@contextmanager
def forwarder(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process that the proxy starts, from the outbox to Kafka."""
    command = [sys.executable, "-P", "-m", "sidecar.forwarding", "--config", str(config)]
    with config.with_name("forward.log").open("ab") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _end(feeding: subprocess.Popen[bytes]) -> None:
    """Let the recorder write all that it was offered. Raises: RuntimeError when it can't."""
    feeding.terminate()
    if feeding.wait(PATIENCE_S):
        raise RuntimeError("the recorder did not write all it was offered")


def _wait_for_less(waiting: OutboxReader) -> None:
    """Wait until records leave the outbox. Raises: RuntimeError when none do."""
    most, deadline = 0, time.monotonic() + PATIENCE_S
    while (now := waiting.count()) >= most:
        most = max(most, now)
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing is forwarded, {now} records wait")
        time.sleep(0.02)


def full_disk(folder: Path, *, rate: float) -> Json:
    """The store's file may not grow beyond 4 MB for a while, as on a full disk; then it may.

    The limit is the process's own (RLIMIT_FSIZE): it needs no right to mount a small file system.
    """
    folder.mkdir()
    log = folder / "ingest.log"
    with outbox(folder) as bus, migrated(folder) as store:
        with (
            feeder(bus, folder / "offered", rate=rate, seconds=20.0) as feeding,
            ingest(folder, bus.url, store) as process,
        ):
            wait_for(log, "consumed")
            limit = 4 * 2**20
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            wait_for(log, "intake_waits")
            while feeding.poll() is None:
                time.sleep(0.1)
            held = len(stored(folder / "store.db"))
            infinite = resource.RLIM_INFINITY
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (infinite, infinite))
            drain(bus, store, log)
        names = set(offered(folder / "offered"))
        row = _account("full disk, freed", 1, names, folder / "store.db")
        return {**row, "stored_while_full": held}


def _account(what: str, times: int, expected: set[str], store: Path) -> Json:
    found = stored(store)
    return {
        "what": what,
        "times": times,
        "records": len(expected),
        "lost": len(expected - set(found)),
        "doubled": sum(number - 1 for number in found.values()),
        "undecided": undecided(store),
    }
