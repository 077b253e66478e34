"""Damage in a store, written past the library, as a faulty disk would do it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from sidecar.errors import StoreBusyError
from sidecar.store.database import Database

T = TypeVar("T")
NO_UTF8 = "CAST(x'ff80c3' AS TEXT)"
CHECKS = ("foreign_keys=OFF", "ignore_check_constraints=ON")


def plant(database: Database, table: str, column: str, where: str, value: str = NO_UTF8) -> None:
    """Write a damaged text. value: SQL."""
    with closing(database.engine.raw_connection()) as raw:
        for pragma in CHECKS:
            raw.execute(f"PRAGMA {pragma}")
        raw.execute(f'UPDATE {table} SET "{column}" = {value} WHERE {where}')
        raw.execute("PRAGMA foreign_keys=ON")
        raw.execute("PRAGMA ignore_check_constraints=OFF")


def repeated(work: Callable[[], T]) -> T:
    """Do as every caller of the store does: repeat what met a damaged row."""
    for _ in range(5):
        try:
            return work()
        except StoreBusyError:
            continue
    return work()
