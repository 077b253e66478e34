"""Remove adapter folders that nothing needs, safe against kills, and bring one back from a copy.

For each folder, in this order:

1. Its files are hashed: one that is not what was registered stays, for whoever looks into it.
2. Its documents (config, lineage, card, curves, probe) are copied to `removed/<digest>/`.
3. In one transaction it is asked again whether anything needs it, and the version is marked
   `removed_at`, with the manifest of its files in the audit. From then on nothing may begin to use
   it: rollback, canary and alias refuse it.
4. The folder is renamed to `.removed-<digest>`, again in a transaction that finds the mark.
5. That is deleted.

A process that is killed between two of them is followed by one that goes on: a marked version whose
folder stands there is renamed, and every `.removed-*` is deleted. Only `<adapters_dir>/<digest>` is
ever removed; a version whose row names another place is left alone.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from deploy.errors import error_line
from deploy.records import ACTIVE_PHASES, AdapterVersion
from deploy.registry import audit, canaries, routing_writer
from deploy.registry.versions import to_version
from learner.adapter_folder import (
    CARD,
    CONFIG,
    CURVES,
    DIGESTED,
    LINEAGE,
    PROBE,
    file_digest,
    folder_digest,
)
from learner.records import Candidate
from learner.resume import remove_folder, sync
from learner.runs.publish import Sealed, place
from learner.shared_folders import FETCHING, SharedFolders
from sidecar.records import BASE
from sidecar.store.database import Database, count
from sidecar.store.models import (
    AdapterRow,
    AliasEventRow,
    AliasRow,
    CanaryRow,
    RoutingRow,
    RunRow,
    UnwantedAdapterRow,
)

# Decide which adapter folders may be removed. Pure.

KEEP_CHAMPIONS = 10
"""Newest champions whose folders stay, however long ago they served."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRule:
    """How long adapter folders stay: the settings `[adapters]`."""

    folder_days: float
    """Days without use after which a folder that nothing needs goes; 0: never."""
    keep_champions: int
    """Newest champions of each model whose folders stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one version's folder, and why."""

    version: AdapterVersion
    goes: bool
    why: str
    failed: bool = False
    """True when it should have gone, and somebody must look why it did not."""


def with_parents(versions: Sequence[AdapterVersion], needed: Mapping[str, str]) -> dict[str, str]:
    """Add the parents of the needed versions, and all that share a digest with a needed one.

    needed: name -> why. Returns: the same with the added ones.
    """
    by_name = {one.name: one for one in versions}
    found = dict(needed)
    for name in needed:
        parent = by_name[name].parent if name in by_name else BASE
        if parent != BASE:
            found.setdefault(parent, f"is the parent of {name}")
    holders = {by_name[name].digest: name for name in found if name in by_name}
    for one in versions:
        if one.digest in holders:
            found.setdefault(one.name, f"has the files of {holders[one.digest]}")
    return found


def decide_fates(
    versions: Iterable[AdapterVersion],
    needed: Mapping[str, str],
    last_used: Mapping[str, float],
    rule: FolderRule,
    *,
    now: float,
) -> list[Fate]:
    """Decide about each version whose folder is not removed yet, the newest first.

    needed: as `with_parents` returns. last_used: Unix seconds by name; a version that it lacks
        counts from its registration. now: Unix seconds.
    """
    fates = []
    for one in versions:
        if one.removed_at is not None:
            continue
        used = max(last_used.get(one.name, 0.0), one.created_at)
        age_days = (now - used) / DAY_S
        if one.name in needed:
            fates.append(Fate(version=one, goes=False, why=needed[one.name]))
        elif rule.folder_days <= 0:
            fates.append(Fate(version=one, goes=False, why="adapters.folder_days is 0"))
        elif age_days < rule.folder_days:
            why = f"used {_days(age_days)} ago, adapters.folder_days is {rule.folder_days:g}"
            fates.append(Fate(version=one, goes=False, why=why))
        else:
            fates.append(Fate(version=one, goes=True, why=f"unused for {_days(age_days)}"))
    return fates


def _days(number: float) -> str:
    """Rounded down: 29.6 days must not look like the 30 of the rule."""
    return f"{int(number)} days" if number >= 2 else f"{int(24 * number)} h"


# Read from the store what needs which adapter version, and when each was used last.

TRIED = (*ACTIVE_PHASES, "queued")
WAITING = ("registered", "gating", "ramping", "champion")
"""States in which a version may get traffic without another decision of a person."""


