"""`sidecar adapters import`: make a LoRA that somebody trained elsewhere a version like any other.

Its config and weights are copied, never linked: a version's folder is read-only, and the digest is
that of the copy. It is validated as each candidate is (rank, alpha, targets, base, finite weights),
gets a version, a lineage and a model card, and waits for its canary. The store is written directly,
as the learner does; control may be down.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, get_args

import typer

from deploy.cli.context import Project, admin_client, open_store, settings_of, show
from deploy.cli.output import (
    GivenReason,
    Output,
    completed_by,
    group,
    note,
    print_found,
    refuse_unknown,
    say_either,
)
from deploy.records import AdapterState
from sidecar.visible import counted

if TYPE_CHECKING:
    from deploy.adapters.diff import ModuleChange
    from deploy.adapters.prune import Fate, Pruned
    from deploy.errors import InvalidAdapterError
    from deploy.records import AdapterVersion
    from learner.records import Candidate
    from sidecar.settings import Settings
    from sidecar.store.database import Database


# `sidecar adapters diff` and `export`: read versions from the store, and their folders.

VersionA = Annotated[str, typer.Argument(metavar="A", help="a version, an alias or a full name")]
VersionB = Annotated[str, typer.Argument(metavar="B", help="the other one")]


def adapters_diff(
    context: typer.Context,
    a: VersionA,
    b: VersionB,
    project: Project = None,
    output: Output = "text",
) -> None:
    """In what two versions differ: descent, config, training data, weights module by module."""
    from dataclasses import asdict

    from deploy.adapters import diff as differences
    from deploy.errors import UnknownAdapterError
    from deploy.registry.lineage import trace_lineage

    settings = settings_of(context, project)
    with open_store(settings, upgrade=False) as database, database.read() as session:
        first, second = (trace_lineage(session, settings.line.name, one) for one in (a, b))
    for one, reference in ((first, a), (second, b)):
        if not one.steps:
            raise UnknownAdapterError(f"{reference} is the base model, which has no files here")
    version_a, version_b = first.steps[0].adapter, second.steps[0].adapter
    modules, why = _compared(version_a, version_b)
    configs = _config(settings, version_a), _config(settings, version_b)
    found = differences.AdapterDiff(
        a=version_a.name,
        b=version_b.name,
        same_files=version_a.digest == version_b.digest,
        descent=differences.compare_descent(first, second),
        config=differences.differing(*configs),
        settings=differences.differing(
            differences.settings_of_run(first), differences.settings_of_run(second)
        ),
        data=differences.compare_data(first, second),
        modules=tuple(modules),
        not_compared=why,
    )
    say_either(output, asdict(found), differences.render(found).split("\n"))


def _compared(a: AdapterVersion, b: AdapterVersion) -> tuple[list[ModuleChange], str]:
    """Compare the weights. Returns: nothing and the reason where that cannot be done."""
    from deploy.adapters.diff import compare_weights, open_lora
    from deploy.errors import InvalidAdapterError

    for one in (a, b):
        if one.removed_at is not None:
            return [], f"the folder of v{one.version} was removed (adapters.folder_days)"
    try:
        return compare_weights(open_lora(Path(a.path)), open_lora(Path(b.path))), ""
    except ImportError:
        return [], "numpy is not installed (`pip install numpy`)"
    except (InvalidAdapterError, OSError) as error:
        return [], str(error)


def _config(settings: Settings, version: AdapterVersion) -> dict[str, Any]:
    """Read a version's config, of a removed one what is left; empty when it cannot be read."""
    from deploy.adapters.diff import read_config
    from deploy.adapters.prune import removed_documents
    from deploy.errors import InvalidAdapterError
    from learner.adapter_folder import CONFIG, open_file, open_folder

    folder = Path(version.path)
    if version.removed_at is not None:
        folder = removed_documents(settings.learner.adapters_dir, version.digest)
    try:
        with open_folder(folder) as descriptor, open_file(descriptor, CONFIG) as file:
            return read_config(file)
    except (InvalidAdapterError, OSError) as error:
        note(f"{folder}: {error}; its config is not compared")
        return {}


def adapters_export(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="a version, an alias or a full name")],
    target: Annotated[Path, typer.Argument(help="a new folder, or a new file that ends in .tar")],
    project: Project = None,
    output: Output = "text",
) -> None:
    """Write a version as a standard PEFT folder, or a tar of one, whose digest is checked."""
    from deploy.adapters.export import ExportError, export_version, version_in_files
    from deploy.admin.progress import compared_words

    settings = settings_of(context, project)
    with open_store(settings, upgrade=False) as database, database.read() as session:
        found = version_in_files(session, settings.line.name, version)
        compared = compared_words(session, found.name)
    try:
        files = export_version(found, target, compared=compared)
    except OSError as error:
        raise ExportError(
            f"{error.filename or target}: {error.strerror}; free space or name another place"
        ) from error
    shown = {"adapter": found.name, "digest": found.digest, "to": str(target), "files": list(files)}
    print_found(shown, output)


