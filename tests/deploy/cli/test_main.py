"""The `sidecar` command: exit codes, one-line errors, and what works without the admin API."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import ValidationError

from deploy.admin import changes
from deploy.cli.main import main
from deploy.records import MAX_REASON
from deploy.registry import transitions
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AliasRow, AuditRow, CanaryRow
from support.migrated_store import LATER, add_revision, open_migrated


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
    out, told = capsys.readouterr()
    assert out == "settings are sound\n"
    assert "judge.model is empty, so no group is sampled or scored" in told
    assert "serving.base_model_path is empty, so no training run can start" in told


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
    database = store_with_champion(tmp_path)
    arguments = ["--config", str(config), "rollback", "--to", "base", "--offline"]

    code = main([*arguments, "--reason", "night shift", "-o", "json"])

    assert code == 0
    assert json.loads(capsys.readouterr().out) == {
        "from": "m--v1-0a0b0c0d0e0f",
        "to": "base",
        "changed": True,
        "ended_canary": None,
        "banned": ["m--v1-0a0b0c0d0e0f"],
        "learner_paused": True,
    }
    with database.read() as session:
        entries = [(row.action, row.reason) for row in session.query(AuditRow)]
    assert ("rollback", "night shift") in entries
    database.close()


def test_rollback_offline_works_on_the_store_of_an_older_version(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "m--v1-0a0b0c0d0e0f"
    database = open_migrated(tmp_path / "store.db")
    with database.write() as session:
        session.add(AliasRow(model="m", alias="champion", adapter=name, generation=1))
        session.add(adapter_row(name, 1))
    add_revision(tmp_path / "migrations", monkeypatch)
    arguments = ["--config", str(config), "rollback", "--to", "base", "--offline"]

    assert main([*arguments, "--reason", "x"]) == 0

    with database.read() as session:
        rows = [(row.action, row.source) for row in session.query(AuditRow)]
    assert ("rollback", "") in rows
    assert database.revision() == LATER
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
        '[engine]\ncommand = ["vllm", "--api-key", "s3cret"]\n[engine.env]\nHF_TOKEN = "s3cret"\n'
        '[judge]\napi_key = "s3cret"\nparams = {api_key = "s3cret", temperature = 0.5}\n'
        f'[admin]\ntokens = ["{"5e" * 32}"]\n'
    )

    code = main(["--config", str(path), "config", "show"])

    shown = capsys.readouterr().out
    assert code == 0
    assert "s3cret" not in shown
    assert "5e5e" not in shown
    assert json.loads(shown)["engine"]["env"] == {"HF_TOKEN": "(set)"}


ESCAPES = "\x1b[2J\x9b31m\u202eevil\x07\nchampion: evil"


def obeys(text: str) -> bool:
    """True when a terminal would act upon something in the text, beside the end of a line."""
    return not all(line.isprintable() for line in text.split("\n"))


@contextlib.contextmanager
def admin_api(config: Path, record: object) -> Iterator[None]:
    """An admin API that answers everything with one record, or in text with a line of escapes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = self.headers["accept"] == "text/plain"
            body = f"reason: {ESCAPES}\n".encode() if text else json.dumps(record).encode()
            self.send_response(200)
            self.send_header("content-type", "text/plain" if text else "application/json")
            self.send_header("x-sidecar-notes", json.dumps([ESCAPES]))
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", '"g1"')
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        port = server.server_address[1]
        config.write_text(config.read_text().replace("port = 9", f"port = {port}"))
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


