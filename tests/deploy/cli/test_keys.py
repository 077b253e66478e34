"""`sidecar keys`: made and shown once, listed without secrets, revoked, all of it in the audit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from deploy.cli.main import main
from sidecar.access.key_source import KeySource
from sidecar.access.keys import secret_hash
from sidecar.metrics.proxy import Metrics
from sidecar.routing.source import StoreWatch
from sidecar.store.database import Database
from sidecar.store.models import ApiKeyRow, AuditRow
from support.migrated_store import open_migrated
from tests.deploy.cli.conftest import Command


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = open_migrated(tmp_path / "store.db")
    yield database
    database.close()


@pytest.fixture
def keys(config: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    with config.open("a") as file:
        file.write('[access]\nmode = "keys"\n')
    return Command(config, capsys, "keys")


def test_no_store_is_made_in_a_folder_that_has_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its key would be in a store that no proxy reads."""
    monkeypatch.chdir(tmp_path)
    create = ["keys", "create", "--project", "shop"]

    code = main(create)

    err = capsys.readouterr().err
    assert code == 1
    assert f"{tmp_path}/sidecar.toml" in err
    assert "sqlite:///.sidecar/store.db" in err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "sidecar.toml").write_text('[access]\nmode = "keys"\n')
    assert main(create) == 0, "also before the first `sidecar up`"


def test_a_key_is_shown_when_it_is_made_and_never_again(keys: Command, database: Database) -> None:
    made = keys.json("create", "--project", "shop", "--name", "till 3")
    said = keys.err
    listed = keys.json("ls")

    assert made["key"].startswith(f"sk-sidecar-{made['key_id']}-")
    assert said == ("sidecar: the key is shown only now; the store keeps its hash\n")
    assert made["key"] not in json.dumps(listed)
    with database.read() as session:
        row = session.scalars(select(ApiKeyRow)).one()
        assert row.secret_hash == secret_hash(made["key"].encode())
        audit = session.scalars(select(AuditRow)).one()
        stored = {column.name: getattr(row, column.name) for column in row.__table__.columns}
    secret = made["key"].rpartition(made["key_id"])[2]
    assert secret not in repr(stored)
    assert secret not in repr(audit.after)
    assert row.secret_hash not in repr(audit.after)
    assert (audit.action, audit.subject, audit.actor) == (
        "key.created",
        made["key_id"],
        "sidecar keys",
    )


def test_every_option_is_kept_and_listed(keys: Command, database: Database) -> None:
    before = time.time()
    keys.json(
        *("create", "--project", "shop", "--name", "n", "--scope", "operate", "--expires", "30d"),
        *("--rpm", "60", "--tokens-per-day", "5000000000", "--best-of", "4"),
    )
    [listed] = keys.json("ls")["items"]
    after = time.time()

    assert before + 30 * 86_400 <= listed.pop("expires_at") <= after + 30 * 86_400
    assert before <= listed.pop("created_at") <= after
    assert listed.pop("key_id")
    assert listed == {
        "project": "shop",
        "name": "n",
        "scopes": ["infer", "operate"],
        "requests_per_minute": 60,
        "tokens_per_day": 5_000_000_000,
        "best_of_max": 4,
        "state": "active",
        "revoked_at": None,
    }


def test_the_proxy_finds_what_the_command_made_and_sees_it_revoked(
    keys: Command, database: Database
) -> None:
    source = KeySource(Metrics())
    watch = StoreWatch(database.url, (source,), poll_s=1.0)
    made = keys.json("create", "--project", "shop", "--rpm", "7")
    with capture_logs():
        watch.poll()
    assert source.ring is not None
    before = source.ring.find(made["key"].encode())

    keys.json("revoke", made["key_id"], "--reason", "it leaked")
    with capture_logs():
        watch.poll()
    after = source.ring.find(made["key"].encode())
    watch.stop()

    assert before is not None
    assert (before.project, before.requests_per_minute, before.revoked) == ("shop", 7, False)
    assert after is not None
    assert after.revoked


def test_revoking_is_once_and_in_the_audit(keys: Command, database: Database) -> None:
    made = keys.json("create", "--project", "shop")

    first = keys.json("revoke", made["key_id"], "--reason", "it leaked")
    second = keys.json("revoke", made["key_id"])

    assert first == second
    [listed] = keys.json("ls")["items"]
    assert (listed["state"], listed["revoked_at"]) == ("revoked", first["revoked_at"])
    with database.read() as session:
        revoked = session.scalars(select(AuditRow).where(AuditRow.action == "key.revoked")).all()
    assert [(row.subject, row.reason) for row in revoked] == [(made["key_id"], "it leaked")]


def test_a_whole_key_may_be_pasted_to_revoke_it_and_is_not_repeated(
    keys: Command, database: Database
) -> None:
    made = keys.json("create", "--project", "shop")
    secret = made["key"].rpartition(made["key_id"])[2]

    assert keys("revoke", made["key"]) == 0
    assert secret not in keys.out + keys.err
    assert keys("revoke", "sk-sidecar-ffffffffffff" + secret) == 1
    assert secret not in keys.out + keys.err
    assert keys.err == "sidecar: no key has this id; `sidecar keys ls` lists the ids\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--project", "a b"), "project 'a b' is not a name"),
        (("--project", "p", "--scope", "fly"), "scope 'fly' does not exist"),
        (
            ("--project", "p", "--expires", "soon"),
            "--expires soon: not a length of time; give a number and m, h, d or w",
        ),
        (("--project", "p", "--expires", "0d"), "--expires 0d"),
        (("--project", "p", "--rpm", "0"), "requests per minute: 0 lets nothing through"),
        (("--project", "p", "--best-of", "9"), "best of 9"),
    ],
)
def test_what_makes_no_sense_exits_2_with_one_line(
    arguments: tuple[str, ...], message: str, keys: Command, database: Database
) -> None:
    assert keys("create", *arguments) == 2
    assert message in keys.err
    assert keys.err.count("\n") == 1
    assert keys.json("ls")["items"] == []


@pytest.mark.parametrize("arguments", [("ls",), ("revoke", "abc")])
def test_otherwise_a_store_that_is_not_there_is_not_made(
    arguments: tuple[str, ...], keys: Command, tmp_path: Path
) -> None:
    assert keys(*arguments) == 1

    assert "no such file; check store.url" in keys.err
    assert not (tmp_path / "store.db").exists()


def test_a_key_that_nobody_will_ask_for_yet_is_said(
    keys: Command, config: Path, database: Database
) -> None:
    config.write_text(config.read_text().replace('mode = "keys"', 'mode = "open"'))

    assert keys("create", "--project", "shop") == 0

    assert 'access.mode is "open", so no key is checked; set it to "keys"' in keys.err


def test_expired_keys_are_listed_as_such(keys: Command, database: Database) -> None:
    made = keys.json("create", "--project", "shop", "--expires", "1m")
    with database.write() as session:
        row = session.get(ApiKeyRow, made["key_id"])
        assert row is not None
        row.expires_at = time.time() - 1.0

    [listed] = keys.json("ls")["items"]

    assert listed["state"] == "expired"