# `sidecar adapters prune`: remove the folders of versions that nothing needs.

PRUNE_ACTOR = "sidecar adapters prune"


def adapters_prune(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would go and what stays; remove nothing")
    ] = False,
    output: Output = "text",
) -> None:
    """Remove the adapter folders that nothing needs (control does it by itself, every hour).

    What an alias, a canary, a run, a vLLM or the last champions need stays, and so do its parents.
    Lineage and events stay for ever. The settings `[adapters]` say when."""
    from deploy.adapters.prune import KEEP_CHAMPIONS, FolderRule, Pruner
    from learner.shared_folders import shared_folders

    settings = settings_of(context)
    rule = FolderRule(folder_days=settings.adapters.folder_days, keep_champions=KEEP_CHAMPIONS)
    folders = settings.learner.adapters_dir
    with open_store(settings) as database:
        pruner = Pruner(
            database=database, adapters_dir=folders, rule=rule, shared=shared_folders(settings)
        )
        now = time.time()
        found = pruner.plan(now=now) if dry_run else pruner.prune(now=now, actor=PRUNE_ACTOR)
    say_either(output, _as_json(found, dry_run), _lines(found, dry_run))


def _as_json(found: Pruned, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "removed": [_one(fate) for fate in found.fates if fate.goes],
        "kept": [_one(fate) for fate in found.fates if not fate.goes],
        "freed_bytes": found.freed_bytes,
    }


def _one(fate: Fate) -> dict[str, Any]:
    version = fate.version
    return {
        "name": version.name,
        "version": version.version,
        "state": version.state,
        "path": version.path,
        "why": fate.why,
    }


def _lines(found: Pruned, dry_run: bool) -> list[str]:
    goes = [one for one in found.fates if one.goes]
    stays = [one for one in found.fates if not one.goes]
    verb = "would go" if dry_run else "went"
    folders = counted(len(goes), "folder")
    lines = [
        f"{folders} {verb} ({_size(found.freed_bytes)}), {counted(len(stays), 'stays', 'stay')}"
    ]
    lines += [f"  {verb}  {_words(one)}" for one in goes]
    lines += [f"  stays {_words(one)}" for one in stays]
    return lines


def _words(fate: Fate) -> str:
    return f"v{fate.version.version} [{fate.version.state}]: {fate.why}"


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


# `sidecar adapters push`: a copy of a version in a model hub or in MLflow.

PUSH_ACTOR = "sidecar adapters push"


def adapters_push(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="a version, an alias or a full name")],
    to: Annotated[str, typer.Option("--to", help="hub:OWNER/NAME or mlflow:URI")],
    reason: GivenReason,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Copy a version, as `export` writes it, to a model hub or to MLflow; once for each."""
    from deploy.adapters.export import export_version, open_mirror, push_version, version_in_files
    from deploy.admin.progress import compared_words
    from deploy.registry import audit, versions
    from sidecar.hiding import hide_in_url

    settings = settings_of(context, project)
    with open_store(settings, upgrade=False) as database:
        with database.read() as session:
            found = version_in_files(session, settings.line.name, version)
            compared = compared_words(session, found.name)
            kept = versions.aliases_of(session, found.model)
        aliases = [alias for alias, target in kept.items() if target == found.name]
        mirror = open_mirror(to, found.model)
        with tempfile.TemporaryDirectory(prefix="sidecar-push-") as folder:
            copy = Path(folder) / f"v{found.version}"
            export_version(found, copy, compared=compared)
            done = push_version(mirror, to, copy, found, aliases)
        shown = {"to": hide_in_url(to), "where": done.where, "already": done.already}
        with database.write() as session:
            audit.record(
                session,
                now=time.time(),
                actor=PUSH_ACTOR,
                action="adapter.pushed",
                subject=found.name,
                before={},
                after=shown,
                reason=reason,
            )
    print_found({"adapter": found.name, **shown}, output)


IMPORT_ACTOR = "sidecar adapters import"
PREFIX = ".import-"
"""Prefix of the folder that an import writes into, beside the published ones."""
ABANDONED_AFTER_S = 3600.0
"""Age of the newest file of such a folder at which its import is dead: a copy that goes on writes
to a file all the time, and what follows it takes minutes."""
CHUNK_BYTES = 1024 * 1024


def adapters_import(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(help="a PEFT folder: its config and its safetensors; or a .tar of one")
    ],
    reason: GivenReason,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Make a LoRA that was trained elsewhere a version; it goes through a canary as others do."""

    settings = settings_of(context, project)
    with open_store(settings) as database:
        made = import_adapter(settings, database, folder, reason=reason, now=time.time())
    config = _import_config(made.path)
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
    from deploy.adapters.prune import put_back, with_documents
    from deploy.engine.validation import Registered, validate_folder
    from deploy.errors import InvalidAdapterError
    from deploy.line_loops import serving_limits
    from deploy.registry import bans
    from learner.adapter_folder import CARD, LINEAGE, folder_digest
    from learner.resume import remove_folder
    from learner.runs.publish import find_published, place_or_share, register, replaced, seal
    from learner.shared_folders import shared_folders
    from sidecar.records import BASE

    limits = serving_limits(settings.serving)
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
            lineage = _lineage(settings, folder, _import_config(work), reason=reason, now=now)
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
                actor=IMPORT_ACTOR,
                reason=f"imported from {folder.resolve()}: {reason}",
            )
    finally:
        for one in (work, replaced(work)):
            remove_folder(one)


