"""Immutable folders, digests, versions."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from learner.adapter_folder import CARD, CONFIG, LINEAGE, WEIGHTS, file_digest, folder_digest
from learner.errors import UnpublishedError
from learner.resume import PLACING, WorkFolder
from learner.runs.publish import find_published, place, register, replaced, seal, unplace, when_free
from sidecar.errors import StoreError
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AuditRow
from tests.learner.conftest import PutVersion


def test_a_finished_run_asks_a_store_that_is_away_for_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second once, and the last time when 600 s are over. The store comes back at 599 s."""
    now, back_at = 100.0, 699.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    def attempt() -> float:
        if now < back_at:
            raise StoreError("database is locked")
        return now

    monkeypatch.setattr(time, "monotonic", lambda: now)
    found = when_free(attempt, run_id="r1", files=tmp_path, pause=pause)
    assert found == 699.0

    now, back_at = 100.0, float("inf")
    with pytest.raises(UnpublishedError, match="trained and not published"):
        when_free(attempt, run_id="r1", files=tmp_path, pause=pause)
    assert now == 701.0


def write_folder(folder: Path, *, weights: bytes = b"weights", lineage: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(weights)
    (folder / LINEAGE).write_text(lineage)
    (folder / CARD).write_text("card")
    return folder


def test_the_digest_is_that_of_the_canonical_manifest(tmp_path: Path) -> None:
    # printf '{}' | sha256sum, printf 'weights' | sha256sum, then
    # printf '[{"path":"adapter_config.json","sha256":"44136f…","size":2},{…}]' | sha256sum
    assert folder_digest(write_folder(tmp_path / "a")) == (
        "43e8c3afa1d681974d0146ee7f763bb7c7c9932b88363313b4c9a90afd28e5ba"
    )


def test_a_sealed_folder_is_whole_and_read_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "adapters" / ".run-1")

    sealed = seal(folder)
    digest, path = sealed.digest, place(sealed, tmp_path / "adapters")

    assert path == tmp_path / "adapters" / digest
    assert path.is_absolute()
    assert {entry.name for entry in path.iterdir()} == {CONFIG, WEIGHTS, LINEAGE, CARD}
    assert folder_digest(path) == digest
    assert not folder.exists()
    assert all(os.stat(entry).st_mode & 0o777 == 0o444 for entry in path.iterdir())
    assert os.stat(path).st_mode & 0o777 == 0o555


def test_an_orphan_of_a_crash_is_replaced(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    place(seal(write_folder(adapters / ".run-1", lineage='{"run_id": "1"}')), adapters)

    path = place(seal(write_folder(adapters / ".run-2", lineage='{"run_id": "2"}')), adapters)

    assert (path / LINEAGE).read_text() == '{"run_id": "2"}'
    left = replaced(adapters / ".run-2")
    assert sorted(entry.name for entry in adapters.iterdir()) == [left.name, path.name]
    assert (left / LINEAGE).read_text() == '{"run_id": "1"}'


def test_what_a_run_placed_and_did_not_register_is_removed(
    database: Database, tmp_path: Path
) -> None:
    adapters = tmp_path / "adapters"
    work = WorkFolder(adapters, "r1")
    work.make()
    sealed = seal(write_folder(work.path / "adapter", lineage='{"run_id": "r1"}'))
    work.write(PLACING, sealed.digest)
    place(sealed, adapters)
    others = WorkFolder(adapters, "r2")
    others.make()
    others.write(PLACING, sealed.digest)

    with database.write() as session:
        unplace(session, others, adapters)
    assert (adapters / sealed.digest).is_dir(), "another run's folder is no orphan of this one"
    with database.write() as session:
        unplace(session, work, adapters)

    assert not (adapters / sealed.digest).exists()


def test_what_is_registered_stays(database: Database, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    work = WorkFolder(adapters, "r1")
    work.make()
    sealed = seal(write_folder(work.path / "adapter", lineage='{"run_id": "r1"}'))
    work.write(PLACING, sealed.digest)
    path = place(sealed, adapters)
    with database.write() as session:
        register(session, model="m", parent="base", run_id="r1", sealed=sealed, path=path, now=5.0)

    with database.write() as session:
        unplace(session, work, adapters)

    assert folder_digest(path) == sealed.digest


def test_a_folder_that_cannot_be_moved_leaves_nothing_under_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = tmp_path / "adapters"
    folder = write_folder(adapters / ".run-1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        place(seal(folder), adapters)

    assert [entry.name for entry in adapters.iterdir()] == [".run-1"]


@pytest.mark.both_stores
def test_the_next_version_gets_a_name_of_its_own_and_an_audit_row(
    database: Database, tmp_path: Path, put_version: PutVersion
) -> None:
    put_version(1)
    put_version(7, state="rejected")
    put_version(2**31 - 1, state="rejected")  # damage, which has no successor
    sealed = seal(write_folder(tmp_path / "adapters" / ".run-1"))
    digest, path = sealed.digest, place(sealed, tmp_path / "adapters")

    with database.write() as session:
        candidate = register(
            session,
            model="m",
            parent="base",
            run_id="r1",
            sealed=sealed,
            path=path,
            now=5.0,
        )

    assert candidate.adapter == f"m--v8-{digest[:12]}"
    assert (candidate.version, candidate.parent, candidate.path) == (8, "base", path)
    with database.read() as session:
        row = session.get(AdapterRow, candidate.adapter)
        assert row is not None
        assert (row.state, row.digest, row.path, row.run_id) == (
            "registered",
            digest,
            str(path),
            "r1",
        )
        (audit,) = session.scalars(select(AuditRow)).all()
        assert (audit.actor, audit.action, audit.subject) == (
            "learner",
            "adapter.registered",
            candidate.adapter,
        )
        assert audit.after["lineage_sha256"] == file_digest(path / LINEAGE)
        assert find_published(session, "m", digest) == candidate
        assert find_published(session, "other", digest) is None
