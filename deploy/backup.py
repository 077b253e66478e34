"""Back up a SQLite store with the adapters that it names, and restore both.

The copy of the store is one consistent moment; the processes may run meanwhile. A folder never
changes and exists before its row, so the copy names none that comes later. A backup is a folder:
`store.db`, `adapters/<digest>` and, written last, `backup.json` with what they hash to. Encrypted
contents stay encrypted; keys, the settings file and records that ingest has not stored yet (the
outbox) are not in it. Backups in one folder share the files of adapters.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy.engine import make_url

from deploy.errors import BackupError
from learner.adapter_folder import CONFIG, DIGESTED, file_digest, folder_digest, read_plain
from learner.resume import remove_folder, sync
from sidecar.store.engines import newest_revision, with_driver

STORE: Final = "store.db"
MANIFEST: Final = "backup.json"
VERSION: Final = 2
"""1 had no `others`."""
_LOGS: Final = ("-wal", "-shm", "-journal")
_PARTS: Final = ".restored-"
"""Begins the names of what a restore has not put in its place yet."""
_OF_THE_BACKUP: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of writing: no other adapter would fare better."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup holds."""

    made_at: float
    """Unix seconds."""
    store_sha256: str
    adapters: Mapping[str, str]
    """Absolute path of each folder as the store names it -> its digest, which is its name here."""
    missing: Mapping[str, str]
    """Path of each folder that is not in it as it was registered -> why."""
    others: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Digest of each folder -> name and SHA-256 (hex) of its files beside those of the digest."""
    version: int = VERSION


def store_file(store_url: str) -> Path:
    """Return the file of a SQLite store. Raises: BackupError for another store."""
    url = make_url(with_driver(store_url))
    if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith("file:"):
        raise BackupError(
            "store.url names no file of SQLite; back PostgreSQL up with pg_dump --format custom, "
            "then copy learner.adapters_dir"
        )
    return Path(url.database)


def back_up(store: Path, folder: Path, *, now: Callable[[], float] = time.time) -> Backup:
    """Write a backup into a folder, which is made. Raises: BackupError; nothing in it counts then,
    because `backup.json` is missing."""
    if not store.exists():
        raise BackupError(f"{store} is not there; check store.url")
    made_at = now()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BackupError(f"{folder} is not empty; give a new folder for each backup")
        copy = folder / STORE
        copy.touch(mode=0o600)  # VACUUM would make it readable by all
        with closing(sqlite3.connect(store)) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))
        sync(copy)
        adapters, missing = dict[str, str](), dict[str, str]()
        for path, digest in _named_by(copy).items():
            target = folder / "adapters" / digest
            try:
                if not target.exists():
                    _copy_for_backup(Path(path), target)
                adapters[path] = digest
            except (OSError, BackupError) as error:
                if isinstance(error, OSError) and error.errno in _OF_THE_BACKUP:
                    raise
                missing[path] = str(error)
                remove_folder(target)
        others = {one: _others(folder / "adapters" / one) for one in adapters.values()}
        made = Backup(made_at, file_digest(copy), adapters, missing, others)
        part = folder / f"{MANIFEST}.part"
        part.write_text(json.dumps(asdict(made), indent=1))
        sync(part)
        part.rename(folder / MANIFEST)
        sync(folder)
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"{folder}: the backup failed: {error}; remove the folder") from error
    return made


def read_backup(folder: Path) -> Backup:
    """Read a backup and check it. Raises: BackupError when its store cannot be used.

    Returns: also what became of it since, in `missing`: an adapter that was damaged does not keep
    the rest from being restored.
    """
    made = _manifest(folder)
    try:
        if file_digest(folder / STORE) != made.store_sha256:
            raise BackupError(f"{folder / STORE} was changed after it was written; take another")
        named = _named_by(folder / STORE)
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"{folder}: {error}") from error
    if any(named.get(path) != digest for path, digest in made.adapters.items()):
        raise BackupError(f"{folder / MANIFEST} names folders that the store in it does not name")
    damaged = dict[str, str]()
    for path, digest in made.adapters.items():
        try:
            _check(folder / "adapters" / digest, digest, made.others.get(digest))
        except BackupError as error:
            damaged[path] = str(error)
    kept = {path: digest for path, digest in made.adapters.items() if path not in damaged}
    return replace(made, adapters=kept, missing={**made.missing, **damaged})


def _manifest(folder: Path) -> Backup:
    try:
        made = msgspec.json.decode(read_plain(folder / MANIFEST), type=Backup)
    except (OSError, ValueError, RecursionError) as error:
        raise BackupError(f"{folder} holds no whole backup: {MANIFEST}: {error}") from error
    if made.version not in (1, VERSION):
        raise BackupError(f"{folder} is of another release; restore it with that one")
    return made


def restore(folder: Path, store: Path, *, now: Callable[[], float] = time.time) -> Backup:
    """Put a backup in the place of the store, and its folders where they are not as registered.

    What was there is kept beside it under a name that ends in `.before-<unix seconds>`. The
    processes must have ended. Returns: the backup; what is in its `missing` was left as it is.
    Raises: BackupError, before anything is changed if the backup is not whole, a path of it holds
    something else than an adapter, or the store is open or another user's.
    """
    refuse_other_owner(store)
    store, made = store.resolve(), read_backup(folder)  # a link goes on naming the store
    seconds = int(now())
    while os.path.lexists(store.with_name(f"{store.name}.before-{seconds}")):
        seconds += 1
    end, left = f".before-{seconds}", store.parent.glob(f"{_PARTS}*")
    for path, digest in made.adapters.items():
        try:
            odd = not Path(path).is_absolute() or ".." in Path(path).parts
            odd = odd or not _may_be_adapter(Path(path), digest)
        except (OSError, ValueError) as error:
            raise BackupError(f"{path[:200]!r} is no path: {error}") from error
        if odd:
            raise BackupError(f"{path} is no folder of an adapter: nothing was restored")
    _refuse_open(store)
    try:
        store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in left:  # by a restore that was killed
            remove_folder(one)
        for path, digest in made.adapters.items():
            source, others = folder / "adapters" / digest, made.others.get(digest)
            _put_back(source, Path(path), digest, others, end)
        with tempfile.TemporaryDirectory(dir=store.parent, prefix=_PARTS) as private:
            fresh = Path(private) / STORE
            shutil.copyfile(folder / STORE, fresh)
            fresh.chmod(0o600)
            _number_anew(fresh, int(now()))
            sync(fresh)
            _refuse_open(store)
            for log in _LOGS:  # only a damaged store has some left, see `_refuse_open`
                if os.path.lexists(old := store.with_name(store.name + log)):
                    old.rename(store.with_name(f"{store.name}{end}{log}"))
            if store.exists():
                os.link(store, store.with_name(store.name + end))
            fresh.replace(store)  # at no moment is there no store: a process would begin a new one
        sync(store.parent)
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"{store}: not restored: {error}") from error
    return made


def refuse_other_owner(*files: Path) -> None:
    """Raises: BackupError for root where a file, its folder, or a link to it is another user's: his
    processes could not write what root makes, and his link may name any file of root's."""
    for way in (way for file in files for way in (file.absolute(), file.resolve())):
        there = [one for one in (way, *way.parents) if os.path.lexists(one)]
        near = [one for one in there if one in (way, way.parent) or one.is_symlink()]
        for one in near or there[:1]:
            if os.geteuid() == 0 != (owner := one.lstat().st_uid):
                raise BackupError(f"{one} is of the user {owner}: restore as that one, by sudo -u")


