"""A backup is made while the store is written, and restores what it held, or says what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from deploy import backup
from deploy.backup import (
    MANIFEST,
    STORE,
    Backup,
    back_up,
    read_backup,
    refuse_other_owner,
    restore,
    store_file,
)
from deploy.cli.main import main
from deploy.errors import BackupError
from deploy.registry import versions
from learner.adapter_folder import PROBE, WEIGHTS, folder_digest
from learner.resume import remove_folder
from sidecar.store.database import Database
from tests.deploy.conftest import World


@pytest.fixture
def store(world: World) -> Path:
    """A store with a champion and another version; the world's own is on SQLite here."""
    world.promote(world.register(1))
    world.register(2)
    return store_file(world.database.url)


def champion(store: Path) -> str:
    with closing(Database(f"sqlite:///{store}")) as database, database.read() as session:
        return versions.aliases_of(session, "m")["champion"]


def folders(store: Path) -> list[Path]:
    with closing(sqlite3.connect(store)) as connection:
        rows = connection.execute("SELECT path FROM adapter_version ORDER BY version").fetchall()
    return [Path(path) for (path,) in rows]


def test_what_was_lost_and_altered_comes_back(world: World, store: Path, tmp_path: Path) -> None:
    kept, before = tmp_path / "kept", champion(store)
    made = back_up(store, kept)
    assert (len(made.adapters), made.missing) == (2, {})
    first, second = folders(store)
    digests = [folder_digest(first), folder_digest(second)]
    world.promote(world.register(3))
    assert champion(store) != before
    shutil.rmtree(first)
    (second / WEIGHTS).chmod(0o600)
    (second / WEIGHTS).write_bytes(b"other")
    world.database.close()

    (first.parent / ".restored-killed").mkdir(parents=True)

    restore(kept, store, now=lambda: 7.0)

    assert champion(store) == before
    assert not (first.parent / ".restored-killed").exists()
    with closing(sqlite3.connect(store)) as connection:
        query = "SELECT generation, json_extract(body, '$.generation') FROM routing_table"
        assert connection.execute(query).fetchall() == [(7, 7)]  # an open proxy takes it
    assert [folder_digest(first), folder_digest(second)] == digests
    assert len(folders(store)) == 2
    assert len(folders(store.with_name(f"{store.name}.before-7"))) == 3
    assert second.with_name(f"{second.name}.before-7").exists()


def test_a_backup_is_one_moment_of_a_store_that_is_written(store: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("CREATE TABLE pair (a INTEGER, b INTEGER)")
        connection.execute("INSERT INTO pair VALUES (0, 0)")
        connection.commit()
    stop = threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(store, timeout=30)) as writer:
            while not stop.is_set():
                writer.execute("UPDATE pair SET a = a + 1")
                writer.execute("UPDATE pair SET b = b + 1")
                writer.commit()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(5):
            back_up(store, tmp_path / str(number))
            with closing(sqlite3.connect(tmp_path / str(number) / "store.db")) as copy:
                [(a, b)] = copy.execute("SELECT a, b FROM pair").fetchall()
            assert a == b
    finally:
        stop.set()
        thread.join()


