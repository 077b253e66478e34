"""Copies of versions in a model hub or in MLflow, for people who look for models there.

Nothing here reads them again: the registry is the store, and the sidecar runs without a mirror.

    hub:OWNER/NAME       a repository of the Hugging Face Hub, private when it is made here. Each
                         version is a commit and a tag, `v7`. `HF_TOKEN` and `HF_ENDPOINT` count.
    mlflow:URI           a registered model of an MLflow tracking server, one version each, with
                         the sidecar's aliases. `MLFLOW_TRACKING_TOKEN` and the like count. It has
                         the public model's name, and `-PROJECT` behind it in a project's line.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from sqlalchemy.orm import Session

from deploy.engine.validation import check_digest
from deploy.errors import DeployError, InvalidAdapterError
from deploy.records import AdapterVersion
from deploy.registry import versions
from learner.adapter_folder import (
    CARD,
    CONFIG,
    CURVES,
    DIGESTED,
    LINEAGE,
    PROBE,
    WEIGHTS,
    folder_digest,
    manifest_digest,
)
from learner.progress.export import mlflow_experiment
from learner.resume import remove_folder, sync
from sidecar.hiding import hide_in_url
from sidecar.lines import project_of, public_model
from sidecar.records import BASE

# Write a version as a standard PEFT folder, or as a tar of one, for use elsewhere.

FILES = (CONFIG, WEIGHTS, LINEAGE, CARD, PROBE, CURVES)
"""What is written."""
TAR = ".tar"


class ExportError(DeployError, ValueError):
    """The export cannot be written; the message says why, and what to do."""


def version_in_files(session: Session, line: str, reference: str) -> AdapterVersion:
    """Find the version that a person named: a number, an alias or a full name.

    Raises: UnknownAdapterError; ExportError for the base model.
    """
    name = versions.resolve(session, line, reference)
    if name == BASE:
        raise ExportError("the base model is no adapter version; there is nothing to export")
    return versions.find(session, name)


def export_version(version: AdapterVersion, target: Path, *, compared: str) -> tuple[str, ...]:
    """Write the files of a version to a new folder, or to a new file whose name ends with `.tar`.

    compared: what its canary showed, in a sentence: the last one of its model card.
    Returns: the names of the files.
    Raises: ExportError; InvalidAdapterError when the folder is not what was registered; OSError.
    """
    if version.removed_at is not None:
        raise ExportError(f"the folder of {version.name} was removed; only its documents are left")
    if target.exists() or target.is_symlink():
        raise ExportError(f"{target}: is there already; name a folder or file that is not")
    if not target.parent.is_dir():
        raise ExportError(f"{target.parent}: no such folder; make it first")
    source = Path(version.path)
    check_digest(source, version.digest)
    names = tuple(name for name in FILES if (source / name).is_file())
    unfinished = target.with_name(f".{target.name}.unfinished")
    remove_folder(unfinished)
    try:
        if target.name.endswith(TAR):
            _write_tar(source, unfinished, names, compared)
            found = _tar_digest(unfinished)
        else:
            _write_folder(source, unfinished, names, compared)
            found = folder_digest(unfinished)
        if found != version.digest:
            raise InvalidAdapterError(f"{source}: changed while it was copied; try again")
        unfinished.rename(target)
        sync(target.parent)
    finally:
        remove_folder(unfinished)
    return names


def _open(path: Path, compared: str) -> BinaryIO:
    if path.name == CARD:
        return io.BytesIO(path.read_bytes() + f"\n{compared}\n".encode())
    return path.open("rb")


def _write_folder(source: Path, target: Path, names: tuple[str, ...], compared: str) -> None:
    target.mkdir()
    for name in names:
        with _open(source / name, compared) as file, (target / name).open("xb") as copy:
            shutil.copyfileobj(file, copy)
        sync(target / name)
    sync(target)


def _write_tar(source: Path, target: Path, names: tuple[str, ...], compared: str) -> None:
    with tarfile.open(target, "x") as archive:
        for name in names:
            entry = archive.gettarinfo(source / name, name)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o644
            with _open(source / name, compared) as file:
                entry.size = file.seek(0, io.SEEK_END)
                file.seek(0)
                archive.addfile(entry, file)
    sync(target)


def _tar_digest(path: Path) -> str:
    """Return the digest of the folder in a tar, as `learner.adapter_folder` makes it."""
    manifest = []
    with tarfile.open(path) as archive:
        for name in DIGESTED:
            entry = archive.getmember(name)
            file = archive.extractfile(entry)
            if not isinstance(file, io.BufferedReader):
                raise InvalidAdapterError(f"{name}: is not a plain file")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            manifest.append({"path": name, "size": entry.size, "sha256": digest})
    return manifest_digest(manifest)


ARTIFACT: Final = "adapter"
LINE: Final = "sidecar.line"
"""Tag of a registered model of MLflow: the line whose versions it holds."""
_REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")


class MirrorError(DeployError):
    """A version cannot be pushed; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Pushed:
    where: str
    already: bool
    """It was there before; its files were not sent again."""


class Mirror(Protocol):
    """A place that keeps copies. Calls block; whatever they raise means "not pushed"."""

    def push(self, folder: Path, version: AdapterVersion, aliases: Collection[str]) -> Pushed:
        """Copy a folder, once. aliases: the names that point at this version now.

        Raises: MirrorError when something else has the version's name there.
        """
        ...


