"""At 200,000 exchanges no statement reads a table from end to end, and none does much work.

All statements that the processes issue are watched (`support.store_use` runs each entry point), so
a new query is tested without being listed. A function that issues statements and was not run fails
a test of its own.
"""

from __future__ import annotations

import ast
import re
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.store.tables import METADATA
from support.large_store import make_large_store
from support.statements import ROOMS, ROOT, Statement, Watch, plan_of, watching
from support.store_use import use_store

SMALL = {
    "alembic_version",
    "alias",
    "api_key",
    "breaker_trip",
    "condition",  # a row for each part of the system
    "counter",  # a row for each stage and reason, and one a day
    "flag",
    "routing_table",
    "table_taken",  # a row for each process of a proxy
}
"""Tables that do not grow with traffic or time. Any other table counts as growing."""
MOST_STEPS = 100_000
"""Steps of SQLite's machine for one statement. To read a row and test it takes some 5 to 50, so
this is a window of a few thousand rows, and less than a pass over any index of `exchange`."""

TALLY = "counts rows by state in an index alone, for a person or a scrape, without the write lock"
NEWEST = "the newest rows up to a limit, in the order of the table"
OLDEST = "the oldest rows up to a limit, in the order of the table"
ADAPTERS = "one row a training run, without the write lock, when something learned is forgotten"
GATE = "the prompts of one gate"
LISTING = "a person's listing by a rare value, in a process of its own, without the write lock"
OF_SESSION = "the exchanges of one session"
PRUNING = "a row for each adapter, canary or move of an alias, once an hour or by hand"
PACE = "20,000 exchanges at most, for a person, without the write lock"
VOICES = "the feedback on one exchange, session or trace"
SCANS = {
    "deploy/forgetting.py:callers_of": LISTING,
    "deploy/registry/tallies.py:fields_refused": NEWEST,
    "deploy/registry/tallies.py:users": NEWEST,
    "deploy/adapters/prune.py:Pruner._finish": PRUNING,
    "deploy/adapters/prune.py:_last_champions": PRUNING,
    "deploy/adapters/prune.py:_of_canaries": PRUNING,
    "deploy/adapters/prune.py:_still_loaded": PRUNING,
    "deploy/adapters/prune.py:read_last_used": PRUNING,
    "deploy/adapters/prune.py:read_versions": PRUNING,
    "deploy/forgetting.py:learners_of": ADAPTERS,
    "ingest/retention/sweep.py:Sweeper._report": OLDEST,
    "ingest/store/sessions.py:any_forgotten": "one row",
    "deploy/admin/metrics.py:StoreCollector._tallies": TALLY,
    "deploy/admin/records.py:_add_groups.<locals>.groups": NEWEST,
    "deploy/admin/records.py:_add_task_groups.<locals>.task_groups": NEWEST,
    "deploy/admin/records.py:_add_history.<locals>.audit": NEWEST,
    "deploy/doctor/collect.py:read_recent": NEWEST,
    "ingest/store/sessions.py:newest_exchanges": NEWEST,
    "ingest/tasks/rehearsals.py:candidates_in": NEWEST,
    "ingest/tasks/rehearsals.py:rehearsed_tasks": NEWEST,
    "ingest/tasks/rehearsals.py:rehearsals_status": NEWEST,
    "ingest/best_of.py:any_scores": "one row",
    "ingest/best_of.py:oldest_scores": "in the order of an index, with a limit",
    "ingest/judges/replies.py:ReplyStore._keep": "one row, the first of an index",
    "ingest/store/listing.py:newest_scored_groups": LISTING,
    "deploy/registry/aliases.py:add": "one row, the last of the primary key",
    "deploy/registry/aliases.py:verify": "a row for each move of an alias, at the call of "
    "`sidecar audit verify`, without the write lock",
}
"""Functions that may pass over a whole table or index -> why."""
SORTS = {
    "deploy/registry/candidates.py:sessions_a_day": PACE,
    "deploy/forgetting.py:callers_of": LISTING,
    "ingest/feedback/store.py:_feedback": VOICES,
    "ingest/reward_watch/store.py:_feedback": "the feedback on the answers of one adapter",
    "deploy/canary/client_reports.py:_said": VOICES,
    "ingest/tasks/grouping.py:draw_groups": "the sessions of one task that wait, of one adapter",
    "ingest/tasks/grouping.py:scale_in": "the feedback on 256 sessions",
    "ingest/tasks/grouping.py:outcomes_of": VOICES,
    "ingest/tasks/material.py:load_task_group": "the members of one group",
    "ingest/tasks/material.py:_load": OF_SESSION,
    "ingest/store/exchanges.py:load_by_selection": "at most learner.max_groups numbers",
    "deploy/adapters/prune.py:_last_champions": PRUNING,
    "deploy/adapters/prune.py:_still_loaded": PRUNING,
    "deploy/adapters/prune.py:read_versions": PRUNING,
    "deploy/forgetting.py:learners_of": ADAPTERS,
    "deploy/admin/reads.py:_tally": "a row for each state",
    "deploy/funnel.py:read_funnel": "a row for each state",
    "deploy/admin/metrics.py:StoreCollector._tallies": "a row for each state",
    "deploy/admin/progress.py:read_kinds": GATE,
    "deploy/admin/reads.py:_add_canaries.<locals>.evidence": GATE,
    "deploy/canary/gate_store.py:comparisons": GATE,
    "deploy/canary/gate_store.py:judged_since": GATE,
    "deploy/registry/lineage.py:_canary": GATE,
    "deploy/registry/lineage.py:_of_sessions": "the sessions of one run's groups",
    "deploy/admin/records.py:_add_sessions.<locals>.session_read": OF_SESSION,
    "ingest/store/exchanges.py:_load": "the exchanges of one batch's turns",
    "ingest/store/exchanges.py:_stored": "the choices of one batch",
    "ingest/store/exchanges.py:turns_with": "the turns of one batch",
    "ingest/ruler/blame.py:claim_for_judge": "learner.max_groups limits what waits",
    "ingest/store/listing.py:_seqs": "the exchanges of one session",
    "ingest/trajectories/recorded.py:load_trajectory": OF_SESSION,
}
"""Functions whose statement may sort outside an index -> what bounds the rows."""
WORK = {
    "deploy/registry/candidates.py:sessions_a_day": PACE,
    "deploy/forgetting.py:callers_of": LISTING,
    "ingest/reward_watch/store.py:_feedback": "the feedback on the answers of one adapter, at each "
    "look of the watch, without the write lock",
    "deploy/forgetting.py:exchanges_of": LISTING,
    "deploy/forgetting.py:_remove_told_by": LISTING,
    "deploy/admin/metrics.py:StoreCollector._tallies": TALLY,
    "deploy/admin/records.py:_add_groups.<locals>.groups": "a person's listing of the groups of "
    "one project, which may be rare among all groups, without the write lock",
    "ingest/store/sessions.py:newest_exchanges": "once, at the start of ingest",
}
"""Functions that may take more than `MOST_STEPS` -> why."""
OF_A_FEW_ROWS = "reads tables of a few rows, and is watched by the tests of its module"
DAMAGED = "reads a table in which a damaged value was met, once"
CONNECTION = "prepares a connection"
ROTATION = "reads every row once, by its primary key, at the call of `sidecar store rotate-key`"
NOT_RUN = {
    "ingest/store/rotation.py:_overwrite_what_goes": ROTATION,
    "ingest/store/rotation.py:_rotate_lists": ROTATION,
    "ingest/store/rotation.py:_rotate_rows": ROTATION,
    "ingest/store/rotation.py:_rotate_table": ROTATION,
    "deploy/admin/changes.py:_etag_in": "one row by its key",
    "deploy/canary/replay.py:draw": "at most 2,000 rows by their key",
    "ingest/store/groups.py:retry_judging": "one row by its key",
    "deploy/conditions.py:_paused": "one row by its index, while a learner is paused",
    "sidecar/store/quarantine.py:_delete": DAMAGED,
    "sidecar/store/quarantine.py:_mend": DAMAGED,
    "sidecar/store/quarantine.py:_of_table": DAMAGED,
    "deploy/admin/reads.py:_pace": "one row by its key, while a canary runs",
    "deploy/registry/aliases.py:last_before": "the moves of one alias, when an anchor is "
    "rolled back",
    "deploy/registry/candidates.py:_newest": "the newest rows of one adapter, by an index",
    "deploy/registry/leases.py:lines_behind": OF_A_FEW_ROWS,
    "deploy/preflight/settings.py:check_store": "asks a PostgreSQL what it is, and reads no table",
    "learner/schedule/loop.py:Schedule._say_killed": "one row by its key, when a run was killed",
    "sidecar/access/key_source.py:KeySource.read": OF_A_FEW_ROWS,
    "learner/runs/publish.py:place_or_share": "one row by its index, once a run",
    "sidecar/routing/breaker_report.py:_stored": OF_A_FEW_ROWS,
    "sidecar/routing/breaker_report.py:TripReporter._write": OF_A_FEW_ROWS,
    "sidecar/routing/source.py:_store": OF_A_FEW_ROWS,
    "sidecar/routing/source.py:RevisionReader.read": "one row, once",
    "sidecar/routing/source.py:RoutingSource.read": OF_A_FEW_ROWS,
    "sidecar/store/engines.py:_open_sqlite.<locals>._prepare": CONNECTION,
    "sidecar/store/write_ahead.py:empty_log": "writes the log into the file, reads no table",
    "sidecar/store/disk.py:_rows_bytes": "PostgreSQL over its limit: reads every row, once a "
    "minute, without the write lock",
    "sidecar/store/engines.py:lock_writers": CONNECTION,
    "sidecar/store/migrations/env.py:_create_tables": "makes the tables of a new store",
}
"""Functions that ask the store and that `support.store_use` does not run -> why."""
OTHER_FILES = ("sidecar/capture/outbox", "sidecar/forwarding/sender", "deploy/backup")
"""Beginnings of modules whose connections are to other files than the store, or copy it whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    watch: Watch
    before: Path
    """The large store as it was before the processes used it."""

    @property
    def statements(self) -> list[Statement]:
        return list(self.watch.seen.values())


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("large")
    before, used = folder / "before.db", folder / "used"
    used.mkdir()
    make_large_store(before)
    shutil.copy(before, used / "store.db")
    with watching() as watch:
        use_store(used)
    return Watched(watch=watch, before=before)


@pytest.fixture
def planner(watched: Watched) -> Iterator[sqlite3.Connection]:
    """The large store. It has no statistics, as any store (`sidecar.store.database`)."""
    with closing(sqlite3.connect(watched.before)) as connection:
        yield connection


def test_no_growing_table_is_read_or_sorted_from_end_to_end(
    watched: Watched, planner: sqlite3.Connection
) -> None:
    found = [
        f"{one}\n    -> {' | '.join(lines)}"
        for one in watched.statements
        for lines in (plan_of(planner, one),)
        if (_scans(lines) and not _allowed(one, SCANS))
        or (_sorts(lines) and not _allowed(one, SORTS))
    ]

    assert found == [], "\n".join(found)


def test_no_statement_does_much_work(watched: Watched) -> None:
    found = [
        f"{one}\n    -> {one.steps} steps"
        for one in watched.statements
        if one.steps > MOST_STEPS and not _allowed(one, WORK)
    ]

    assert found == [], "\n".join(found)


def test_every_index_of_a_growing_table_serves_a_statement(
    watched: Watched, planner: sqlite3.Connection
) -> None:
    plans = "\n".join(line for one in watched.statements for line in plan_of(planner, one))

    unused = {
        index.name
        for name, table in METADATA.tables.items()
        if name not in SMALL
        for index in table.indexes
        if not re.search(rf"INDEX {index.name}\b", plans)
    }

    assert unused == set()


def test_every_function_that_asks_the_store_was_run(watched: Watched) -> None:
    modules = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found = {name for path in modules for name in _asking(path)}
    asking = {name for name in found if not name.startswith(OTHER_FILES)}

    assert asking - watched.watch.functions - set(NOT_RUN) == set()
    assert set(NOT_RUN) <= asking


def test_what_is_allowed_is_needed(watched: Watched, planner: sqlite3.Connection) -> None:
    plans = [(one, plan_of(planner, one)) for one in watched.statements]
    needed = {
        "scans": {f for one, lines in plans if _scans(lines) for f in one.functions},
        "sorts": {f for one, lines in plans if _sorts(lines) for f in one.functions},
        "work": {f for one, _ in plans if one.steps > MOST_STEPS for f in one.functions},
    }

    assert set(SCANS) <= needed["scans"]
    assert set(SORTS) <= needed["sorts"]
    assert set(WORK) <= needed["work"]


def _allowed(one: Statement, functions: dict[str, str]) -> bool:
    return not functions.keys().isdisjoint(one.functions)


def _scans(plan: Sequence[str]) -> bool:
    return any(line.startswith("SCAN") and _growing(line) for line in plan)


def _sorts(plan: Sequence[str]) -> bool:
    sorts = any(line.startswith("USE TEMP B-TREE") for line in plan)
    return sorts and any(map(_growing, plan))


def _growing(line: str) -> bool:
    """Whether a line of a plan is about a table that grows."""
    found = re.match(r"(?:SCAN|SEARCH) (\w+)", line)
    # SQLAlchemy names a subquery anon_1 and a second use of a table exchange_1.
    table = re.sub(r"_\d+$", "", found[1]) if found is not None else ""
    return table in METADATA.tables and table not in SMALL


def _asking(path: Path) -> Iterator[str]:
    """Name the functions of a module that issue statements."""
    stack: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text()), "")]
    while stack:
        node, name = stack.pop()
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.ClassDef):
                inner = f"{name}{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{name}{child.name}.<locals>."
            elif isinstance(child, ast.Call) and _asks(child) and name.endswith(".<locals>."):
                yield f"{path.relative_to(ROOT)}:{name.removesuffix('.<locals>.')}"
            stack.append((child, inner))


def _asks(call: ast.Call) -> bool:
    called = call.func
    return (
        isinstance(called, ast.Attribute)
        and called.attr in ("execute", "scalar", "scalars", "get", "get_one", "merge")
        and isinstance(called.value, ast.Name)
        and called.value.id in ("session", "connection")
    )