def read_versions(session: Session) -> list[AdapterVersion]:
    """Return every version of every model, the newest first."""
    rows = select(AdapterRow).order_by(AdapterRow.model, AdapterRow.version.desc())
    return [to_version(row) for row in session.scalars(rows)]


def read_needed(
    session: Session,
    versions: list[AdapterVersion],
    *,
    keep_champions: int,
    loaded: Iterable[str] = (),
) -> dict[str, str]:
    """Return name -> why its folder must stay, of every model.

    loaded: adapters that a vLLM has loaded now.
    """
    needed: dict[str, str] = {}
    sources = (
        _of_aliases(session),
        _of_tables(session),
        _of_canaries(session),
        _of_runs(session),
        ((one.name, f"is {one.state}") for one in versions if one.state in WAITING),
        ((name, "is loaded in vLLM") for name in loaded),
        _still_loaded(session),
        _last_champions(session, keep_champions),
    )
    for source in sources:
        for name, why in source:
            if name != BASE:
                needed.setdefault(name, why)
    return with_parents(versions, needed)


def read_last_used(session: Session) -> dict[str, float]:
    """Return name -> when its last canary ended or an alias left it, in Unix seconds."""
    found: dict[str, float] = {}
    ended = select(CanaryRow.candidate, CanaryRow.ended_at).where(CanaryRow.ended_at.is_not(None))
    left = select(AliasEventRow.before, AliasEventRow.at).where(AliasEventRow.before.is_not(None))
    for statement in (ended, left):
        for name, at in session.execute(statement):
            found[name] = max(found.get(name, 0.0), at)
    return found


def _of_aliases(session: Session) -> Iterator[tuple[str, str]]:
    for row in session.scalars(select(AliasRow)):
        yield row.adapter, f"is {row.alias} of {row.model}"


def _of_tables(session: Session) -> Iterator[tuple[str, str]]:
    for model in session.scalars(select(RoutingRow.model)):
        table = routing_writer.current(session, model)
        for name in (table.champion, table.canary) if table is not None else ():
            if name is not None:
                yield name, f"is in the routing table of {model}"


def _of_canaries(session: Session) -> Iterator[tuple[str, str]]:
    for row in session.scalars(select(CanaryRow).where(CanaryRow.state.in_(TRIED))):
        canary = canaries.to_canary(row)
        for name in (canary.candidate, canary.champion, canary.anchor):
            yield name, f"the canary {canary.canary_id} needs it"


def _of_runs(session: Session) -> Iterator[tuple[str, str]]:
    for row in session.execute(
        select(RunRow.run_id, RunRow.parent, RunRow.adapter).where(RunRow.status == "running")
    ):
        for name in (row.parent, row.adapter):
            yield name, f"the run {row.run_id} needs it"


def _still_loaded(session: Session) -> Iterator[tuple[str, str]]:
    for name in session.scalars(select(UnwantedAdapterRow.adapter).distinct()):
        yield name, "a vLLM still has it loaded"


def _last_champions(session: Session, number: int) -> Iterator[tuple[str, str]]:
    """Yield the newest `number` champions of each model, without the base."""
    models = session.scalars(select(AdapterRow.model).distinct()).all()
    for model in models:
        found: dict[str, None] = {}
        moves = (
            select(AliasEventRow.after)
            .where(AliasEventRow.model == model, AliasEventRow.alias == "champion")
            .order_by(AliasEventRow.seq.desc())
        )
        promoted = (
            select(CanaryRow.candidate)
            .where(CanaryRow.model == model, CanaryRow.state == "promoted")
            .order_by(CanaryRow.ended_at.desc())
            .limit(number)
        )
        for name in (*session.scalars(moves), *session.scalars(promoted)):
            if len(found) >= number:
                break
            if name is not None and name != BASE:
                found[name] = None
        yield from ((name, f"is one of the last {number} champions of {model}") for name in found)


