"""`sidecar adapters import`: make a LoRA that somebody trained elsewhere a version like any other.

Its config and weights are copied, never linked: a version's folder is read-only, and the digest is
that of the copy. It is validated as each candidate is (rank, alpha, targets, base, finite weights),
gets a version, a lineage and a model card, and waits for its canary. The store is written directly,
as the learner does; control may be down.
"""

from __future__ import annotations

import json
import tarfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.context import Project, settings_of
from deploy.cli.output import GivenReason, Output, note, print_found, require_store

if TYPE_CHECKING:
    from deploy.errors import InvalidAdapterError
    from learner.records import Candidate
    from sidecar.settings import Settings
    from sidecar.store.database import Database

ACTOR = "sidecar adapters import"
PREFIX = ".import-"
"""Prefix of the folder that an import writes into, beside the published ones."""
ABANDONED_AFTER_S = 3600.0
"""Age of the newest file of such a folder at which its import is dead: a copy that goes on writes
to a file all the time, and what follows it takes minutes."""
CHUNK_BYTES = 1024 * 1024


def adapters_import(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(help="a PEFT folder: its config and its safetensors; or a .tar of one"),
    ],
    reason: GivenReason,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Make a LoRA that was trained elsewhere a version; it goes through a canary as others do."""
    from sidecar.store.database import Database

    settings = settings_of(context, project)
    require_store(settings.store.url)
    with closing(Database(settings.store.url)) as database:
        database.upgrade_if_behind()
        made = import_adapter(settings, database, folder, reason=reason, now=time.time())
    config = _config(made.path)
    print_found({"adapter": made.adapter, "version": made.version, "path": str(made.path)}, output)
    for name, found, wanted in (
        ("rank", config.get("r"), settings.learner.rank),
        ("alpha", config.get("lora_alpha"), settings.learner.alpha),
    ):
        if found != wanted:
            note(f"runs refuse it as their parent until learner.{name} = {found} (now {wanted})")


def import_adapter(
    settings: Settings, database: Database, folder: Path, *, reason: str, now: float
) -> Candidate:
    """Copy, validate and register a PEFT folder. Folders of imports that were killed are removed.

    A version whose folder retention removed gets it back, and stays what it was.
    reason: for the audit, and the lineage. now: Unix seconds.
    Raises: InvalidAdapterError, when it cannot be served or is a version already; OSError;
        StoreError.
    """
    from deploy.adapters.restore import put_back, with_documents
    from deploy.engine.validation import Registered, ServingLimits, validate_folder
    from deploy.errors import InvalidAdapterError
    from deploy.registry.history import bans
    from learner.adapter_folder import CARD, LINEAGE, folder_digest
    from learner.resume.work_folder import remove_folder
    from learner.runs.publish import find_published, place_or_share, register, replaced, seal
    from learner.shared_folders import shared_folders
    from sidecar.records import BASE

    serving = settings.serving
    bases = {serving.base_model_path, serving.model} if serving.base_model_path else set()
    limits = ServingLimits(
        max_rank=serving.max_lora_rank,
        bases=frozenset(bases),
        base_model_path=serving.base_model_path,
    )
    adapters_dir = settings.learner.adapters_dir.resolve()
    adapters_dir.mkdir(parents=True, exist_ok=True)
    _sweep(adapters_dir, now=now)
    work = adapters_dir / f"{PREFIX}{uuid.uuid4().hex}"
    work.mkdir()
    try:
        with _named(work):
            _copy(folder, work)
            digest = folder_digest(work)
            validate_folder(work, Registered(digest=digest), limits)
            lineage = _lineage(settings, folder, _config(work), reason=reason, now=now)
            (work / LINEAGE).write_text(json.dumps(lineage, indent=1) + "\n", encoding="utf-8")
            (work / CARD).write_text(_card(lineage), encoding="utf-8")
            with_documents(work, adapters_dir, digest)
            sealed = seal(work)
            if (shared := shared_folders(settings)) is not None:
                shared.upload(work, digest)
        with database.write() as session:
            line = settings.line.name
            bans.refuse(session, line, sealed.digest)
            known = find_published(session, line, sealed.digest)
            if known is not None and put_back(session, known, sealed, adapters_dir, now=now):
                return known
            if known is not None:
                raise InvalidAdapterError(
                    f"{folder}: these weights are {known.adapter} already; `sidecar adapters show "
                    f"{known.version}` says what became of it"
                )
            sealed, path = place_or_share(session, sealed, adapters_dir)
            return register(
                session,
                model=line,
                parent=BASE,
                run_id=None,
                sealed=sealed,
                path=path,
                now=now,
                actor=ACTOR,
                reason=f"imported from {folder.resolve()}: {reason}",
            )
    finally:
        for one in (work, replaced(work)):
            remove_folder(one)


def _sweep(adapters_dir: Path, *, now: float) -> None:
    """Remove what imports left that were killed. Raises: OSError."""
    from learner.resume.work_folder import remove_folder

    for folder in adapters_dir.glob(f"{PREFIX}*"):
        try:
            newest = max(one.lstat().st_mtime for one in (folder, *folder.iterdir()))
        except FileNotFoundError:
            continue  # another import ended, or sweeps too
        if now - newest > ABANDONED_AFTER_S:
            note(f"removes {folder}: an import was killed there")
            remove_folder(folder)


def _copy(folder: Path, work: Path) -> None:
    """Copy the two files of an adapter. Raises: InvalidAdapterError when one cannot be read;
    OSError when the copy cannot be written."""
    from learner.adapter_folder import DIGESTED, open_file, open_folder

    if folder.is_file():
        _unpack(folder, work)
        return
    with ExitStack() as opened:
        try:
            descriptor = opened.enter_context(open_folder(folder))
            sources = {name: opened.enter_context(open_file(descriptor, name)) for name in DIGESTED}
        except OSError as error:
            raise _unreadable(folder, error) from error
        for name, source in sources.items():
            _write(work / name, source, folder)


def _unreadable(folder: Path, error: OSError) -> InvalidAdapterError:
    from deploy.errors import InvalidAdapterError
    from learner.adapter_folder import DIGESTED

    return InvalidAdapterError(
        f"{folder}: {error.filename or ''} cannot be read ({error.strerror}); name a PEFT "
        f"folder with {' and '.join(DIGESTED)}"
    )


def _write(path: Path, source: IO[bytes], folder: Path) -> None:
    """Copy an open file. Raises: InvalidAdapterError when it cannot be read; OSError when the copy
    cannot be written."""
    with path.open("wb") as target:
        while True:
            try:
                chunk = source.read(CHUNK_BYTES)
            except OSError as error:
                raise _unreadable(folder, error) from error
            if not chunk:
                return
            target.write(chunk)


@contextmanager
def _named(work: Path) -> Iterator[None]:
    """Name the folder that is written to in an error that names no file, as of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise
        raise OSError(error.errno, error.strerror, str(work)) from error


