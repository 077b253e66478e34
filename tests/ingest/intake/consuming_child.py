"""Ingests that consume until they are killed, and say after each step that it is done: one for each
line of standard input, forked from this process, which has everything imported. See
`test_consume_killed.py`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.orm import Session

from ingest.intake import consume
from ingest.intake.bus import BusReader, open_bus
from ingest.intake.loop import Intake
from ingest.store.exchanges import ExchangeRows, insert_exchanges
from sidecar.settings import Groups, Serving, Settings
from sidecar.store.database import Database

SETTINGS = Settings(
    serving=Serving(model="smollm", sampling_defaults={}, grammar="as_asked"),
    groups=Groups(held_out_rate=0.0, size=4, settle_s=0.0),
)


said = os.dup(1)
os.dup2(2, 1)  # the log is written to the standard output


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_before_the_bus_commits(bus: BusReader) -> None:
    """The store has the batch, and the bus does not know."""
    commit = bus.commit
    left = [2]

    def count_down(position: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            die()
        commit(position)

    bus.commit = count_down  # type: ignore[method-assign]


def dying_in_the_transaction() -> None:
    """The rows are inserted, and the transaction is not committed."""

    def insert_and_die(session: Session, rows: Sequence[ExchangeRows]) -> None:
        insert_exchanges(session, rows)
        die()

    consume.insert_exchanges = insert_and_die  # type: ignore[attr-defined]


def consume_until_killed(folder: Path, moment: str) -> None:
    bus = open_bus(f"sqlite:///{folder}/outbox.db")
    database = Database(f"sqlite:///{folder}/store.db")
    intake = Intake(bus, database, SETTINGS, batch=5)
    if moment == "in_transaction":
        dying_in_the_transaction()
    elif moment == "before_bus_commit":
        dying_before_the_bus_commits(bus)
    os.write(said, b"%d\n" % os.getpid())
    while intake.step():
        os.write(said, b"step\n")
    database.close()
    bus.close()
    os._exit(0)


def main() -> None:
    for line in sys.stdin:
        folder, moment = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            consume_until_killed(Path(folder), moment)
        _, status = os.waitpid(child, 0)
        os.write(said, b"ended %d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
