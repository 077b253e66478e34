"""Adapter folders at a URL of `fsspec`, for machines that share no disk: `adapters.url`.

    <url>/<digest>/<file>           the files of the folder
    <url>/<digest>/manifest.json    their sizes and SHA-256 digests; written last

A folder without its manifest is not complete, and nobody reads it. What is fetched is compared with
the manifest and with the digest that the registry has, so a bucket can hold an adapter back but not
change it. `s3://`, `gs://` and others need their plugin (`pip install s3fs`, `gcsfs`), which also
takes the credentials from their own variables.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from learner.adapter_folder import (
    CARD,
    CONFIG,
    CURVES,
    LINEAGE,
    MAX_FILE_BYTES,
    OPTIMIZER,
    PROBE,
    WEIGHTS,
    folder_digest,
)
from learner.errors import SharedFolderError
from learner.records import Parent
from learner.resume import remove_folder, sync
from sidecar.settings import Settings

MANIFEST = "manifest.json"
FILES = frozenset({CONFIG, WEIGHTS, LINEAGE, CARD, OPTIMIZER, PROBE, CURVES})
"""No other name is ever written or fetched."""
FETCHING = ".fetch-"
"""Prefix of a folder that is being fetched, beside the published ones."""
MAX_MANIFEST_BYTES = 64 * 1024
TRIES = 3
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFolders:
    """The folders at one URL, and where they are kept on this machine."""

    url: str
    adapters_dir: Path

    def upload(self, folder: Path, digest: str) -> None:
        """Write a finished folder to the URL; no effect when it is there already.

        Raises: SharedFolderError after TRIES attempts.
        """
        for attempt in range(1, TRIES + 1):
            try:
                self._upload(folder, digest)
                return
            except SharedFolderError:
                if attempt == TRIES:
                    raise

    def local(self, digest: str, path: str) -> Path:
        """Return the folder on this machine, fetched if it is not here.

        path: where the machine that made it has it. Raises: SharedFolderError; OSError.
        """
        here = self.adapters_dir.resolve() / digest
        for folder in (Path(path), here):
            if folder.is_dir():
                return folder
        self._fetch(digest, here)
        return here

    def remove(self, digest: str) -> None:
        """Delete a folder at the URL, its manifest first. Raises: SharedFolderError."""
        system, root = self._open()

        def delete() -> None:
            place = f"{root}/{digest}"
            for name in (MANIFEST, *sorted(FILES)):
                if system.exists(f"{place}/{name}"):
                    system.rm_file(f"{place}/{name}")

        self._do("deleted from", delete)

    def _upload(self, folder: Path, digest: str) -> None:
        system, root = self._open()
        place = f"{root}/{digest}"

        def write() -> None:
            if system.exists(f"{place}/{MANIFEST}"):
                return
            if place.startswith("/"):  # an object store has no folders, and would make a bucket
                system.makedirs(place, exist_ok=True)
            files = []
            for path in sorted(one for one in folder.iterdir() if one.name in FILES):
                system.put_file(str(path), f"{place}/{path.name}")
                size, sha256 = _hash(path.open("rb"))
                with system.open(f"{place}/{path.name}", "rb") as written:
                    if _hash(written) != (size, sha256):
                        raise SharedFolderError(f"{self.url}: {path.name} came out changed")
                files.append({"path": path.name, "size": size, "sha256": sha256})
            body = json.dumps({"digest": digest, "files": files}, indent=1).encode()
            system.pipe_file(f"{place}/{MANIFEST}", body)

        self._do("written to", write)

    def _fetch(self, digest: str, here: Path) -> None:
        system, root = self._open()
        work = here.with_name(f"{FETCHING}{digest[:12]}-{uuid.uuid4().hex[:8]}")

        def read() -> None:
            for entry in self._manifest(system, f"{root}/{digest}"):
                name = entry["path"]
                system.get_file(f"{root}/{digest}/{name}", str(work / name))
                if _hash((work / name).open("rb")) != (entry["size"], entry["sha256"]):
                    raise SharedFolderError(f"{self.url}: {digest}/{name} is not what was written")

        here.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        try:
            self._do("read from", read)
            if folder_digest(work) != digest:
                raise SharedFolderError(f"{self.url}: {digest} has the files of another adapter")
            for path in work.iterdir():
                path.chmod(0o444)
                sync(path)
            sync(work)
            if not here.is_dir():  # another process may have been faster
                work.rename(here)
                here.chmod(0o555)
                sync(here.parent)
        finally:
            remove_folder(work)

    def _manifest(self, system: Any, place: str) -> list[dict[str, Any]]:
        """Raises: SharedFolderError when it is missing, or names what does not belong there."""
        try:
            if system.size(f"{place}/{MANIFEST}") > MAX_MANIFEST_BYTES:
                raise SharedFolderError(f"{place}/{MANIFEST}: is too long")
            found = json.loads(system.cat_file(f"{place}/{MANIFEST}"))
            entries = [dict(one) for one in found["files"]]
            sound = all(
                one["path"] in FILES and 0 <= int(one["size"]) <= MAX_FILE_BYTES for one in entries
            )
        except FileNotFoundError as error:
            raise SharedFolderError(
                f"{place} is not complete there: it has no {MANIFEST}; was it uploaded?"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise SharedFolderError(f"{place}/{MANIFEST}: cannot be read") from error
        if not sound:
            raise SharedFolderError(f"{place}/{MANIFEST}: names files that no adapter has")
        return entries

    def _open(self) -> tuple[Any, str]:
        """Return the file system and the path in it. Raises: SharedFolderError."""
        import fsspec

        try:
            system, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise SharedFolderError(f"adapters.url: {self.url}: {error}") from error
        return system, str(root).rstrip("/")

    def _do(self, verb: str, work: Callable[[], None]) -> None:
        """Raises: SharedFolderError for whatever the plugin raises."""
        try:
            work()
        except SharedFolderError:
            raise
        except Exception as error:  # a plugin has errors of its own for a network or a key
            why = f"{type(error).__name__}: {error}"[:300]
            raise SharedFolderError(f"an adapter cannot be {verb} {self.url}: {why}") from error


def shared_folders(settings: Settings) -> SharedFolders | None:
    """Return the folders of the settings `[adapters]`; None: there is no URL."""
    url, here = settings.adapters.url, settings.learner.adapters_dir
    return SharedFolders(url=url, adapters_dir=here) if url else None


def _hash(file: Any) -> tuple[int, str]:  # Any: a file of a plugin
    digest, size = hashlib.sha256(), 0
    with file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def share(settings: Settings, folder: Path, digest: str) -> None:
    """Upload a finished folder where `adapters.url` says so. Raises: SharedFolderError."""
    if (shared := shared_folders(settings)) is not None:
        shared.upload(folder, digest)


def on_this_machine(settings: Settings, parent: Parent) -> Parent:
    """Return the parent with its folder here, fetched if another machine made it. Raises:
    SharedFolderError; OSError."""
    shared = shared_folders(settings)
    if shared is None or parent.path is None or parent.digest is None:
        return parent
    return replace(parent, path=shared.local(parent.digest, str(parent.path)))