def _unpack(tar: Path, work: Path) -> None:
    """Copy the two files of an adapter out of an uncompressed tar, as `adapters export` writes it.

    No path of the tar is ever written to, and no more bytes than the tar has are read.
    Raises: InvalidAdapterError.
    """
    from deploy.errors import InvalidAdapterError
    from learner.adapter_folder import DIGESTED

    try:
        with tarfile.open(tar, "r:") as archive:
            folder = _folder_in(archive.getnames())
            for name in DIGESTED:
                entry = archive.getmember(folder + name)
                # A sparse file of a few bytes may be terabytes of zeros when it is read.
                source = archive.extractfile(entry) if entry.isreg() else None
                if source is None or entry.issparse():
                    raise KeyError(f"{name} is not a plain file")
                with source:
                    _write(work / name, source, tar)
    except (tarfile.TarError, KeyError) as error:
        raise InvalidAdapterError(
            f"{tar}: {error.args[0]}; name a PEFT folder with {' and '.join(DIGESTED)}, or an "
            "uncompressed tar of their files"
        ) from error


def _folder_in(names: list[str]) -> str:
    """Return what stands before the files' names: nothing, `./`, or one folder's name and `/`."""
    from learner.adapter_folder import CONFIG

    found = [name for name in names if name == CONFIG or name.endswith(f"/{CONFIG}")]
    if len(found) > 1:
        raise KeyError(f"it has {len(found)} adapters ({', '.join(sorted(found)[:3])})")
    return found[0].removesuffix(CONFIG) if found else ""


def _config(folder: Path) -> dict[str, Any]:
    from learner.adapter_folder import CONFIG

    found: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return found


def _lineage(
    settings: Settings, folder: Path, config: dict[str, Any], *, reason: str, now: float
) -> dict[str, Any]:
    from learner.adapter_folder import PATTERNS

    return {
        "format": 1,
        "run_id": None,
        "created_at": now,
        "model": settings.line.name,
        "base_model": config["base_model_name_or_path"],
        "parent": {"name": "base", "version": 0, "digest": ""},
        "groups": [],
        "dropped": {},
        "judges": [],
        "imported": {"from": str(folder.resolve()), "reason": reason},
        "algorithm": {
            "rank": config["r"],
            "alpha": config["lora_alpha"],
            **{name: config[name] for name in PATTERNS if config.get(name)},
        },
        "metrics": [],
    }


def _card(lineage: dict[str, Any]) -> str:
    return f"""---
base_model: {json.dumps(lineage["base_model"])}
library_name: peft
pipeline_tag: text-generation
tags: [lora]
---

# LoRA for {lineage["model"]}

Trained elsewhere, and imported into learning-sidecar. `lineage.json` says from where, and why.
"""
