"""The records that `ingest` is measured with, and its arithmetic."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import islice
from pathlib import Path

from benchmarks.ingest.peer import copy_rows
from benchmarks.ingest.throughput import ratio
from benchmarks.ingest.traffic import exchanges
from ingest.store.exchanges import save_exchange
from support.migrated_store import open_migrated


def test_the_peer_makes_the_same_rows(tmp_path: Path) -> None:
    store, peer = open_migrated(tmp_path / "store.db"), open_migrated(tmp_path / "peer.db")
    with store.write() as session:
        for exchange in islice(exchanges(), 5):
            save_exchange(session, exchange, held_out=False, now=1.0)
    store.close()
    peer.close()

    figures = copy_rows(tmp_path / "store.db", tmp_path / "peer.db", 2)

    assert figures["records"] == 5
    for table in ("exchange", "choice"):
        rows = []
        for name in ("store.db", "peer.db"):
            with closing(sqlite3.connect(tmp_path / name)) as connection:
                rows.append(connection.execute(f"SELECT * FROM {table}").fetchall())
        assert rows[0] == rows[1]
        assert len(rows[0]) == 5


def test_a_ratio_is_of_figures_of_one_round() -> None:
    rows = [
        {"what": what, "round": number, "cpu_us_per_record": cost}
        for number, costs in enumerate([(10.0, 1.0), (90.0, 3.0), (40.0, 2.0)])
        for what, cost in zip(("ours", "peer"), costs, strict=True)
    ]

    assert ratio(rows, "ours", "peer") == 20.0  # of 10, 30 and 20
