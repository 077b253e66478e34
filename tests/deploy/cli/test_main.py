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
from tests.deploy.cli.conftest import Command

ROLLBACK = ("rollback", "--to", "base", "--offline", "--reason")


def test_sound_settings_exit_0(sidecar: Command) -> None:
    assert sidecar("config", "check") == 0
    assert sidecar.out == "settings are sound\n"
    assert "judge.model is empty, so no group is sampled or scored" in sidecar.err
    assert "serving.base_model_path is empty, so no training run can start" in sidecar.err


def test_wrong_settings_exit_2_with_one_line(sidecar: Command, config: Path) -> None:
    config.write_text("[proxy]\nprot = 1\n")

    assert sidecar("status") == 2
    assert sidecar.err == "sidecar: unknown setting proxy.prot; did you mean proxy.port?\n"


def test_an_absent_admin_api_is_one_line_with_what_to_do(sidecar: Command) -> None:
    assert sidecar("status") == 1
    assert sidecar.err.count("\n") == 1
    assert "is `sidecar up` running?" in sidecar.err


def test_rollback_offline_needs_the_store_alone(sidecar: Command, tmp_path: Path) -> None:
    database = store_with_champion(tmp_path)

    assert sidecar.json(*ROLLBACK, "night shift") == {
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
    sidecar: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "m--v1-0a0b0c0d0e0f"
    database = open_migrated(tmp_path / "store.db")
    with database.write() as session:
        session.add(AliasRow(model="m", alias="champion", adapter=name, generation=1))
        session.add(adapter_row(name, 1))
    add_revision(tmp_path / "migrations", monkeypatch)

    assert sidecar(*ROLLBACK, "x") == 0

    with database.read() as session:
        rows = [(row.action, row.source) for row in session.query(AuditRow)]
    assert ("rollback", "") in rows
    assert database.revision() == LATER
    database.close()


def test_settings_are_shown_without_passwords(sidecar: Command, config: Path) -> None:
    config.write_text(
        '[store]\nurl = "postgresql://joe:s3cret@db/x"\n'
        '[engine]\ncommand = ["vllm", "--api-key", "s3cret"]\n[engine.env]\nHF_TOKEN = "s3cret"\n'
        '[judge]\napi_key = "s3cret"\nparams = {api_key = "s3cret", temperature = 0.5}\n'
        f'[admin]\ntokens = ["{"5e" * 32}"]\n'
    )

    assert sidecar("config", "show") == 0
    assert "s3cret" not in sidecar.out
    assert "5e5e" not in sidecar.out
    assert json.loads(sidecar.out)["engine"]["env"] == {"HF_TOKEN": "(set)"}


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


def test_what_people_wrote_reaches_the_terminal_without_escape_codes(
    sidecar: Command, config: Path
) -> None:
    changes = [f"canary {one} c1" for one in ("pause", "resume", "promote", "abort", "wait")]
    reads = ["status", "rollback --reason x", "adapters show v1", "canary watch c1"]
    with admin_api(config, {"items": [RECORD], **RECORD}):
        for command in (*reads, *changes):
            sidecar(*command.split())
            assert "evil" in sidecar.out + sidecar.err, command
            assert not obeys(sidecar.out), command
            assert not obeys(sidecar.err), command


def test_json_output_escapes_them_and_keeps_the_text(sidecar: Command, config: Path) -> None:
    record = {"reason": ESCAPES + "\x7f"}

    with admin_api(config, record):
        sidecar("status", "-o", "json")

    assert not obeys(sidecar.out)
    assert sidecar.out.isascii()
    assert json.loads(sidecar.out) == record


def test_an_error_that_quotes_escape_codes_is_one_harmless_line(
    sidecar: Command, config: Path
) -> None:
    with admin_api(config, {"items": []}):
        config.write_text(config.read_text() + '"\\u001b[31m" = 1\n')
        assert sidecar("status") == 2

    assert sidecar.err.count("\n") == 1
    assert not obeys(sidecar.err)


def test_lineage_shows_reasons_without_escape_codes(sidecar: Command, tmp_path: Path) -> None:
    database = store_with_adapter(tmp_path)
    with database.write() as session:
        canary = transitions.begin(
            session, model="m", candidate="m--v1-0a0b0c0d0e0f", steps=(1,), now=1.0, actor="t"
        )
        row = session.get_one(CanaryRow, canary.canary_id)
        transitions.abort(session, row, reason=ESCAPES, now=2.0, actor="t")
    database.close()

    assert sidecar("lineage", "v1") == 0
    assert "evil" in sidecar.out
    assert not obeys(sidecar.out)
    assert "\nchampion: evil" not in sidecar.out


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
    sidecar: Command, tmp_path: Path
) -> None:
    for command in (
        ["rollback", "--offline", "--reason", "\udcff", "--to", "base"],
        ["adapters", "show", "\ud800"],
    ):
        assert sidecar(*command) == 2
        assert sidecar.err == "sidecar: an argument is not valid UTF-8; type it again\n"
    assert not (tmp_path / "store.db").exists()


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
    sidecar: Command, command: str, expected: str
) -> None:
    assert sidecar.said(*command.split()) == (2, "", expected)


@pytest.mark.parametrize("command", ["rollback", "rollback --offline", "canary pause"])
def test_a_blank_reason_is_bad_use(sidecar: Command, command: str) -> None:
    assert sidecar(*command.split(), "--reason", "  ") == 2

    assert "is blank; say why" in sidecar.err


def test_a_reason_longer_than_the_api_takes_is_bad_use(sidecar: Command) -> None:
    assert sidecar("canary", "abort", "--reason", "x" * (MAX_REASON + 1)) == 2

    assert "has 2,001 characters; at most 2,000 are kept" in sidecar.err
    with pytest.raises(ValidationError):
        changes.ReasonIn(reason="x" * (MAX_REASON + 1))


def test_a_rollback_is_not_refused_for_a_long_reason(sidecar: Command, tmp_path: Path) -> None:
    database = store_with_champion(tmp_path)

    assert sidecar(*ROLLBACK, "x" * 100_000) == 0

    assert "of 100,000 characters the first 1,999 are kept" in sidecar.err
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
def test_a_time_that_has_no_champion_is_bad_use(sidecar: Command, at: str, said: str) -> None:
    assert sidecar("adapters", "ls", "--at", at) == 2
    assert said in sidecar.err
