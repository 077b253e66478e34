"""Forget a user, a session or an exchange: find and remove it, give back the traffic."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from sqlalchemy import ColumnElement, delete, func, not_, or_, select, text, update
from sqlalchemy.orm import Session

from deploy.registry import audit, canaries, versions
from deploy.registry.rollback import RollbackResult, rollback
from deploy.registry.versions import lines_in
from ingest.grouping.selection import group_id_of
from ingest.retention.deletion import delete_exchanges, divide
from ingest.retention.sweep import BYTES, ROWS
from ingest.ruler.group import SUBJECT
from ingest.store.sessions import SKEW_S, name_digest, save_forgotten
from learner.runs.runs import abandon
from sidecar.capture.outbox import outbox_path, remove_records
from sidecar.feedback import Feedback, decode_feedback, is_feedback, source_of_user
from sidecar.forwarding.sender import FILE as DEAD_LETTERS
from sidecar.lines import project_of
from sidecar.records import BASE, Exchange, decode_exchange
from sidecar.routing.session_key import DEFAULT_PROJECT, header_name, session_key, short_name
from sidecar.settings import Settings
from sidecar.store.database import Database, count
from sidecar.store.keyring import BUS, NO_KEYS, Keyring
from sidecar.store.models import (
    IN_TASK,
    IN_TRACE,
    AdapterRow,
    CanaryRow,
    DeadLetterRow,
    ExchangeRow,
    FeedbackRow,
    GroupDigestRow,
    JudgeCallRow,
    JudgeReplyRow,
    RunRow,
    SignalRow,
)
from sidecar.store.traces import mark_replaced, remove_traces
from sidecar.visible import counted

# Blank lines of logs, spans and exports that are about what is forgotten.

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is looked at in pieces of this length."""
_WORD = re.compile(rb"[A-Za-z0-9_-]+")
_OWN = ("limits-",)
"""Beginnings of files that hold no content."""


def files_with_lines(state_dir: Path, spans_file: str) -> Iterator[Path]:
    """The files that may quote content: logs, spans, and exports that stand in `state_dir`."""
    yield from sorted((state_dir / "logs").glob("*.log*"))
    exports = sorted(state_dir.glob("*.jsonl"))
    yield from (path for path in exports if not path.name.startswith(_OWN))
    spans = Path(spans_file)
    if spans_file and spans.is_file() and spans not in exports:
        yield spans


def blank_lines(path: Path, ids: Collection[str], mention: re.Pattern[bytes]) -> int:
    """Overwrite each line that holds one of these ids as a word, or mentions the target.

    Returns: the number of lines. Raises: OSError.
    """
    words = {one.encode("utf-8", "surrogatepass") for one in ids}
    blanked = 0
    with path.open("r+b", buffering=2**20) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if mention.search(line) or not words.isdisjoint(_WORD.findall(line)):
                end = file.tell()
                body = line.rstrip(b"\n")
                file.seek(end - len(line))
                file.write(b" " * len(body))
                file.seek(end)
                blanked += 1
    return blanked


def count_mentions(path: Path, mention: re.Pattern[bytes]) -> int:
    """Count the lines that mention the target. Raises: OSError."""
    with path.open("rb", buffering=2**20) as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        return sum(mention.search(line) is not None for line in lines)


# What an operator names, and the records that it means. Pure.

Name = TypeVar("Name")
SHORT_BYTES = 6
"""Shorter names are found as whole words only."""


