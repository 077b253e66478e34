"""`sidecar store`: keys in a file, and a store that is encrypted with the newest."""

from __future__ import annotations

import sqlite3
import stat
import time
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest

from deploy.cli import store as store_commands
from ingest.store import rotation
from ingest.store.exchanges import dead_letter
from sidecar.store.database import Database
from sidecar.store.keyring import is_sealed, read_keys
from sidecar.store.models import DeadLetterRow
from support.disk_limits import other_group
from support.migrated_store import open_migrated
from tests.deploy.cli.conftest import Command


@pytest.fixture
def store(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    keys = f'[store]\nencryption_key_file = "{tmp_path}/keys"'
    config.write_text(config.read_text().replace("[store]", keys))
    return Command(config, capsys, "store")


def test_the_newest_key_stands_first_and_the_others_stay(store: Command, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert store("new-key", "--file", str(keys)) == 0
    (first,) = read_keys(keys.read_text())
    assert store("new-key", "--file", str(keys)) == 0

    held = read_keys(keys.read_text())
    assert list(held)[1:] == [first]
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "sidecar.toml"]


def test_a_file_of_something_else_is_not_changed(store: Command, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("buy milk\n")

    assert store("new-key", "--file", str(tmp_path / "notes")) == 1

    assert (tmp_path / "notes").read_text() == "buy milk\n"
    assert "nothing was changed" in store.err


def test_keys_that_are_made_at_once_are_all_in_the_file(
    store: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    assert store("new-key", "--file", str(keys)) == 0

    def read_slowly(text: str) -> dict[str, bytes]:
        time.sleep(0.05)
        return read_keys(text)

    monkeypatch.setattr(store_commands, "read_keys", read_slowly)
    makers = [Thread(target=store, args=("new-key", "--file", str(keys))) for _ in range(3)]
    for one in makers:
        one.start()
    for one in makers:
        one.join()

    assert len(read_keys(keys.read_text())) == 4


def test_the_file_keeps_its_mode_and_group_and_a_link_its_target(
    store: Command, tmp_path: Path
) -> None:
    keys, link = tmp_path / "keys", tmp_path / "link"
    assert store("new-key", "--file", str(keys)) == 0
    keys.chmod(0o640)
    group = other_group(keys)
    link.symlink_to(keys)

    assert store("new-key", "--file", str(link)) == 0

    assert link.is_symlink()
    assert len(read_keys(keys.read_text())) == 2
    assert (stat.S_IMODE(keys.stat().st_mode), keys.stat().st_gid) == (0o640, group)


def test_a_key_can_be_printed(store: Command) -> None:
    assert store("new-key") == 0
    assert len(read_keys(store.out)) == 1


def test_rotate_key_encrypts_the_store(store: Command, tmp_path: Path) -> None:
    with closing(open_migrated(tmp_path / "store.db")) as made, made.write() as session:
        dead_letter(session, b"what a user said", where="1", reason="why", now=1.0)
    store("new-key", "--file", str(tmp_path / "keys"))
    key = (tmp_path / "keys").read_text().partition(":")[2].strip()

    assert store("rotate-key") == 0
    assert key not in store.out + store.err
    with (
        closing(Database(f"sqlite:///{tmp_path}/store.db")) as database,
        database.read() as session,
    ):
        row = session.get(DeadLetterRow, 1)
    assert row is not None
    assert is_sealed(row.payload)

    (tmp_path / "keys").unlink()
    store("new-key", "--file", str(tmp_path / "keys"))  # the old one is lost
    assert store("rotate-key") == 1
    assert "1 value stays as it is: is encrypted with the key" in store.err


def test_rotate_key_says_when_a_reader_keeps_the_log(
    store: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_migrated(tmp_path / "store.db")) as made, made.write() as session:
        dead_letter(session, b"what a user said", where="1", reason="why", now=1.0)
    store("new-key", "--file", str(tmp_path / "keys"))
    waits: list[float] = []
    monkeypatch.setattr("sidecar.store.write_ahead.time.sleep", waits.append)
    monkeypatch.setattr(rotation, "LOG_WAIT_S", 0.1)
    rotate = ("rotate-key", "-o", "json")

    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM dead_letter").fetchone()
        assert store(*rotate) == 1
        assert (tmp_path / "store.db-wal").stat().st_size > 0

    assert '"log_emptied": false' in store.out
    assert "run `sidecar store rotate-key` again" in store.err
    assert waits, "it tries again before it gives up"
    assert store(*rotate) == 0
    assert '"log_emptied": true' in store.out