def test_backups_beside_each_other_share_the_files_of_adapters(store: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        back_up(store, tmp_path / "all" / name)

    weights = [*(tmp_path / "all").glob(f"*/adapters/*/{WEIGHTS}")]
    assert [one.stat().st_nlink for one in weights] == [2, 2]  # none is the live one
    assert read_backup(tmp_path / "all" / "two").missing == {}

    weights[0].chmod(0o600)
    weights[0].write_bytes(b"other")  # of both: they are one file
    made = back_up(store, tmp_path / "all" / "three")
    assert (len(made.adapters), made.missing) == (2, {})
    assert read_backup(tmp_path / "all" / "three") == made


def test_no_file_is_shared_with_live_adapters_or_a_backup_that_was_killed(
    store: Path, tmp_path: Path
) -> None:
    live = folders(store)[0]
    digest = folder_digest(live)
    for beside in (tmp_path / "state", tmp_path / "killed"):
        shutil.copytree(live, beside / "adapters" / digest)
    (tmp_path / "killed" / "adapters" / digest / "lineage.json").unlink(missing_ok=True)

    back_up(store, tmp_path / "kept")

    made = tmp_path / "kept" / "adapters" / digest
    assert {one.name for one in made.iterdir()} == {one.name for one in live.iterdir()}
    assert all(one.stat().st_nlink == 1 for one in made.iterdir())


def test_an_altered_adapter_is_left_out_and_named(store: Path, tmp_path: Path) -> None:
    first, second = folders(store)
    (first / WEIGHTS).chmod(0o600)
    (first / WEIGHTS).write_bytes(b"other")
    shutil.rmtree(second)

    made = back_up(store, tmp_path / "kept")

    assert made.adapters == {}
    assert "other bytes" in made.missing[str(first)]
    assert str(second) in made.missing
    assert read_backup(tmp_path / "kept") == made


def test_root_restores_no_store_of_another_user(
    world: World, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(store, tmp_path / "kept")
    world.database.close()
    link = tmp_path / "of a service" / "store.db"
    link.parent.mkdir()
    link.symlink_to(store)
    if os.geteuid() == 0:
        os.chown(store, 1234, -1)
        os.chown(link, 1234, -1, follow_symlinks=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    owner = store.stat().st_uid
    why = f"is of the user {owner}: restore as that one"

    with pytest.raises(BackupError, match=why):
        restore(tmp_path / "kept", store)
    with pytest.raises(BackupError, match=why):
        refuse_other_owner(link)
    if owner == 1234:
        os.chown(store, 0, -1)
        with pytest.raises(BackupError, match=f"{link} is of the user 1234"):
            restore(tmp_path / "kept", link)  # the file is root's, the link to it is not
        os.chown(link, 0, -1, follow_symlinks=False)
        os.chown(tmp_path, 1234, -1)
        refuse_other_owner(link.parent / "state" / "up.lock")  # only what is above is of another


def test_links_stay_and_none_is_followed(world: World, store: Path, tmp_path: Path) -> None:
    back_up(store, tmp_path / "kept")
    first, _ = folders(store)
    remove_folder(first)
    world.database.close()
    other, disk = tmp_path / "other", tmp_path / "disk.db"
    other.write_text("kept")
    store.rename(disk)
    store.symlink_to(disk)
    first.with_name(".restored-x").symlink_to(other)

    restore(tmp_path / "kept", store)

    assert other.read_text() == "kept"
    assert (store.is_symlink(), disk.is_symlink()) == (True, False)
    assert first.stat().st_mode & 0o777 == 0o555
    assert champion(store)


def test_an_adapter_without_its_config_comes_back(
    world: World, store: Path, tmp_path: Path
) -> None:
    back_up(store, tmp_path / "kept")
    first, second = folders(store)
    digests = [folder_digest(first), folder_digest(second)]
    remove_folder(first)
    remove_folder(second)
    first.mkdir()  # half of a deletion
    second.symlink_to(tmp_path / "gone")
    world.database.close()

    restore(tmp_path / "kept", store)

    assert [folder_digest(first), folder_digest(second)] == digests


def alter(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)


def test_the_files_beside_the_weights_are_kept_too(
    world: World, store: Path, tmp_path: Path
) -> None:
    first, second = folders(store)
    for folder in (first, second):
        folder.chmod(0o755)
        (folder / PROBE).write_text("sound")
    one, two = tmp_path / "all" / "one", tmp_path / "all" / "two"
    back_up(store, one)
    (first / PROBE).unlink()
    alter(second / PROBE, b"other")
    world.database.close()

    assert restore(one, store).missing == {}
    assert [(each / PROBE).read_text() for each in (first, second)] == ["sound", "sound"]

    for probe in one.glob(f"adapters/*/{PROBE}"):
        alter(probe, b"BROKEN")
    (tmp_path / "all" / "odd").mkdir()
    (tmp_path / "all" / "odd" / MANIFEST).write_text("[" * 100_000)
    assert back_up(store, two).missing == {}
    assert [each.read_text() for each in two.glob(f"adapters/*/{PROBE}")] == ["sound"]
    assert set(read_backup(one).missing) == {str(first), str(second)}


def test_a_backup_of_the_release_before_is_restored(
    world: World, store: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    made = asdict(back_up(store, kept))
    del made["others"]
    (kept / MANIFEST).write_text(json.dumps({**made, "version": 1}))
    world.database.close()

    assert len(restore(kept, store).adapters) == 2


def test_no_journal_of_another_store_is_played_back(
    world: World, store: Path, tmp_path: Path
) -> None:
    """Of a restore that was killed, and of a store that was lost."""
    back_up(store, tmp_path / "kept")
    before = champion(store)
    world.database.close()
    killed = store.with_name(".restored-killed")
    killed.mkdir()
    hot = hot_journal(tmp_path)
    for journal in (killed / f"{STORE}-journal", store.with_name(f"{store.name}-journal")):
        journal.write_bytes(hot)
    store.unlink()

    for number in (1, 2, 3):  # in one second
        restore(tmp_path / "kept", store, now=lambda: 7.0)
        assert champion(store) == before, number

    assert not killed.exists()
    assert store.with_name(f"{store.name}.before-7-journal").exists()
    assert store.with_name(f"{store.name}.before-8").exists()


def hot_journal(folder: Path) -> bytes:
    """That of a change which was not committed."""
    file = folder / "hot.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE other (one)")
        connection.execute("INSERT INTO other VALUES (randomblob(100000))")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("UPDATE other SET one = randomblob(100000)")
        return file.with_name("hot.db-journal").read_bytes()


def test_a_copy_is_never_readable_by_others(store: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    back_up(store, kept)
    assert (kept / STORE).stat().st_mode & 0o777 == 0o600


def test_a_backup_by_a_newer_release_changes_nothing(
    world: World, store: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    made = back_up(store, kept)
    world.database.close()
    with closing(sqlite3.connect(kept / STORE)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    told = {**asdict(made), "store_sha256": hashlib.sha256((kept / STORE).read_bytes()).hexdigest()}
    (kept / MANIFEST).write_text(json.dumps(told))
    before = store.read_bytes()

    with pytest.raises(BackupError, match="a newer release made the store"):
        restore(kept, store)

    assert store.read_bytes() == before


@pytest.fixture
def kept(store: Path, tmp_path: Path) -> Path:
    back_up(store, tmp_path / "kept")
    return tmp_path / "kept"


def test_a_backup_that_is_not_whole_changes_nothing(world: World, store: Path, kept: Path) -> None:
    world.database.close()
    before = store.read_bytes()

    def refused(why: str) -> None:
        with pytest.raises(BackupError, match=why):
            restore(kept, store)
        assert store.read_bytes() == before

    manifest = (kept / backup.MANIFEST).read_text()
    for text in ("{", "[]", json.dumps({"made_at": 1})):
        (kept / backup.MANIFEST).write_text(text)
        refused("no whole backup")
    (kept / backup.MANIFEST).write_text(manifest.replace('"version": 2', '"version": 3'))
    refused("another release")
    (kept / backup.MANIFEST).write_text(manifest)
    whole = (kept / "store.db").read_bytes()
    (kept / "store.db").write_bytes(whole + b"x")
    refused("was changed")
    (kept / "store.db").write_bytes(whole)
    (kept / backup.MANIFEST).write_text(manifest.replace(str(folders(store)[0]), "/etc"))
    refused("does not name")
    for text in (
        manifest.replace('"adapters": {', '"adapters": [{'),
        manifest.replace('"others": {', '"others": null, "was": {'),
        "[" * 100_000,
    ):
        (kept / backup.MANIFEST).write_text(text)
        refused("no whole backup")


def test_a_damaged_adapter_keeps_nothing_else_from_being_restored(
    world: World, store: Path, kept: Path
) -> None:
    before = champion(store)
    weights = next((kept / "adapters").iterdir()) / WEIGHTS
    weights.chmod(0o600)
    weights.write_bytes(b"x")
    world.promote(world.register(3))
    world.database.close()

    made = restore(kept, store)

    assert champion(store) == before
    assert made.adapters == {}
    assert all("other bytes" in why for why in made.missing.values())


def test_what_is_no_adapter_is_never_moved(
    world: World, store: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that names another folder as an adapter's: a forged backup, or another machine's."""
    first, _ = folders(store)
    shutil.rmtree(first)
    first.mkdir()
    (first / "precious").touch()
    world.database.close()

    with pytest.raises(BackupError, match="no folder of an adapter"):
        restore(kept, store)

    assert (first / "precious").exists()
    with monkeypatch.context() as patch:
        forged = Backup(**{**asdict(read_backup(kept)), "adapters": {f"{first}/../x": "0"}})
        patch.setattr("deploy.backup.read_backup", lambda _: forged)
        with pytest.raises(BackupError, match="no folder of an adapter"):
            restore(kept, store)


def test_a_full_disk_ends_a_backup(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deploy.backup.shutil.copy2", full)
    with pytest.raises(BackupError, match="No space left"):
        back_up(store, tmp_path / "kept")
    with pytest.raises(BackupError, match="no whole backup"):
        read_backup(tmp_path / "kept")


def test_a_store_that_is_open_elsewhere_is_not_replaced(
    world: World, store: Path, kept: Path
) -> None:
    world.database.close()
    with closing(sqlite3.connect(store)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN")
        other.execute("SELECT COUNT(*) FROM adapter_version").fetchall()
        with pytest.raises(BackupError, match="open in another process"):
            restore(kept, store)
    restore(kept, store)


def test_a_damaged_store_is_replaced_and_never_backed_up(
    world: World, store: Path, kept: Path, tmp_path: Path
) -> None:
    before = champion(store)
    world.database.close()
    store.write_bytes(b"\0" * 4096)

    with pytest.raises(BackupError):
        back_up(store, tmp_path / "other")
    restore(kept, store)

    assert champion(store) == before


@pytest.mark.parametrize("url", ["postgresql://u@h/d", "sqlite://", "sqlite:///file:x?uri=true"])
def test_another_store_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(BackupError, match="pg_dump"):
        store_file(url)


def test_the_commands(
    world: World, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.database.close()
    config = tmp_path / "sidecar.toml"
    state = tmp_path / "state"
    config.write_text(f'state_dir = "{state}"\n[store]\nurl = "sqlite:///{store}"\n')
    kept = tmp_path / "kept"

    def run(*words: str) -> tuple[int, str]:
        code = main(["--config", str(config), "store", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert run("backup", str(kept))[0] == 0
    code, said = run("backup", str(kept))
    assert code == 1
    assert said.endswith(f"{kept} is not empty; give a new folder for each backup\n")
    code, said = run("restore", str(kept), "-o", "json")
    assert (code, json.loads(said)["adapters"]) == (0, 2)
    assert run("restore", str(tmp_path / "none"))[0] == 1