@dataclass(frozen=True, slots=True)
class Target:
    """A user, a session or an exchange, as an operator knows it."""

    kind: Literal["user", "session", "exchange"]
    name: str

    @property
    def stored_names(self) -> frozenset[str]:
        """The names by which the store may know it.

        A user is stored under the name that the agent sent, or its digest where that is too long. A
        session has the id that `sidecar exchanges ls` shows, or the name in `x-sidecar-session`,
        with `<project>/` before it where the project is not `default`: a name with a "/" in the
        default project is `default/<name>`, so one name never means sessions of two projects.
        """
        if self.kind == "exchange":
            return frozenset({self.name})
        sent = header_name(self.name.encode("utf-8", "surrogatepass"))
        if self.kind == "user":
            return frozenset({self.name, short_name(sent)})
        project, _, rest = sent.partition("/")
        if not rest:
            project, rest = DEFAULT_PROJECT, sent
        key = session_key(header=rest, user="", project=project)
        return frozenset({self.name, key})

    @property
    def sources(self) -> frozenset[str]:
        """What feedback names as its `source` when the user sent it: the name, or what the proxy
        writes for `x-sidecar-user`. Empty unless the target is a user."""
        if self.kind != "user":
            return frozenset()
        return self.stored_names | {source_of_user(name) for name in self.stored_names}

    @property
    def mention(self) -> re.Pattern[bytes]:
        """What a line of a log or a record that cannot be read holds when it is about it.

        A short name counts only as a word of its own: the user `7` stands in many a number.
        """
        named = {self.name, *self.stored_names}
        forms = {
            form
            for name in named
            for form in (
                name.encode("utf-8", "surrogatepass"),
                msgspec.json.encode(name)[1:-1],
                json.dumps(name)[1:-1].encode(),  # as exports write it, in ASCII
            )
            if form
        }
        return re.compile(b"|".join(map(_pattern, sorted(forms))))


def _pattern(form: bytes) -> bytes:
    escaped = re.escape(form)
    if len(form) >= SHORT_BYTES:
        return escaped
    return rb"(?<![A-Za-z0-9_])" + escaped + rb"(?![A-Za-z0-9_])"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The records on the bus that belong to a target."""

    target: Target
    session_keys: Collection[str]
    """Keys of the session's exchanges in the store."""
    until: float
    """Unix seconds: of these keys only requests that arrived before; the key is found from how a
    conversation begins, so later ones may be others."""
    told: Collection[str] = ()
    """Ids of its exchanges, sessions and traces, by which feedback may name it."""
    keyring: Keyring = NO_KEYS
    unread: Counter[str] = field(default_factory=Counter)
    """Encrypted records that could not be looked at, by the reason."""
    seen: set[str] = field(default_factory=set)
    """Ids of the target's exchanges that were looked at; the store may hold feedback on them."""

    def __call__(self, payload: bytes) -> bool:
        """Return True for a record to be removed."""
        try:
            payload = self.keyring.open(payload, BUS)
        except ValueError as error:
            self.unread[str(error)] += 1
            return False
        try:
            if is_feedback(payload):
                return self._is_told_of(decode_feedback(payload))
            exchange = decode_exchange(payload)
        except (msgspec.MsgspecError, ValueError):
            return self.target.mention.search(payload) is not None
        if not self._is(exchange):
            return False
        self.seen.add(exchange.exchange_id)
        return True

    def _is(self, exchange: Exchange) -> bool:
        names = self.target.stored_names
        if exchange.origin == "rehearsal" and self._is_known(exchange.task):
            return True
        if self.target.kind == "user":
            return exchange.user in names
        if self.target.kind == "exchange":
            return exchange.exchange_id in names
        if exchange.session_key in names or exchange.exchange_id in names:
            return True
        return exchange.session_key in self.session_keys and (
            exchange.timings.started_at <= self.until
        )

    def _is_told_of(self, feedback: Feedback) -> bool:
        names = self.target.stored_names
        if self.target.kind == "user":
            return feedback.source in self.target.sources or self._is_known(feedback.target)
        return feedback.target in names or self._is_known(feedback.target)

    def _is_known(self, name: str) -> bool:
        return name in self.told or name in self.seen


STAGE = "forget"
PAGE = 100
"""Rows that are looked at without the write lock."""
ACTOR = "sidecar forget"


@dataclass(frozen=True, slots=True)
class TargetExchange:
    """An exchange of the target."""

    seq: int
    exchange_id: str
    session_key: str
    session_id: str
    trace_id: str
    stored_bytes: int
    """Size of its content, about."""


