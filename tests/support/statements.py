"""Watch the SQL statements that the product issues, how much work SQLite does, and by which plan.

Work is counted in steps of SQLite's virtual machine: a number of the data and the plan alone, the
same on every machine.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("sidecar", "ingest", "learner", "deploy")
STEPS_AT_ONCE = 500
"""Steps between two counts."""
_LIST = re.compile(r"\((\?|\(\?(, \?)*\))(, (\?|\(\?(, \?)*\)))+\)")
_EXPLAINED = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")


@dataclass(slots=True)
class Statement:
    """One statement as it was issued."""

    sql: str
    parameters: Any
    functions: tuple[str, ...]
    """Functions of the product that were running, the innermost first: `path:name`."""
    under_lock: bool
    """True inside a write transaction."""
    steps: int = 0

    @property
    def shape(self) -> str:
        """The statement with all lists of one length."""
        return _LIST.sub("(?, ...)", self.sql)

    def __str__(self) -> str:
        lock = ", under the write lock" if self.under_lock else ""
        return f"{self.functions[0]}{lock}:\n    {' '.join(self.shape.split())}"


@dataclass(slots=True)
class Watch:
    """Statements seen, the most expensive of each shape."""

    seen: dict[tuple[str, str], Statement] = field(default_factory=dict)
    """(innermost function, shape) -> statement."""
    functions: set[str] = field(default_factory=set)
    _all: list[Statement] = field(default_factory=list)

    def settle(self) -> None:
        """Keep of each shape the statement that took the most steps."""
        for one in self._all:
            key = (one.functions[0], one.shape)
            if key not in self.seen or one.steps > self.seen[key].steps:
                self.seen[key] = one
        self._all.clear()

    def before(self, connection: Any, sql: str, parameters: Any, *, many: bool) -> None:
        driver = connection.connection.driver_connection
        if not isinstance(driver, sqlite3.Connection):
            return
        functions = tuple(_functions(sys._getframe()))
        self.functions |= set(functions)
        if not functions or not sql.lstrip().upper().startswith(_EXPLAINED):
            return
        # SQLAlchemy says "many" also of rows in one INSERT, whose values it passes flat.
        rows = many and parameters and isinstance(parameters[0], tuple | list | dict)
        one = Statement(
            sql=sql,
            parameters=parameters[0] if rows else parameters,
            functions=functions,
            under_lock=connection.get_execution_options().get("sidecar_begin") == "IMMEDIATE",
        )
        self._all.append(one)

        def count() -> None:
            one.steps += STEPS_AT_ONCE

        driver.set_progress_handler(count, STEPS_AT_ONCE)


@contextmanager
def watching() -> Iterator[Watch]:
    """Watch every SQLite engine of this process."""
    watch = Watch()

    def before(
        connection: Any, _cursor: Any, sql: str, parameters: Any, _context: Any, many: bool
    ) -> None:
        watch.before(connection, sql, parameters, many=many)

    event.listen(Engine, "before_cursor_execute", before)
    try:
        yield watch
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        watch.settle()


def _functions(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        path = _product_path(frame.f_code.co_filename)
        if path is not None:
            yield f"{path}:{frame.f_code.co_qualname}"
        frame = frame.f_back


@cache
def _product_path(name: str) -> str | None:
    path = Path(name)
    for room in ROOMS:
        # The tests may run on a compiled copy of a room, which is in another folder.
        home = Path(str(import_module(room).__file__)).parent
        if path.is_relative_to(home):
            return f"{room}/{path.relative_to(home)}"
    return None


def plan_of(connection: sqlite3.Connection, one: Statement) -> list[str]:
    """SQLite's plan of a statement, a line for each table it reads and each sort."""
    rows = connection.execute(f"EXPLAIN QUERY PLAN {one.sql}", one.parameters)
    return [str(detail) for *_, detail in rows]