def _may_be_adapter(there: Path, digest: str) -> bool:
    """True for an adapter, also a damaged one or an empty folder, and where nothing is."""
    if not there.exists() or (there / CONFIG).is_file():
        return True
    return there.is_dir() and (there.name == digest or not any(there.iterdir()))


def _number_anew(store: Path, generation: int) -> None:
    """Give the routing tables a generation that no proxy has passed (`routing_writer`): one that
    stayed open beside a store that was removed would not go back to that of the backup."""
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute(
            "UPDATE routing_table SET generation = max(generation, :now),"
            " body = json_set(body, '$.generation', max(generation, :now)) WHERE json_valid(body)",
            {"now": generation},
        )


def _named_by(store: Path) -> dict[str, str]:
    """Return path and digest of each version whose folder was not removed; check the file too."""
    with closing(sqlite3.connect(store)) as connection:
        [(sound,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
        if sound != "ok":
            raise BackupError(f"the store is damaged: {sound}; docs/upgrade.md says how to save it")
        query = "SELECT max(version_num) FROM alembic_version"
        [(revision,)] = connection.execute(query).fetchall()
        if (revision or "") > newest_revision():
            raise BackupError(f"a newer release made the store ({revision}): use that one")
        rows = connection.execute(
            "SELECT DISTINCT path, digest FROM adapter_version WHERE removed_at IS NULL"
        )
        return {str(path): str(digest) for path, digest in rows}


def _copy_for_backup(folder: Path, target: Path) -> None:
    """Copy an adapter's folder, by links to the files of a whole backup beside this one if it has
    it. Raises: OSError; BackupError when it has other bytes than its digest, the target's name."""
    for whole in target.parents[1].parent.glob(f"*/{MANIFEST}"):
        other = whole.parent / "adapters" / target.name
        try:
            _check(other, target.name, _manifest(whole.parent).others[target.name])
            _copy(other, target, os.link)
        except (OSError, BackupError, LookupError):
            remove_folder(target)
        else:
            return
    _copy(folder, target, shutil.copy2)
    _check(target, target.name)


def _copy(folder: Path, target: Path, one: Callable[[Path, Path], object]) -> None:
    """Copy the files of an adapter's folder, which has no folders."""
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink():
            one(file, target / file.name)
            sync(target / file.name)
    sync(target)


def _put_back(
    source: Path, target: Path, digest: str, others: Mapping[str, str] | None, end: str
) -> None:
    if os.path.lexists(target):
        try:
            return _check(target, digest, others)
        except BackupError:
            target.rename(target.with_name(target.name + end))
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{_PARTS}*"):  # by a restore that was killed
        remove_folder(left)
    fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=_PARTS))
    try:
        _copy(source, fresh, shutil.copy2)
        fresh.chmod(0o555)  # as the learner leaves it: vLLM may be another user
        fresh.rename(target)
    except OSError:
        remove_folder(fresh)
        raise
    return sync(target.parent)


def _refuse_open(store: Path) -> None:
    """Raises: BackupError while another process has the file open."""
    if not store.exists():
        return
    try:
        with closing(sqlite3.connect(store, timeout=1.0)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")  # only the last one may leave WAL
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            raise BackupError(
                f"{store} is open in another process; stop all of them, proxies too"
            ) from error
        # A damaged store is what a backup is for.


def _check(folder: Path, digest: str, others: Mapping[str, str] | None = None) -> None:
    """others: as of a backup, which a folder may have more than; None: not known."""
    try:
        found = folder_digest(folder)
        changed = others and not others.items() <= _others(folder).items()
    except OSError as error:
        raise BackupError(f"{folder} cannot be read: {error}") from error
    if found != digest or changed:
        raise BackupError(f"{folder} has other bytes than were registered")


def _others(folder: Path) -> dict[str, str]:
    """Return name and SHA-256 (hex) of the files that the digest leaves out: lineage, probe, ..."""
    files = sorted(one for one in folder.iterdir() if one.is_file() and not one.is_symlink())
    return {one.name: file_digest(one) for one in files if one.name not in DIGESTED}
