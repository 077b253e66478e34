"""`sidecar forget` as an operator meets it: what it asks, says and ends with."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ingest.feedback.deriving import save_feedback
from ingest.store.exchanges import save_exchange
from sidecar.capture.outbox import Outbox
from sidecar.store import traces
from sidecar.store.database import Database
from sidecar.store.keyring import Keyring
from support.ingest_kit import make_exchange, make_feedback
from support.migrated_store import open_migrated
from tests.deploy.cli.conftest import Command

Run = Callable[..., tuple[int, str, str]]
"""`sidecar forget ...`: exit status, output, errors."""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = open_migrated(tmp_path / "store.db")
    yield database
    database.close()


@pytest.fixture
def run(config: Path, sidecar: Command, tmp_path: Path) -> Run:
    settings = f'state_dir = "{tmp_path}"\n{config.read_text()}[bus]\nurl = '
    config.write_text(f'{settings}"sqlite:///{tmp_path}/outbox.db"\n')
    return partial(sidecar.said, "forget")


def save(database: Database, name: str, user: str) -> None:
    with database.write() as session:
        assert save_exchange(session, make_exchange(name, user=user), held_out=False, now=1.0)


def test_it_ends_with_0_when_all_is_gone_also_when_it_runs_again(
    database: Database, run: Run
) -> None:
    save(database, "e1", "alice.walrus")

    first, again = run("--user", "alice.walrus", "--yes"), run("--user", "alice.walrus", "--yes")

    assert (first[0], again[0]) == (0, 0)
    assert "Removed: 1 exchange, " in first[1]
    assert "Nothing was found" not in first[1]
    assert again[1].startswith("Nothing was found of the user alice.walrus")


def test_it_ends_with_1_while_a_record_on_the_bus_cannot_be_read(
    database: Database, run: Run, tmp_path: Path
) -> None:
    outbox = Outbox(tmp_path / "outbox.db", max_rows=10, keyring=Keyring({"k": b"k" * 32}))
    outbox.write([make_exchange("waits", user="alice.walrus")])
    outbox.close()

    text, as_json = (
        run("--user", "alice.walrus", "--yes"),
        run("--user", "alice.walrus", "--yes", "-o", "json"),
    )

    assert (text[0], as_json[0]) == (1, 1)
    assert "Not removed yet: 1 record on the bus" in text[1]
    assert json.loads(as_json[1])["traces"] != []


def test_a_user_who_only_gave_feedback_was_found(database: Database, run: Run) -> None:
    with database.write() as session:
        save_feedback(session, [make_feedback("fb_1", source="user:alice.walrus")], now=1.0)

    code, out, _ = run("--user", "alice.walrus", "--yes")

    assert code == 0
    assert out.startswith("Removed: 0 exchanges, 0 groups, 1 record of feedback")


def test_a_session_of_several_callers_is_refused_with_its_numbers(
    database: Database, run: Run
) -> None:
    for number, user in enumerate(("ann", "ann", "bob")):
        exchange = make_exchange(f"e{number}", user=user, session_key="shared")
        with database.write() as session:
            assert save_exchange(session, exchange, held_out=False, now=1.0)

    code, _, said = run("--session", "shared", "--yes")

    assert code == 2
    assert "holds 3 exchanges of 2 callers" in said
    assert "Removed: 3 exchanges" in run("--session", "shared", "--yes", "--all-callers")[1]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1, "1 line of {} holds the name: it is blanked, whoever it is about."),
        (5, "5 lines of {} hold the name: they are blanked, whoever they are about."),
    ],
)
def test_it_asks_before_it_blanks_lines_of_others_that_hold_the_name(
    database: Database,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    said: str,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = [f'{{"model": "smollm", "said": "{said}"}}\n' for said in range(number)]
    export = tmp_path / "exported.jsonl"
    export.write_text("".join(lines) + '{"model": "another"}\n')
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))

    code, out, _ = run("--user", "smollm")

    assert code == 1
    assert said.format(export) in out
    assert export.read_text().startswith(lines[0])


def test_a_second_run_that_finds_nothing_does_not_ask_for_the_file_to_be_rewritten(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "REWRITTEN_BYTES", 0)
    with database.write() as session:
        named = make_exchange("e1", session_key="h:task-7")
        assert save_exchange(session, named, held_out=False, now=1.0)

    codes = [run("--session", "task-7", "--yes", *more)[0] for more in ((), ("--vacuum",), ())]

    assert codes == [1, 0, 0]