_FOUND = (
    ExchangeRow.seq,
    ExchangeRow.exchange_id,
    ExchangeRow.session_key,
    ExchangeRow.session_id,
    ExchangeRow.trace_id,
    func.coalesce(
        func.length(ExchangeRow.request_body)
        + func.length(ExchangeRow.prompt_token_ids)
        + ExchangeRow.reply_bytes,
        0,
    ),
)
_REHEARSED = ExchangeRow.origin == "rehearsal"


def exchanges_of(database: Database, target: Target) -> Iterator[list[TargetExchange]]:
    """Yield the exchanges of a target in pages, the oldest first, each page with the rehearsals of
    what begins there. Reads through the table, without the write lock."""
    after = 0
    while True:
        with database.read() as session:
            rows = session.execute(
                select(*_FOUND)
                .where(ExchangeRow.seq > after, _is_of(target))
                .order_by(ExchangeRow.seq)
                .limit(PAGE)
            ).all()
        if not rows:
            return
        after = rows[-1].seq
        found = [TargetExchange(*one) for one in rows]
        yield found
        yield from _rehearsals_of(database, [one.exchange_id for one in found])


def _rehearsals_of(database: Database, tasks: Sequence[str]) -> Iterator[list[TargetExchange]]:
    """Yield the exchanges of rehearsals of tasks that begin with these exchanges, in pages."""
    with database.read() as session:
        rows = session.execute(
            select(*_FOUND).where(text(IN_TASK), _REHEARSED, ExchangeRow.task.in_(tasks))
        ).all()
    for page in _pages([TargetExchange(*one) for one in rows]):
        yield list(page)


def callers_of(database: Database, target: Target) -> tuple[int, int]:
    """Return how many callers (key and user of a project) said what a target means, and in how many
    exchanges."""
    caller = ExchangeRow.project, ExchangeRow.key_id, ExchangeRow.user
    with database.read() as session:
        counts = session.execute(
            select(*caller, func.count()).where(_is_of(target)).group_by(*caller)
        ).all()
    return len(counts), sum(one[-1] for one in counts)


def _is_of(target: Target) -> ColumnElement[bool]:
    names = sorted(target.stored_names)
    if target.kind == "user":
        return ExchangeRow.user.in_(names)
    if target.kind == "exchange":
        return ExchangeRow.exchange_id.in_(names)
    return or_(ExchangeRow.session_id.in_(names), ExchangeRow.session_key.in_(names))