def _sweep(adapters_dir: Path, *, now: float) -> None:
    """Remove what imports left that were killed. Raises: OSError."""
    from learner.resume import remove_folder

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


def _import_config(folder: Path) -> dict[str, Any]:
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


# `sidecar adapters`: the adapter versions, as the admin API knows them.

EVERY_VERSION = 10_000
"""The most that the admin API lists at once."""
adapters_app = group("Adapter versions.")
adapters_app.command("import")(adapters_import)
adapters_app.command("push")(adapters_push)
adapters_app.command("diff")(adapters_diff)
adapters_app.command("export")(adapters_export)
adapters_app.command("prune")(adapters_prune)


@adapters_app.command("ls")
def adapters_ls(
    context: typer.Context,
    state: Annotated[
        str,
        typer.Option(
            help="such as champion, retired or rejected",
            autocompletion=completed_by(*get_args(AdapterState)),
        ),
    ] = "",
    at: Annotated[
        str, typer.Option(help="a time, such as 2026-03-01T09:30Z: who held which alias then")
    ] = "",
    project: Project = None,
    output: Output = "text",
) -> None:
    """Every version, newest first; with --at, which one was champion at that time.

    `adapters show VERSION` has its name in vLLM, its digest and its folder."""
    if at:
        show(admin_client(context, project), output, "/aliases", params={"at": str(_seconds(at))})
        return
    refuse_unknown("--state", state, get_args(AdapterState))
    given: dict[str, str | int] = {"limit": EVERY_VERSION}
    if state:
        given["state"] = state
    show(admin_client(context, project), output, "/adapters", params=given)


def _seconds(at: str) -> float:
    """Read an ISO time, in UTC where it names no zone. Raises: typer.BadParameter."""
    try:
        moment = datetime.fromisoformat(at)
    except ValueError as error:
        raise typer.BadParameter(
            "is no time; write one such as 2026-03-01T09:30Z", param_hint="--at"
        ) from error
    at_s = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if at_s < 0:
        raise typer.BadParameter(
            "is before 1970, when nothing was champion; write a time such as 2026-03-01T09:30Z",
            param_hint="--at",
        )
    return at_s


@adapters_app.command("alias")
def adapters_alias(
    context: typer.Context,
    alias: Annotated[str, typer.Argument(autocompletion=completed_by("anchor", "champion"))],
    version: str,
    reason: GivenReason,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Point an alias at a version: `anchor`, or `champion` by the rules of a rollback."""
    client = admin_client(context, project)
    etag = client.etag("/aliases", alias)
    body = {"adapter": version, "reason": reason}
    show(client, output, "/aliases", alias, method="PUT", body=body, etag=etag)


@adapters_app.command("allow")
def adapters_allow(
    context: typer.Context,
    version: str,
    reason: GivenReason,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Lift the ban of a version's files: `sidecar canary start` may try it again."""
    client = admin_client(context, project)
    body = {"reason": reason}
    show(client, output, "/adapters", version, "allow", method="POST", body=body)


@adapters_app.command("show")
def adapters_show(
    context: typer.Context, version: str, project: Project = None, output: Output = "text"
) -> None:
    """One version."""
    show(admin_client(context, project), output, "/adapters", version)
