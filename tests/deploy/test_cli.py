"""The `sidecar` command: exit codes, one-line errors, and what works without the admin API."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from deploy.cli import main
from ingest.store.database import Database
from ingest.store.models import AdapterRow, AliasRow, AuditRow


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sidecar.toml"
    path.write_text(
        f'[store]\nurl = "sqlite:///{tmp_path}/store.db"\n[admin]\nport = 9\n'
        '[serving]\nmodel = "m"\n'
    )
    return path


def test_sound_settings_exit_0(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config), "config", "check"]) == 0
    assert capsys.readouterr().out == "settings are sound\n"


def test_wrong_settings_exit_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[proxy]\nprot = 1\n")

    code = main(["--config", str(path), "status"])

    assert code == 2
    assert capsys.readouterr().err == (
        "sidecar: unknown setting proxy.prot; did you mean proxy.port?\n"
    )


def test_a_wrong_word_is_bad_use() -> None:
    assert main(["rolback"]) == 2


def test_an_absent_admin_api_is_one_line_with_what_to_do(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--config", str(config), "status"])

    assert code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is `sidecar up` running?" in error


def test_rollback_offline_needs_the_store_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()
    with database.write() as session:
        session.add(adapter_row("m--v1-0a0b0c0d0e0f", 1))
        session.add(
            AliasRow(model="m", alias="champion", adapter="m--v1-0a0b0c0d0e0f", generation=1)
        )
    arguments = ["--config", str(config), "rollback", "--to", "base", "--offline"]

    code = main([*arguments, "--reason", "night shift", "-o", "json"])

    assert code == 0
    assert json.loads(capsys.readouterr().out) == {"from": "m--v1-0a0b0c0d0e0f", "to": "base"}
    with database.read() as session:
        entries = [(row.action, row.reason) for row in session.query(AuditRow)]
    assert ("rollback", "night shift") in entries
    database.close()


def test_a_store_that_is_not_there_is_not_made(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(config), "rollback", "--to", "base", "--offline"]

    code = main([*arguments, "--reason", "x"])

    assert code == 1
    assert "no such file; check store.url" in capsys.readouterr().err
    assert not (tmp_path / "store.db").exists()


def test_settings_are_shown_without_passwords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sidecar.toml"
    path.write_text(
        '[store]\nurl = "postgresql://joe:s3cret@db/x"\n'
        '[engine]\ncommand = ["vllm"]\n[engine.env]\nHF_TOKEN = "s3cret"\n'
    )

    code = main(["--config", str(path), "config", "show"])

    shown = capsys.readouterr().out
    assert code == 0
    assert "s3cret" not in shown
    assert json.loads(shown)["engine"]["env"] == {"HF_TOKEN": "(set)"}


def test_rollback_to_an_unknown_version_exits_1(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()
    database.close()
    arguments = ["--config", str(config), "rollback", "--to", "v7", "--offline"]

    code = main([*arguments, "--reason", "x"])

    assert code == 1
    assert "v7" in capsys.readouterr().err


def test_lineage_reads_the_store_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()
    with database.write() as session:
        session.add(adapter_row("m--v1-0a0b0c0d0e0f", 1))
    database.close()

    code = main(["--config", str(config), "lineage", "v1"])

    assert code == 0
    assert "m--v1-0a0b0c0d0e0f" in capsys.readouterr().out


def adapter_row(name: str, version: int) -> AdapterRow:
    return AdapterRow(
        name=name,
        model="m",
        version=version,
        digest="d" * 64,
        path="/nowhere",
        parent="base",
        run_id=None,
        state="champion",
        reason=None,
        created_at=time.time(),
    )
