"""A proxy's outbox and an ingest that work in turn, in one process, until it is ended without a
word. See `test_power_cut.py`."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from ingest.intake.bus import open_bus
from ingest.intake.choose import Sessions
from ingest.intake.consume import consume
from sidecar.capture.outbox import Outbox
from sidecar.store.database import Database
from support.ingest_kit import make_exchange

ROUNDS = 12
BATCH = 4
CHECKPOINTS = {3: "store.db", 5: "outbox.db", 8: "outbox.db", 9: "store.db"}
"""Rounds after which a database's log is written into its file, and begins anew."""


def main(folder: Path) -> None:
    said = os.open(folder / "said", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    outbox = Outbox(folder / "outbox.db", max_rows=1_000)
    bus = open_bus(f"sqlite:///{folder}/outbox.db")
    database = Database(f"sqlite:///{folder}/store.db")
    sessions = Sessions(held_out_rate=0.0)
    for number in range(ROUNDS):
        names = [f"e{number}-{one}" for one in range(BATCH)]
        outbox.write([make_exchange(name) for name in names])
        os.write(said, (" ".join(names) + "\n").encode())
        consume(bus, database, limit=BATCH, sessions=sessions, now=float(number))
        if number in CHECKPOINTS:
            with closing(sqlite3.connect(folder / CHECKPOINTS[number])) as other:
                other.execute("PRAGMA wal_checkpoint(RESTART)")
    os._exit(0)  # closing the files would sync them


if __name__ == "__main__":
    main(Path(sys.argv[1]))
