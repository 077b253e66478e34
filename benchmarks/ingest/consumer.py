"""One ingest in a process of its own, which measures itself: `python consumer.py BUS STORE`.

It uses the `ingest` that `PYTHONPATH` names, so the same script measures an older version. It says
a line of JSON when it is ready, and one when the bus is empty; then it ends. With `--stay` it works
on until it is killed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from ingest.intake.bus import open_bus
from ingest.intake.loop import Intake
from sidecar.logs import configure_logging
from sidecar.settings import Bus, Serving, Settings, Store
from sidecar.store.database import Database

MEMORY = {"rss_mb": "VmRSS", "peak_mb": "VmHWM"}
PAUSE_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bus")
    parser.add_argument("store")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--weights", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--stay", action="store_true")
    options = parser.parse_args()
    settings = Settings(
        serving=Serving(
            model=options.model,
            base_model_path=options.weights,
            sampling_defaults={},
            grammar="as_asked",
        ),
        bus=Bus(url=options.bus),
        store=Store(url=options.store),
    )
    configure_logging(settings.telemetry, "ingest")
    bus, database = open_bus(settings.bus.url), Database(settings.store.url)
    database.upgrade()
    intake = Intake(bus, database, settings, batch=options.batch)
    _collect_as_ingest_does()
    before = bus.lag()
    tell("ready")
    while options.stay:
        time.sleep(min(PAUSE_S, intake.attempt()))
    # The first batch comes when the sessions are known and Kafka has given out its partitions: that
    # is no part of the rate.
    while bus.lag() == before:
        intake.step()
    records = bus.lag()
    began, cpu = time.monotonic(), time.process_time()
    while intake.step() or bus.lag():
        pass
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    tell("done", wall_s=wall_s, cpu_s=cpu_s, records=records)
    database.close()
    bus.close()


def _collect_as_ingest_does() -> None:
    try:
        from ingest.garbage_collection import collect_rarely
    except ImportError:  # an older version, which leaves Python's collector as it is
        return
    collect_rarely()


def tell(state: str, **figures: float) -> None:
    # Not `ru_maxrss`: it begins with the memory of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = {name: int(status[field].split()[0]) / 2**10 for name, field in MEMORY.items()}
    sys.stdout.write(json.dumps({"state": state, **memory, **figures}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
