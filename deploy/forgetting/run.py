"""Forget a user, a session or an exchange: the order of the steps, and what was done.

First the names are stored, so that what is still on the bus is dropped when it arrives. Then the
copies in files are removed, while the rows still say which are meant. Then rows go in short
transactions, each of which leaves the store whole, and the adapters that learned from them are
marked. Nothing is remembered between two runs: after
a crash the command is run again, and does what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.forgetting.files import blank_lines, files_with_lines
from deploy.forgetting.retire import retire as retire_adapters
from deploy.forgetting.rows import (
    ACTOR,
    STAGE,
    end_runs,
    exchanges_of,
    learners_of,
    mark_adapters,
    mark_digests,
    own_names,
    remove_dead_letters,
    remove_feedback,
)
from deploy.forgetting.target import Target, Wanted
from deploy.registry import audit
from deploy.registry.versions import lines_in
from ingest.grouping.selection import group_id_of
from ingest.retention.deletion import delete_exchanges
from ingest.retention.rules import chunks
from ingest.retention.sweep import BYTES, ROWS
from ingest.store.forgotten import SKEW_S, name_digest, save_forgotten
from sidecar.capture.outbox import outbox_path
from sidecar.capture.outbox_removal import remove_records
from sidecar.forwarding.dead_letters import FILE as DEAD_LETTERS
from sidecar.lines import project_of
from sidecar.plurals import counted
from sidecar.settings import Settings
from sidecar.store.database import Database, count
from sidecar.store.disk.traces import remove_traces

PASSES = 3
"""Times that the store is looked through at most: a record may have been stored meanwhile."""


@dataclass(slots=True)
class Report:
    """What was removed, and what the operator must know."""

    exchanges: int = 0
    groups: int = 0
    feedback: int = 0
    """Records of feedback and outcomes, besides those that went with their exchange."""
    dead_letters: int = 0
    on_the_bus: int = 0
    """Records in the outbox, and in the proxy's dead letters, of this machine."""
    lines: dict[str, int] = field(default_factory=dict)
    """File -> lines of logs and exports that were blanked."""
    adapters: list[str] = field(default_factory=list)
    """All that learned from it, the oldest first."""
    rolled_back_to: str | None = None
    traces: list[str] = field(default_factory=list)
    """What is not removed yet, with what to do."""
    notes: list[str] = field(default_factory=list)
    """What this command cannot do, or where it may have looked in vain."""

    @property
    def anything(self) -> bool:
        """Something of the target was found, now or by an earlier run."""
        removed = self.exchanges, self.groups, self.dead_letters, self.on_the_bus
        return any((*removed, self.feedback)) or bool(self.lines or self.adapters or self.traces)

    def as_json(self) -> Mapping[str, Any]:
        return asdict(self)


def forget(
    database: Database,
    settings: Settings,
    target: Target,
    *,
    now: float,
    retire: bool = False,
    vacuum: bool = False,
) -> Report:
    """Remove what the target said.

    retire: give the traffic back to the newest champion that did not learn from it.
    vacuum: rewrite a large SQLite file too, when it may hold copies of old values.
    Raises: StoreError, OutboxError or OSError: run it again.
    """
    report = Report()
    keys, ids, told = _remember(database, target, now=now)
    wanted = Wanted(target, keys, now + SKEW_S, told, database.keyring)
    # Before the rows go: they say which lines and records are meant.
    _files(settings, target, wanted, ids, report)
    with database.write() as session:  # feedback on what waited on the bus may come later
        save_forgotten(session, "exchange", wanted.seen, now=now, until=None)
    told |= wanted.seen
    report.feedback = remove_feedback(database, target, told)
    release = end_runs(now)
    locked: set[str] = set()
    for _ in range(PASSES):
        gone = 0
        for page in exchanges_of(database, target):
            for names in chunks(page, rows=ROWS, limit_bytes=BYTES):
                deleted = delete_exchanges(
                    database, names, why="forgotten", now=now, release=release
                )
                gone += deleted.exchanges
                locked |= deleted.locked
                report.groups += sum(deleted.groups.values())
        report.exchanges += gone
        if not gone:
            break
    with database.write() as session:
        runs = mark_digests(session, target)
    with database.read() as session:
        report.adapters = learners_of(session, runs)
    with database.write() as session:
        mark_adapters(session, report.adapters, now=now)
    if retire:
        with database.read() as session:
            lines = lines_in(session, settings.serving.model)
        for line in lines:
            done, without = retire_adapters(database, line, now=now)
            project = project_of(line)
            if project is None:
                report.rolled_back_to = None if done is None else done.after
            elif done is not None:
                report.notes.append(f"project {project}: {done.after} serves now")
            report.notes += [
                f"{one} was passed over: its folder is not on this machine" for one in without
            ]
    report.feedback += remove_feedback(database, target, told)  # what came meanwhile
    report.dead_letters = remove_dead_letters(database, wanted)
    # Each transaction that deleted has marked the file, so what a killed run left is done now.
    why = remove_traces(database, large_too=vacuum)
    if why:
        to = report.traces if database.engine.dialect.name == "sqlite" else report.notes
        to.append(f"store: {why}")
    report.traces += _locked(wanted, locked)
    _audit(database, target, report, now=now)
    return report