TRASH = ".removed-"
"""Prefix of a folder that is being deleted, beside the published ones."""
REMOVED = "removed"
"""Folder with the documents of versions whose folders are gone."""
DOCUMENTS = (CONFIG, LINEAGE, CARD, CURVES, PROBE)
_UNFINISHED = ".documents-"
ACTION = "adapter.removed"
DEAD_FETCH_S = 3_600.0
"""Time without a byte after which a fetch from `adapters.url` was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What one pass did, or would do."""

    fates: tuple[Fate, ...]
    """What became of each version whose folder was not removed before."""
    freed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruner:
    """Removes folders of one `adapters_dir`."""

    database: Database
    adapters_dir: Path
    rule: FolderRule
    shared: SharedFolders | None = None
    """Where copies for other machines are; they go too."""

    def plan(self, *, now: float, loaded: Iterable[str] = ()) -> Pruned:
        """Say what `prune` would do; change nothing. Raises: StoreError; OSError."""
        with self.database.read() as session:
            fates = [self._here(one) for one in self._fates(session, now, loaded)]
        size = sum(_size(self._folder(one.version)) for one in fates if one.goes)
        return Pruned(fates=tuple(fates), freed_bytes=size)

    def prune(self, *, now: float, actor: str, loaded: Iterable[str] = ()) -> Pruned:
        """Remove what nothing needs, and finish what a killed pass began.

        loaded: adapters that a vLLM has loaded now. actor: for the audit.
        Raises: StoreError; OSError, when the disk refuses what is left of an earlier pass.
        """
        self._finish(now)
        found = self.plan(now=now, loaded=loaded)
        fates, freed = [], 0
        for fate in found.fates:
            if fate.goes:
                size = _size(self._folder(fate.version))
                fate = self._remove(fate, now=now, actor=actor, loaded=loaded)
                freed += size if fate.goes else 0
            fates.append(fate)
        return Pruned(fates=tuple(fates), freed_bytes=freed)

    def _fates(self, session: Session, now: float, loaded: Iterable[str]) -> list[Fate]:
        found = read_versions(session)
        needed = read_needed(session, found, keep_champions=self.rule.keep_champions, loaded=loaded)
        return decide_fates(found, needed, read_last_used(session), self.rule, now=now)

    def _folder(self, version: AdapterVersion) -> Path:
        return self.adapters_dir.resolve() / str(version.digest)

    def _here(self, fate: Fate) -> Fate:
        """Keep what is not at the place where this pruner may remove it."""
        folder = self._folder(fate.version)
        if not fate.goes:
            return fate
        if not _is_digest(fate.version.digest) or str(folder) != fate.version.path:
            return _stays(fate, f"its folder is not in {self.adapters_dir.resolve()}")
        if folder.is_symlink() or not folder.is_dir():
            return _stays(fate, "there is no such folder here")
        return fate

    def _remove(self, fate: Fate, *, now: float, actor: str, loaded: Iterable[str]) -> Fate:
        version, folder = fate.version, self._folder(fate.version)
        try:
            if folder_digest(folder) != version.digest:
                return _failed(fate, "its files are not the registered ones: find out why")
            manifest = _manifest(folder)
            self._keep_documents(folder, version.digest)
            why = self._mark(fate, manifest, now=now, actor=actor, loaded=loaded)
            if why is not None:
                return _stays(fate, why)
            self._move_out(version.digest)
            remove_folder(self._trash(version.digest))
            if self.shared is not None:
                self.shared.remove(version.digest)
        except OSError as error:
            return _failed(fate, f"the disk refused: {error_line(error)}")
        return fate

    def _mark(
        self,
        fate: Fate,
        manifest: list[dict[str, Any]],
        *,
        now: float,
        actor: str,
        loaded: Iterable[str],
    ) -> str | None:
        """Mark every version with these files. Returns: why it stays after all; None: marked."""
        digest = fate.version.digest
        with self.database.write() as session:
            again = {one.version.name: one for one in self._fates(session, now, loaded)}
            found = again.get(fate.version.name)
            if found is None or not found.goes:
                return "removed by another process" if found is None else found.why
            rows = session.scalars(
                update(AdapterRow)
                .where(AdapterRow.digest == digest)
                .values(removed_at=now)
                .returning(AdapterRow.name)
                .execution_options(synchronize_session=False)
            ).all()
            for name in rows:
                audit.record(
                    session,
                    now=now,
                    actor=actor,
                    action=ACTION,
                    subject=name,
                    before={"folder": str(self._folder(fate.version))},
                    after={"folder": None, "digest": digest, "files": manifest},
                    reason=fate.why,
                )
            count(session, "adapter", "removed", len(rows))
        return None

    def _move_out(self, digest: str) -> None:
        """Rename the folder, unless its version came back meanwhile. Raises: OSError."""
        folder, trash = self.adapters_dir.resolve() / digest, self._trash(digest)
        with self.database.write() as session:
            marked = session.scalars(
                select(AdapterRow.removed_at).where(AdapterRow.digest == digest)
            ).all()
            if not marked or None in marked or not folder.is_dir():
                return
            remove_folder(trash)
            folder.chmod(0o755)  # a folder that is moved must be writable
            folder.rename(trash)
        sync(trash.parent)

    def _finish(self, now: float) -> None:
        """Go on where a killed pass stopped. Raises: OSError; StoreError."""
        with self.database.read() as session:
            marked = session.scalars(
                select(AdapterRow.digest).where(AdapterRow.removed_at.is_not(None)).distinct()
            ).all()
        for digest in marked:
            if _is_digest(digest) and (self.adapters_dir / digest).is_dir():
                self._move_out(digest)
        for leftover in self._leftovers(now):
            remove_folder(leftover)

    def _leftovers(self, now: float) -> Iterator[Path]:
        for prefix in (TRASH, _UNFINISHED):
            yield from self.adapters_dir.glob(f"{prefix}*")
        for folder in self.adapters_dir.glob(f"{FETCHING}*"):
            with contextlib.suppress(FileNotFoundError):  # that fetch ended meanwhile
                newest = max(one.lstat().st_mtime for one in (folder, *folder.iterdir()))
                if now - newest > DEAD_FETCH_S:
                    yield folder

    def _trash(self, digest: str) -> Path:
        return self.adapters_dir.resolve() / f"{TRASH}{digest}"

    def _keep_documents(self, folder: Path, digest: str) -> None:
        """Copy the documents to `removed/<digest>`, complete or not at all. Raises: OSError."""
        kept = self.adapters_dir / REMOVED / digest
        if kept.is_dir():
            return  # a pass that was killed after this
        unfinished = self.adapters_dir / f"{_UNFINISHED}{digest}"
        remove_folder(unfinished)
        unfinished.mkdir()
        for name in DOCUMENTS:
            if (folder / name).is_file() and not (folder / name).is_symlink():
                shutil.copyfile(folder / name, unfinished / name)
                sync(unfinished / name)
        sync(unfinished)
        kept.parent.mkdir(exist_ok=True)
        unfinished.rename(kept)
        sync(kept.parent)