RECORD = {
    "reason": ESCAPES,
    "canary_id": ESCAPES,
    "state": "promoted",
    ESCAPES: {"deep": ESCAPES, "list": [ESCAPES], "records": [{"x": ESCAPES}]},
}


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "audit",
        "rollback --reason x",
        "adapters ls",
        "adapters show v1",
        "canary get c1",
        "canary pause c1",
        "canary resume c1",
        "canary promote c1",
        "canary abort c1",
        "canary wait c1",
        "canary watch c1",
    ],
)
def test_what_people_wrote_reaches_the_terminal_without_escape_codes(
    config: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with admin_api(config, {"items": [RECORD], **RECORD}):
        main(["--config", str(config), *command.split()])

    shown = capsys.readouterr()
    assert "evil" in shown.out + shown.err
    assert not obeys(shown.out)
    assert not obeys(shown.err)


def test_json_output_escapes_them_and_keeps_the_text(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"reason": ESCAPES + "\x7f"}

    with admin_api(config, record):
        main(["--config", str(config), "status", "-o", "json"])

    shown = capsys.readouterr().out
    assert not obeys(shown)
    assert shown.isascii()
    assert json.loads(shown) == record


def test_an_error_that_quotes_escape_codes_is_one_harmless_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with admin_api(config, {"items": []}):
        config.write_text(config.read_text() + '"\\u001b[31m" = 1\n')
        code = main(["--config", str(config), "status"])

    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert not obeys(error)


def test_lineage_shows_reasons_without_escape_codes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = store_with_adapter(tmp_path)
    with database.write() as session:
        canary = transitions.begin(
            session, model="m", candidate="m--v1-0a0b0c0d0e0f", steps=(1,), now=1.0, actor="t"
        )
        row = session.get_one(CanaryRow, canary.canary_id)
        transitions.abort(session, row, reason=ESCAPES, now=2.0, actor="t")
    database.close()

    assert main(["--config", str(config), "lineage", "v1"]) == 0

    shown = capsys.readouterr().out
    assert "evil" in shown
    assert not obeys(shown)
    assert "\nchampion: evil" not in shown


def test_key_names_are_listed_without_escape_codes(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create = ["--config", str(config), "keys", "create", "--project", "p", "--name", "\x1b[2J"]

    main(create)
    main(["--config", str(config), "keys", "ls"])

    shown = capsys.readouterr()
    assert not obeys(shown.out)
    assert not obeys(shown.err)


@pytest.mark.tier_2
def test_a_terminal_of_another_encoding_loses_no_key(config: Path) -> None:
    command = ["keys", "create", "--project", "p", "--name", "\u6f22"]

    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", "--config", config, *command],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("key: ")
    assert "name: \\u6f22\n" in done.stdout


def test_an_argument_that_is_no_utf8_is_bad_use_and_changes_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["rollback", "--offline", "--reason", "\udcff", "--to", "base"],
        ["adapters", "show", "\ud800"],
    ):
        assert main(["--config", str(config), *command]) == 2
        assert capsys.readouterr().err == (
            "sidecar: an argument is not valid UTF-8; type it again\n"
        )
    assert not (tmp_path / "store.db").exists()


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


def store_with_champion(folder: Path) -> Database:
    database = store_with_adapter(folder)
    with database.write() as session:
        session.add(
            AliasRow(model="m", alias="champion", adapter="m--v1-0a0b0c0d0e0f", generation=1)
        )
    return database


def store_with_adapter(folder: Path) -> Database:
    """A new store in which one adapter is registered."""
    database = Database(f"sqlite:///{folder}/store.db")
    database.upgrade()
    with database.write() as session:
        session.add(adapter_row("m--v1-0a0b0c0d0e0f", 1))
    return database


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


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("frobnicate", "sidecar: No such command 'frobnicate'; see `sidecar --help`\n"),
        ("rollback", "sidecar: Missing option '--reason'; see `sidecar rollback --help`\n"),
        ("status --nope", "sidecar: No such option: --nope; see `sidecar status --help`\n"),
        (
            "keys create --project a --rpm 99999999999999999999",
            "sidecar: Invalid value for '--rpm': Input should be less than or equal to "
            "9007199254740992; see `sidecar keys create --help`\n",
        ),
    ],
)
def test_a_usage_error_is_one_line_that_names_the_help(
    capsys: pytest.CaptureFixture[str], command: str, expected: str
) -> None:
    assert main(command.split()) == 2

    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", expected)


@pytest.mark.parametrize(
    "command", ["rollback", "rollback --offline", "canary pause", "canary abort", "keys revoke k"]
)
@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_reason_is_bad_use(
    capsys: pytest.CaptureFixture[str], command: str, blank: str
) -> None:
    assert main([*command.split(), "--reason", blank]) == 2

    assert "'--reason': is blank; say why" in capsys.readouterr().err.replace(
        "--reason:", "'--reason':"
    )


@pytest.mark.parametrize("command", ["canary abort", "keys revoke k"])
def test_a_reason_longer_than_the_api_takes_is_bad_use(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([*command.split(), "--reason", "x" * (MAX_REASON + 1)]) == 2

    assert "has 2,001 characters; at most 2,000 are kept" in capsys.readouterr().err
    with pytest.raises(ValidationError):
        changes.ReasonIn(reason="x" * (MAX_REASON + 1))


def test_a_rollback_is_not_refused_for_a_long_reason(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = store_with_champion(tmp_path)
    arguments = ["--config", str(config), "rollback", "--to", "base", "--offline"]

    assert main([*arguments, "--reason", "x" * 100_000]) == 0

    assert "of 100,000 characters the first 1,999 are kept" in capsys.readouterr().err
    with database.read() as session:
        (kept,) = [row.reason for row in session.query(AuditRow) if row.action == "rollback"]
    assert kept == "x" * 1_999 + "…"
    database.close()


@pytest.mark.parametrize("command", ["", "canary"])
def test_a_command_without_its_subcommand_prints_its_help(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(command.split()) == 2

    assert capsys.readouterr().err.startswith(f"Usage: sidecar {command}".rstrip() + " [OPTIONS]")


@pytest.mark.parametrize(
    ("at", "said"), [("1900-01-01", "is before 1970"), ("yesterday", "is no time")]
)
def test_a_time_that_has_no_champion_is_bad_use(
    config: Path, capsys: pytest.CaptureFixture[str], at: str, said: str
) -> None:
    code = main(["--config", str(config), "adapters", "ls", "--at", at])

    assert code == 2
    assert said in capsys.readouterr().err
