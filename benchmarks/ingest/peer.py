"""The peer: a plain `executemany` of the same rows into the same tables, and nothing else.

It parses, checks, places and decides nothing, so no ingest into this schema can be faster.
`python -m benchmarks.ingest.peer FROM INTO BATCH` prints its figures as JSON.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

TABLES = ("exchange", "choice")


def copy_rows(source: Path, target: Path, batch: int) -> dict[str, float]:
    """Insert the rows of one store into another, which has the schema and no rows.

    Returns: records, wall and CPU seconds of the inserts; reading does not count.
    """
    with closing(sqlite3.connect(source)) as store:
        rows = {name: store.execute(f"SELECT * FROM {name}").fetchall() for name in TABLES}
    statements = {
        name: f"INSERT INTO {name} VALUES ({','.join('?' * len(rows[name][0]))})" for name in TABLES
    }
    with closing(sqlite3.connect(target, isolation_level=None)) as store:
        store.execute("PRAGMA synchronous=FULL")
        store.execute("PRAGMA foreign_keys=ON")
        began, cpu = time.monotonic(), time.process_time()
        for at in range(0, len(rows["exchange"]), batch):
            store.execute("BEGIN IMMEDIATE")
            for name in TABLES:
                store.executemany(statements[name], rows[name][at : at + batch])
            store.execute("COMMIT")
        return {
            "records": len(rows["exchange"]),
            "wall_s": time.monotonic() - began,
            "cpu_s": time.process_time() - cpu,
        }


if __name__ == "__main__":
    print(json.dumps(copy_rows(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