def _locked(wanted: Wanted, exchanges: set[str]) -> Iterator[str]:
    for why, number in wanted.unread.items():
        records = counted(number, "record")
        yield f"{records} on the bus, or set aside, could not be looked at: one {why}"
    if exchanges:
        stay = counted(len(exchanges), "exchange stays", "exchanges stay")
        yield (
            f"{stay}: others are stored as a "
            f"difference from {'it' if len(exchanges) == 1 else 'them'}, and are encrypted with a "
            "key that is missing; add it to store.encryption_key_file"
        )


def _remember(
    database: Database, target: Target, *, now: float
) -> tuple[set[str], set[str], set[str]]:
    """Store the names.

    Returns: the keys of the target's sessions; its ids in logs; and the names by which feedback may
        mean it.
    """
    keys: set[str] = set()
    ids: set[str] = set()
    told: set[str] = set()
    for page in exchanges_of(database, target):
        keys.update(one.session_key for one in page)
        ids.update(one.exchange_id for one in page)
        if target.kind != "exchange":
            told |= own_names(database, target, page)
        with database.write() as session:  # feedback may come later
            names = [one.exchange_id for one in page]
            save_forgotten(session, "exchange", names, now=now, until=None)
    told |= ids
    if target.kind != "user":
        told |= target.stored_names
    ids.update({group_id_of(one) for one in ids})
    with database.write() as session:
        until = now + SKEW_S if target.kind == "user" else None
        save_forgotten(session, target.kind, target.stored_names, now=now, until=until)
        if target.kind == "session":
            save_forgotten(session, "session_key", keys, now=now, until=now + SKEW_S)
        # Feedback alone: their sessions and traces may go on.
        save_forgotten(session, "source", target.sources, now=now, until=now + SKEW_S)
        save_forgotten(session, "told", told, now=now, until=now + SKEW_S)
    return keys if target.kind == "session" else set(), ids, told


def _files(
    settings: Settings, target: Target, wanted: Wanted, ids: set[str], report: Report
) -> None:
    bus: Path = outbox_path(settings.bus.url, settings.state_dir)
    if not bus.exists():
        report.notes.append(
            f"there is no outbox at {bus}: if proxies run here, or wrote logs, run it again in "
            "their folder, or with their settings file (--config)"
        )
    for path, table in ((bus, "outbox"), (settings.state_dir / DEAD_LETTERS, "dead_letter")):
        removal = remove_records(path, table, wanted)
        report.on_the_bus += removal.removed
        if removal.traces:
            report.traces.append(
                f"{path}: records that were removed may have left bytes; run it again when the "
                "waiting records are stored"
            )
    if target.kind == "exchange":
        ids.update(target.stored_names)
    for path in files_with_lines(settings.state_dir, settings.telemetry.spans_file):
        if blanked := blank_lines(path, ids, target.mention):
            report.lines[str(path)] = blanked


def _audit(database: Database, target: Target, report: Report, *, now: float) -> None:
    """The audit names the target by its digest alone."""
    with database.write() as session:
        count(session, STAGE, "outbox", report.on_the_bus)
        audit.record(
            session,
            now=now,
            actor=ACTOR,
            action="content.forgotten",
            subject=f"{target.kind}:{name_digest(target.kind, target.name)}",
            before={},
            after={
                "exchanges": report.exchanges,
                "groups": report.groups,
                "adapters": report.adapters,
                "rolled_back_to": report.rolled_back_to,
            },
            reason="an operator asked for it",
        )