def push_version(
    mirror: Mirror, to: str, folder: Path, version: AdapterVersion, aliases: Collection[str]
) -> Pushed:
    """Copy an exported folder to a mirror. to: as the operator named it. Raises: MirrorError."""
    try:
        return mirror.push(folder, version, aliases)
    except MirrorError:
        raise
    except Exception as error:  # each client has errors of its own for a network or a token
        # The hub's client says "Error while uploading", and why in the error before it.
        before = f" ({error.__cause__})" if error.__cause__ is not None else ""
        said = " ".join(f"{type(error).__name__}: {error}{before}".split())  # errors are one line
        why = hide_in_url(said)[:500]
        raise MirrorError(f"{version.name} cannot be pushed to {hide_in_url(to)}: {why}") from error


def open_mirror(to: str, model: str) -> Mirror:
    """Open the mirror that `to` names. model: name of the line. Raises: MirrorError."""
    kind, _, place = to.partition(":")
    if kind not in MIRRORS or not place:
        raise MirrorError(f"{hide_in_url(to)!r} is not hub:OWNER/NAME or mlflow:URI")
    try:
        return MIRRORS[kind](place, model)
    except ImportError as error:
        raise MirrorError(
            f"{error.name} cannot be imported; run `pip install {error.name}`, or push elsewhere"
        ) from error
    except MirrorError:
        raise
    except Exception as error:  # such as an address that the client cannot read
        why = hide_in_url(f"{type(error).__name__}: {error}")[:500]
        raise MirrorError(f"{hide_in_url(to)} cannot be opened: {why}") from error


class _Hub:
    def __init__(self, place: str, model: str) -> None:
        if not _REPO.fullmatch(place):
            raise MirrorError(f"{hide_in_url(f'hub:{place}')!r} is not hub:OWNER/NAME")
        import_module("huggingface_hub.utils").disable_progress_bars()  # stderr is for errors
        self._api: Any = import_module("huggingface_hub").HfApi()
        self._repo = place

    def push(self, folder: Path, version: AdapterVersion, aliases: Collection[str]) -> Pushed:
        tag = f"v{version.version}"
        self._api.create_repo(self._repo, private=True, exist_ok=True)
        if tag in {one.name for one in self._api.list_repo_refs(self._repo).tags}:
            newest = self._api.list_repo_commits(self._repo, revision=tag)[0]
            if version.digest in newest.message:
                return Pushed(f"{self._repo} ({tag})", already=True)
            raise MirrorError(
                f"hub:{self._repo} has a tag {tag} that is not {version.name}; push to another "
                "repository, or delete that tag"
            )
        done = self._api.upload_folder(
            repo_id=self._repo,
            folder_path=str(folder),
            commit_message=version.name,
            commit_description=f"digest {version.digest}",
            delete_patterns="*",  # what an older version had, and this one has not
        )
        message = ", ".join(sorted(aliases)) or version.state
        self._api.create_tag(self._repo, tag=tag, revision=done.oid, tag_message=message)
        return Pushed(f"{self._repo} ({tag})", already=False)


class _Mlflow:
    def __init__(self, place: str, model: str) -> None:
        self._client: Any = import_module("mlflow").MlflowClient(
            tracking_uri=place, registry_uri=place
        )
        self._place, self._line = place, model
        project = project_of(model)
        name = public_model(model) + (f"-{project}" if project else "")
        # MLflow takes no slash and no colon in a name; a quote would end it in a search.
        self._name = re.sub(r"[^\w. -]", "-", name)

    def push(self, folder: Path, version: AdapterVersion, aliases: Collection[str]) -> Pushed:
        self._require_model()
        found = self._client.search_model_versions(
            f"name = '{self._name}' and tags.`sidecar.digest` = '{version.digest}'"
        )
        number = found[0].version if found else self._add(folder, version)
        for alias in sorted(aliases):
            self._client.set_registered_model_alias(self._name, alias, number)
        return Pushed(f"models:/{self._name}/{number}", already=bool(found))

    def _require_model(self) -> None:
        """Make the registered model if there is none.

        Raises: MirrorError when it holds the versions of another line.
        """
        found = self._client.search_registered_models(f"name = '{self._name}'")
        if not found:
            self._client.create_registered_model(self._name, tags={LINE: self._line})
            return
        line = found[0].tags.get(LINE, self._line)  # one of an older release names none
        if line != self._line:
            raise MirrorError(
                f"the registered model {self._name} of {hide_in_url(self._place)} holds the "
                f"versions of {line}, not of {self._line}; push to another MLflow, or rename it"
            )

    def _add(self, folder: Path, version: AdapterVersion) -> str:
        """Make a model version. Returns: its number there."""
        client = self._client
        tags = {
            "sidecar.adapter": version.name,
            "sidecar.version": str(version.version),
            "sidecar.digest": version.digest,
            "sidecar.parent": version.parent,
        }
        run = client.create_run(mlflow_experiment(client), run_name=version.name, tags=tags).info
        client.log_artifacts(run.run_id, str(folder), ARTIFACT)
        client.set_terminated(run.run_id)
        source = f"{run.artifact_uri}/{ARTIFACT}"
        made = client.create_model_version(self._name, source, run.run_id, tags=tags)
        return str(made.version)


MIRRORS: Final[dict[str, Callable[[str, str], Mirror]]] = {"hub": _Hub, "mlflow": _Mlflow}
"""What stands before the colon -> opens it: (place, name of the line)."""
