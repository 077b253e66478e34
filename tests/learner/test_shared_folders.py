"""Adapter folders at a URL: complete or absent there, verified here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from learner.adapter_folder import CARD, CONFIG, LINEAGE, WEIGHTS, folder_digest
from learner.errors import SharedFolderError
from learner.shared_folders import MANIFEST, SharedFolders


def make_folder(folder: Path) -> str:
    folder.mkdir(parents=True)
    for name, body in ((CONFIG, "{}"), (WEIGHTS, "w" * 100), (LINEAGE, "{}"), (CARD, "# card")):
        (folder / name).write_text(body)
    return folder_digest(folder)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def shared(tmp_path: Path, bucket: Path) -> SharedFolders:
    return SharedFolders(url=f"file://{bucket}", adapters_dir=tmp_path / "here")


FETCH = """
import sys
from pathlib import Path
from learner.shared_folders import SharedFolders
shared = SharedFolders(url=sys.argv[1], adapters_dir=Path(sys.argv[2]))
print(shared.local(sys.argv[3], "/not/here"))
"""


def test_another_process_fetches_what_was_uploaded(
    shared: SharedFolders, bucket: Path, tmp_path: Path
) -> None:
    digest = make_folder(tmp_path / "made")
    shared.upload(tmp_path / "made", digest)
    arguments = [shared.url, str(tmp_path / "there"), digest]

    done = subprocess.run(
        [sys.executable, "-c", FETCH, *arguments], capture_output=True, text=True, check=True
    )

    folder = Path(done.stdout.strip())
    assert folder == tmp_path / "there" / digest
    assert folder_digest(folder) == digest
    assert sorted(one.name for one in folder.iterdir()) == sorted([CONFIG, WEIGHTS, LINEAGE, CARD])
    assert folder.stat().st_mode & 0o777 == 0o555
    assert (folder / WEIGHTS).stat().st_mode & 0o777 == 0o444
    assert [one.name for one in (tmp_path / "there").iterdir()] == [digest]


def test_a_store_of_objects_holds_it_too(tmp_path: Path) -> None:
    shared = SharedFolders(url="memory://bucket/adapters", adapters_dir=tmp_path / "here")
    digest = make_folder(tmp_path / "made")

    shared.upload(tmp_path / "made", digest)

    assert folder_digest(shared.local(digest, "/not/here")) == digest
    shared.remove(digest)
    assert not fsspec.filesystem("memory").exists(f"/bucket/adapters/{digest}/{MANIFEST}")


def test_a_folder_that_is_on_this_machine_is_not_fetched(
    shared: SharedFolders, tmp_path: Path
) -> None:
    digest = make_folder(tmp_path / "made")

    assert shared.local(digest, str(tmp_path / "made")) == tmp_path / "made"


@pytest.mark.parametrize("left", [[], [CONFIG], [CONFIG, WEIGHTS, LINEAGE, CARD]])
def test_an_upload_that_was_killed_is_read_by_nobody_and_written_again(
    shared: SharedFolders, bucket: Path, tmp_path: Path, left: list[str]
) -> None:
    digest = make_folder(tmp_path / "made")
    (bucket / digest).mkdir(parents=True)
    for name in left:
        (bucket / digest / name).write_bytes(b"half")

    with pytest.raises(SharedFolderError, match="is not complete there"):
        shared.local(digest, "/not/here")
    shared.upload(tmp_path / "made", digest)

    assert folder_digest(shared.local(digest, "/not/here")) == digest


def test_a_changed_file_is_not_taken(shared: SharedFolders, bucket: Path, tmp_path: Path) -> None:
    digest = make_folder(tmp_path / "made")
    shared.upload(tmp_path / "made", digest)
    (bucket / digest / WEIGHTS).write_text("x" * 100)

    with pytest.raises(SharedFolderError, match="is not what was written"):
        shared.local(digest, "/not/here")

    assert list((tmp_path / "here").iterdir()) == []


def test_other_files_under_its_own_manifest_are_not_taken(
    shared: SharedFolders, bucket: Path, tmp_path: Path
) -> None:
    digest = make_folder(tmp_path / "made")
    make_folder(tmp_path / "other")
    (tmp_path / "other" / WEIGHTS).write_text("evil")
    shared.upload(tmp_path / "other", digest)

    with pytest.raises(SharedFolderError, match="the files of another adapter"):
        shared.local(digest, "/not/here")


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b'{"files": [{"path": "../../x", "size": 1, "sha256": ""}]}',
        b'{"files": [{"path": "evil.bin", "size": 1, "sha256": ""}]}',
        b'{"files": [{"path": "README.md", "size": "many", "sha256": ""}]}',
    ],
)
def test_a_hostile_manifest_is_refused(
    shared: SharedFolders, bucket: Path, tmp_path: Path, body: bytes
) -> None:
    digest = make_folder(tmp_path / "made")
    shared.upload(tmp_path / "made", digest)
    (bucket / digest / MANIFEST).write_bytes(body)

    with pytest.raises(SharedFolderError, match=r"manifest\.json"):
        shared.local(digest, "/not/here")


def test_an_upload_that_comes_out_changed_has_no_manifest(
    shared: SharedFolders, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = make_folder(tmp_path / "made")

    def loses(self: object, source: str, target: str, **_: object) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:-1])

    monkeypatch.setattr(type(fsspec.filesystem("file")), "put_file", loses)

    with pytest.raises(SharedFolderError, match="came out changed"):
        shared.upload(tmp_path / "made", digest)

    assert not (bucket / digest / MANIFEST).exists()


@pytest.mark.parametrize(
    ("url", "words"), [("s3://bucket/a", "s3fs"), ("nothing://x/y", "Protocol not known")]
)
def test_a_url_without_its_plugin_says_what_to_install(
    tmp_path: Path, url: str, words: str
) -> None:
    with pytest.raises(SharedFolderError, match=words):
        SharedFolders(url=url, adapters_dir=tmp_path).local("a" * 64, "/not/here")


class Buckets(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Paths begin with a bucket, as in s3fs (2026.9): `makedirs` makes a bucket that is missing,
    and an object of a missing bucket is refused."""

    protocol = "buckets"
    store: ClassVar[dict[str, Any]] = {}
    made: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("buckets://").strip("/")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.made.add(path.partition("/")[0])

    def exists(self, path: str, **_: Any) -> bool:
        return path in self.store

    def put_file(self, here: str, path: str, **_: Any) -> None:
        self.pipe_file(path, Path(here).read_bytes())

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if path.partition("/")[0] not in self.made:
            raise FileNotFoundError("The specified bucket does not exist")
        self.store[path] = MemoryFile(self, path, value)


@pytest.mark.parametrize("bucket_name", ["mine", "mistyped"])
def test_a_bucket_that_does_not_exist_is_refused_and_not_made(
    tmp_path: Path, bucket_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("buckets", Buckets, clobber=True)
    monkeypatch.setattr(Buckets, "store", {})
    monkeypatch.setattr(Buckets, "made", {"mine"})
    digest = make_folder(tmp_path / "made")
    shared = SharedFolders(url=f"buckets://{bucket_name}/pre", adapters_dir=tmp_path / "here")

    if bucket_name == "mine":
        shared.upload(tmp_path / "made", digest)
        assert f"mine/pre/{digest}/{MANIFEST}" in Buckets.store
    else:
        with pytest.raises(SharedFolderError, match="bucket does not exist"):
            shared.upload(tmp_path / "made", digest)
    assert Buckets.made == {"mine"}