def removed_documents(adapters_dir: Path, digest: str) -> Path:
    """Return the folder with the documents of a removed version."""
    return adapters_dir / REMOVED / digest


def _failed(fate: Fate, why: str) -> Fate:
    return Fate(version=fate.version, goes=False, why=why, failed=True)


def _stays(fate: Fate, why: str) -> Fate:
    return Fate(version=fate.version, goes=False, why=why)


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and not set(text) - set("0123456789abcdef")


def _manifest(folder: Path) -> list[dict[str, Any]]:
    """List the files of a folder as its digest counts them, the optimiser's too."""
    files = sorted(one for one in folder.iterdir() if one.is_file() and not one.is_symlink())
    return [
        {"path": one.name, "size": one.stat().st_size, "sha256": file_digest(one)} for one in files
    ]


def _size(folder: Path) -> int:
    try:
        return sum(one.lstat().st_size for one in folder.iterdir())
    except OSError:
        return 0


# Put the folder of a version back that retention removed, from a copy of its weights.

ACTOR = "sidecar adapters import"


def with_documents(work: Path, adapters_dir: Path, digest: str) -> None:
    """Copy the kept documents of a removed version into a folder. Raises: OSError."""
    kept = removed_documents(adapters_dir, digest)
    for document in sorted(kept.iterdir()) if kept.is_dir() else ():
        if document.name not in DIGESTED:
            shutil.copyfile(document, work / document.name)


def put_back(
    session: Session, known: Candidate, sealed: Sealed, adapters_dir: Path, *, now: float
) -> bool:
    """Place a folder for the versions with its digest, in the caller's write transaction.

    Returns: False, with nothing done, when their folder was not removed. Raises: OSError.
    """
    row = session.get_one(AdapterRow, known.adapter)
    if row.removed_at is None:
        return False
    path = place(sealed, adapters_dir)
    for name in session.scalars(
        update(AdapterRow)
        .where(AdapterRow.digest == sealed.digest)
        .values(removed_at=None, path=str(path))
        .returning(AdapterRow.name)
        .execution_options(synchronize_session="fetch")
    ).all():
        audit.record(
            session,
            now=now,
            actor=ACTOR,
            action="adapter.restored",
            subject=name,
            before={"folder": None},
            after={"folder": str(path)},
            reason="its weights were imported again",
        )
    count(session, "adapter", "restored")
    return True