def end_runs(now: float) -> Callable[[Session, Sequence[str]], None]:
    """Return what ends training runs that learn from forgotten content: what they learned is not
    registered, and their other groups are given back."""

    def end(session: Session, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            abandon(session, run_id, "content that it learns from was forgotten", now=now)

    return end


def mark_digests(session: Session, target: Target) -> list[str]:
    """Mark what is left of the target's groups as forgotten.

    Returns: the runs that made an adapter of them, also of groups that an earlier call deleted.
    """
    digests = sorted({name_digest(target.kind, name) for name in target.stored_names})
    column = {
        "user": GroupDigestRow.user_digest,
        "session": GroupDigestRow.session_digest,
        "exchange": GroupDigestRow.exchange_id,
    }[target.kind]
    values = sorted(target.stored_names) if target.kind == "exchange" else digests
    rows = session.scalars(
        update(GroupDigestRow)
        .where(column.in_(values), column != "")
        .values(forgotten=True)
        .returning(GroupDigestRow.group_id)
        .execution_options(synchronize_session=False)
    ).all()
    runs: set[str] = set()
    for page in _pages(rows):
        found = select(GroupDigestRow.run_id).where(
            GroupDigestRow.group_id.in_(page), GroupDigestRow.status == "trained"
        )
        runs.update(session.scalars(found))
    return sorted(runs)


def learners_of(session: Session, run_ids: Sequence[str]) -> list[str]:
    """Name the adapters that these runs made, and all that continue one of them, oldest first."""
    if not run_ids:
        return []
    versions = session.execute(
        select(AdapterRow.name, AdapterRow.parent, AdapterRow.run_id).order_by(
            AdapterRow.created_at, AdapterRow.version
        )
    ).all()
    made: set[str] = set()
    for page in _pages(run_ids):
        # Of a run that came to weights which were known, the adapter that has them.
        made.update(
            name
            for name in session.scalars(select(RunRow.adapter).where(RunRow.run_id.in_(page)))
            if name is not None
        )
    runs = set(run_ids)
    learned: dict[str, None] = {}
    grown = -1
    while grown != len(learned):  # a child may be older than its parent by a wrong clock
        grown = len(learned)
        for name, parent, run_id in versions:
            if name in made or run_id in runs or (parent != BASE and parent in learned):
                learned[name] = None
    return list(learned)


def mark_adapters(session: Session, names: Sequence[str], *, now: float) -> int:
    """Mark these adapters, each once. Returns: how many were not marked before."""
    marked = 0
    for name in names:
        row = session.get(AdapterRow, name)
        if row is None or row.forgotten_at is not None:
            continue
        row.forgotten_at = now
        marked += 1
        audit.record(
            session,
            now=now,
            actor=ACTOR,
            action="adapter.forgotten",
            subject=name,
            before={},
            after={},
            reason="content was forgotten that it, or an adapter that it continues, learned from",
        )
    count(session, STAGE, "adapters", marked)
    return marked


def remove_dead_letters(database: Database, wanted: Callable[[bytes], bool]) -> int:
    """Delete those records that could not be stored; blank what the judge said in probes, and
    delete its kept replies about groups of calibrations: nothing tells whose content these showed.

    Returns: how many records were deleted.
    """
    after = removed = 0
    while True:
        with database.read() as session:
            rows = session.execute(
                select(DeadLetterRow.seq, DeadLetterRow.payload)
                .where(DeadLetterRow.seq > after)
                .order_by(DeadLetterRow.seq)
                .limit(PAGE)
            ).all()
        if not rows:
            break
        after = rows[-1].seq
        gone = [row.seq for row in rows if isinstance(row.payload, bytes) and wanted(row.payload)]
        if gone:
            with database.write() as session:
                for seq in gone:
                    session.delete(session.get_one(DeadLetterRow, seq))
                count(session, STAGE, "dead_letters", len(gone))
                mark_replaced(session)
            removed += len(gone)
    with database.write() as session:
        blanked = session.scalars(
            update(JudgeCallRow)
            .where(JudgeCallRow.group_id == SUBJECT, func.length(JudgeCallRow.reply) > 0)
            .values(reply="", error=None)
            .returning(JudgeCallRow.group_id)
            .execution_options(synchronize_session=False)
        ).all()
        calibrated = session.scalars(
            delete(JudgeReplyRow)
            .where(JudgeReplyRow.exchange_id == "")
            .returning(JudgeReplyRow.seq)
        ).all()
        if blanked or calibrated:
            mark_replaced(session)
    return removed


def own_names(database: Database, target: Target, found: Collection[TargetExchange]) -> set[str]:
    """Return the sessions and traces of these exchanges in which nobody else spoke."""
    sessions = sorted({one.session_id for one in found if one.session_id})
    traces = sorted({one.trace_id for one in found if one.trace_id})
    shared: set[str] = set()
    with database.read() as session:
        for page in _pages(sessions):
            others = select(ExchangeRow.session_id).where(
                ExchangeRow.session_id.in_(page), not_(_is_of(target)), not_(_REHEARSED)
            )
            shared.update(session.scalars(others.distinct()))
        for page in _pages(traces):
            others = select(ExchangeRow.trace_id).where(
                text(IN_TRACE), ExchangeRow.trace_id.in_(page), not_(_is_of(target))
            )
            shared.update(session.scalars(others.distinct()))
    return {*sessions, *traces} - shared


def remove_feedback(database: Database, target: Target, told: Collection[str]) -> int:
    """Delete what was told of exchanges, sessions and traces with these names, and what the user
    told of others. The rest goes with its exchange.

    Returns: how many were deleted.
    """
    removed = 0
    for page in _pages(sorted(told)):
        with database.write() as session:
            gone = session.scalars(
                delete(FeedbackRow)
                .where(or_(FeedbackRow.target.in_(page), FeedbackRow.session_id.in_(page)))
                .returning(FeedbackRow.seq)
            ).all()
            count(session, STAGE, "feedback", len(gone))
            removed += len(gone)
            signals = session.scalars(
                delete(SignalRow).where(SignalRow.session_id.in_(page)).returning(SignalRow.kind)
            ).all()
            if gone or signals:
                mark_replaced(session)
    if target.kind == "user":
        removed += _remove_told_by(database, sorted(target.sources))
    return removed


def _remove_told_by(database: Database, names: Sequence[str]) -> int:
    after = removed = 0
    while True:
        with database.read() as session:
            seqs = session.scalars(
                select(FeedbackRow.seq)
                .where(FeedbackRow.seq > after, FeedbackRow.source.in_(names))
                .order_by(FeedbackRow.seq)
                .limit(PAGE)
            ).all()
        if not seqs:
            return removed
        after = seqs[-1]
        with database.write() as session:
            session.execute(delete(FeedbackRow).where(FeedbackRow.seq.in_(seqs)))
            count(session, STAGE, "feedback", len(seqs))
            removed += len(seqs)
            mark_replaced(session)


def _pages(names: Sequence[Name]) -> Iterator[Sequence[Name]]:
    for start in range(0, len(names), PAGE):
        yield names[start : start + PAGE]


# Give the traffic back to the newest champion that did not learn from what is forgotten.

REASON = "it learned from content that was forgotten"


def retire_adapters(
    database: Database, model: str, *, now: float
) -> tuple[RollbackResult | None, list[str]]:
    """Take every marked adapter out of the traffic, and out of what a rollback chooses by itself.

    Returns: the rollback, None when no marked adapter has traffic; and the adapters that it passed
        over because their folder is not here.
    """
    without: list[str] = []
    with database.read() as session:
        target = champion = versions.champion(session, model)
        if _is_marked(session, champion):
            target, without = _newest_sound(session, model)
        active = canaries.active_row(session, model)
        needed = target != champion or (
            active is not None and _is_marked(session, active.candidate)
        )
    done = None
    if needed:
        done = rollback(
            database, model, to=target, reason=REASON, actor=ACTOR, now=now, pause_learner=False
        )
    with database.write() as session:
        _retire_waiting(session, model)
        if _is_marked(session, versions.aliases_of(session, model).get("previous", BASE)):
            versions.move_alias(
                session,
                model=model,
                alias="previous",
                to=versions.champion(session, model),
                now=now,
                actor=ACTOR,
                reason=REASON,
            )
    return done, without


def _is_marked(session: Session, name: str) -> bool:
    row = session.get(AdapterRow, name) if name != BASE else None
    return row is not None and row.forgotten_at is not None


def _newest_sound(session: Session, model: str) -> tuple[str, list[str]]:
    """The adapter that was promoted last of those that are not marked, or "base". One that was
    rolled back since was taken out for a reason of its own, and one without its folder, which may
    be deleted after a time, cannot be loaded.

    Returns: it, and what is newer but has no folder here.
    """
    promoted = (
        select(AdapterRow.name, AdapterRow.path)
        .join(CanaryRow, AdapterRow.name == CanaryRow.candidate)
        .where(
            CanaryRow.model == model,
            CanaryRow.state == "promoted",
            AdapterRow.forgotten_at.is_(None),
            AdapterRow.removed_at.is_(None),
            AdapterRow.state.not_in(("rolled_back", "rejected")),
        )
        .order_by(CanaryRow.created_at.desc())
    )
    without: list[str] = []
    for name, path in session.execute(promoted):
        if Path(path).is_dir():
            return name, without
        without.append(name)
    return BASE, without


def _retire_waiting(session: Session, model: str) -> None:
    for version in versions.versions(session, model, state="registered"):
        if version.forgotten_at is not None:
            versions.set_state(session, version.name, "retired", REASON)


# Forget a user, a session or an exchange: the order of the steps, and what was done.

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
            sizes = [(one.exchange_id, one.stored_bytes) for one in page]
            for names in divide(sizes, rows=ROWS, limit_bytes=BYTES):
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
