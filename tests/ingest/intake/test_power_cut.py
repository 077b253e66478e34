"""A power cut at any moment: what a real process had synced by then holds every record.

The process's own writes and syncs are logged by a preloaded library, and the files are made anew as
a power cut at each point would leave them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.disk_log import SYNC, Disk, Entry, build, read_log
from support.migrated_store import open_migrated

CHILD = Path(__file__).with_name("power_cut_child.py")


@pytest.fixture
def log(tmp_path: Path) -> list[Entry]:
    """What the child did to its files."""
    library = build(tmp_path)
    if library is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler (cc) to build the library that logs syncs")
    folder = tmp_path / "run"
    folder.mkdir()
    open_migrated(folder / "store.db").close()
    shutil.copy(folder / "store.db", tmp_path / "empty.db")
    logged = {"LD_PRELOAD": str(library), "DISK_LOG_UNDER": str(folder)}
    logged["DISK_LOG"] = str(tmp_path / "log")
    paths = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, str(CHILD), str(folder)],
        env={**os.environ, **logged, "PYTHONPATH": paths},
        check=True,
        timeout=60,
    )
    return list(read_log(tmp_path / "log"))


def names_in(path: Path, table: str) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        try:
            return {name for (name,) in connection.execute(f"SELECT exchange_id FROM {table}")}
        except sqlite3.OperationalError:  # an outbox that nothing was written to yet
            return set()


def points(log: list[Entry], disk: Disk) -> Iterator[set[str]]:
    """Apply the log. Yields at each point that matters the records that the outbox had taken."""
    taken: set[str] = set()
    for entry in log:
        if entry.name == "said":
            taken.update(entry.data.decode().split())
            yield taken
        elif not entry.name.endswith("-shm"):
            disk.apply(entry)
            if entry.name == "outbox.db-wal" or (entry.kind == SYNC and entry.name == "outbox.db"):
                yield taken


def test_a_power_cut_at_any_moment_loses_no_record(log: list[Entry], tmp_path: Path) -> None:
    disk = Disk()
    disk.put("store.db", (tmp_path / "empty.db").read_bytes())
    cut = tmp_path / "cut"
    cut.mkdir()
    seen = 0
    for taken in points(log, disk):
        states = itertools.product((False, True), repeat=2)
        for outbox_kept, store_kept in states:
            outbox = disk.after_power_cut(cut, "outbox.db", keep_unsynced=outbox_kept)
            store = disk.after_power_cut(cut, "store.db", keep_unsynced=store_kept)
            left = names_in(outbox, "outbox") | names_in(store, "exchange")
            assert taken - left == set(), f"{outbox_kept=} {store_kept=} after {len(taken)} records"
        seen = max(seen, len(taken))
    assert seen == 48, "the child took all its rounds"
