"""`sidecar exchanges`: list, show, export."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text, update
from sqlalchemy.orm import Session

from ingest.feedback.deriving import save_feedback
from ingest.feedback.signals import Signal
from ingest.feedback.store import save_signals
from ingest.grouping.selection import group_id_of
from ingest.records import Answer, Group
from ingest.store import listing
from ingest.store.exchanges import save_exchange
from ingest.store.groups import mark_sampled, mark_scored, save_group
from sidecar.routing.session_key import session_key
from sidecar.store.database import Database
from sidecar.store.keyring import Keyring
from sidecar.store.models import ExchangeRow, GroupRow
from support.disk_limits import full_disk
from support.ingest_kit import make_exchange, make_feedback, message
from support.migrated_store import open_migrated
from tests.deploy.cli.conftest import Command

Run = Callable[..., tuple[int, str, str]]
"""`sidecar exchanges ...`: exit status, output, errors."""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = open_migrated(tmp_path / "store.db")
    yield database
    database.close()


@pytest.fixture
def run(sidecar: Command) -> Run:
    return partial(sidecar.said, "exchanges")


def save(database: Database, number: int, *, held_out: bool = False, **changes: object) -> None:
    request = {"messages": [{"role": "user", "content": f"question {number}"}]}
    exchange = make_exchange(
        f"e{number}", **{"request": request, "session_key": f"s{number % 2}", **changes}
    )
    with database.write() as session:
        save_exchange(session, exchange, held_out=held_out, now=1000.0 + number)


def test_the_newest_are_listed_over_pages_and_by_session(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE", 2)
    for number in range(5):
        save(database, number)

    code, out, said = run("ls", "--limit", "4")
    _, _, of_all = run("ls", "--limit", "6")
    _, of_one, _ = run("ls", "--session", "s1", "-o", "json")

    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["e4", "e3", "e2", "e1"]
    assert "'question 4'" in out
    assert "the newest 4 are shown, and there may be more" in said
    assert of_all == ""
    assert [one["exchange_id"] for one in json.loads(of_one)] == ["e3", "e1"]


def test_a_session_is_listed_and_exported_by_its_second_name(
    database: Database, run: Run, tmp_path: Path
) -> None:
    for number, key in enumerate(("h:one", "h:two", "h:other")):
        save(database, number, session_key=key)
        score(database, f"e{number}", (0.2, 0.8))
    for table in (ExchangeRow, GroupRow):
        with database.write() as session:
            here = table.exchange_id.in_(["e0", "e1"])
            session.execute(update(table).where(here).values(session_id="h:one"))

    listed = json.loads(run("ls", "--session", "h:two", "-o", "json")[1])
    exported = run("export", "--form", "art", "--session", "h:two")[1].splitlines()

    assert [one["exchange_id"] for one in listed] == ["e1", "e0"]
    assert len(exported) == 2
    assert run("ls", "--session", "h:three")[1] == ""
    for name in ("one", "two"):
        listed = json.loads(run("ls", "--session", name, "-o", "json")[1])
        assert [one["exchange_id"] for one in listed] == ["e1", "e0"]


def test_a_session_is_listed_by_the_name_that_the_client_sent(database: Database, run: Run) -> None:
    long = "x" * 300
    keys = [
        session_key(header=header, user="", project=project)
        for header, project in (
            ("task-7", "default"),
            ("task-7", "shop"),
            ("mail/task-7", "default"),
            (long, "shop"),
        )
    ]
    for number, key in enumerate(keys):
        save(database, number, session_key=key)

    def listed(name: str) -> list[str]:
        return [
            one["exchange_id"] for one in json.loads(run("ls", "--session", name, "-o", "json")[1])
        ]

    assert listed("task-7") == listed(keys[0]) == ["e0"]
    assert listed("shop/task-7") == listed(keys[1]) == ["e1"]
    assert listed("mail/task-7") == listed("default/mail/task-7") == ["e2"]
    assert listed(f"shop/{long}") == ["e3"]
    assert listed("mail/task-8") == []


def test_a_rare_value_is_looked_for_a_window_of_rows_at_a_time(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transaction over the whole table would last as long as the table is large."""
    monkeypatch.setattr(listing, "WINDOW", 3)
    for number in range(11):
        save(database, number, user="ann" if number in (1, 2, 9) else "bob")
    begun: list[Database] = []
    read = Database.read

    def counted(store: Database) -> AbstractContextManager[Session]:
        begun.append(store)
        return read(store)

    monkeypatch.setattr(Database, "read", counted)

    _, out, _ = run("ls", "--user", "ann")
    passes = len(begun)
    _, newest, _ = run("ls", "--user", "ann", "--limit", "1")

    assert [line.split()[0] for line in out.splitlines()] == ["e9", "e2", "e1"]
    assert passes == 5, "four windows of three rows, and the end"
    assert newest.split()[0] == "e9"
    assert len(begun) == passes + 1


def test_one_is_shown_with_its_messages_and_answers(database: Database, run: Run) -> None:
    save(database, 1, user="ann\x1b[2J")

    code, out, _ = run("show", "e1")

    assert code == 0
    assert "--- asked: user\nquestion 1\n--- answer 0 (stop): assistant\nserved\n" in out
    assert "\x1b" not in out
    record = out.partition("---")[0]
    assert "\nheld_out: false\n" in record
    assert not any(python in record for python in ("None", "False", "{"))
    assert run("show", "e9") == (
        1,
        "",
        "sidecar: no exchange e9; `sidecar exchanges ls` names them\n",
    )


def test_what_is_known_of_the_tools_since_the_last_answer_is_shown(
    database: Database, run: Run
) -> None:
    results = [{"role": "tool", "content": one} for one in ("Done.", "Error: no money", "Done.")]
    said = {"role": "assistant", "content": "Wait."}
    request = {"messages": [results[1], said, *results]}
    with database.write() as session:
        save_exchange(session, make_exchange("e1", request=request), held_out=False, now=1.0)

    assert "\ntools: 1 failed, 2 unknown\n" in run("show", "e1")[1]
    assert json.loads(run("show", "e1", "-o", "json")[1])["tools"] == "1 failed, 2 unknown"


def tell(database: Database, exchange_id: str) -> None:
    records = [
        make_feedback("f1", exchange_id, label="wrong", score=-1.0),
        make_feedback("o1", exchange_id, kind="outcome", score=None, success=False, cost=0.5),
    ]
    signal = Signal(
        kind="retry", exchange_id=exchange_id, by_id="e2", session_id="s1", at=3.0, evidence={}
    )
    with database.write() as session:
        save_feedback(session, records, now=1.0)
        save_signals(session, [signal])


def test_what_was_told_of_an_exchange_is_shown_and_exported(database: Database, run: Run) -> None:
    save(database, 1)
    tell(database, "e1")

    _, out, _ = run("show", "e1")
    _, lines, _ = run("export")
    _, row, _ = run("export", "--form", "trl-sft")

    for word in ("feedback: ", "score -1.0", "label wrong", "outcome: ", "cost 0.5", "signal: "):
        assert word in out
    whole, summary = json.loads(lines), json.loads(row)
    assert [one["score"] for one in whole["feedback"]] == [-1.0]
    assert [one["success"] for one in whole["outcomes"]] == [False]
    assert [one["by_id"] for one in whole["signals"]] == ["e2"]
    assert (summary["feedback_score"], summary["success"]) == (-1.0, False)
    assert (summary["reward"], summary["signals"]) == (None, ["retry"])


def test_an_export_is_a_private_file_without_held_out_sessions(
    database: Database, run: Run, tmp_path: Path
) -> None:
    save(database, 1)
    save(database, 2, held_out=True)
    save(database, 3, surface="responses")
    out = tmp_path / "sft.jsonl"

    code, _, err = run("export", "--form", "trl-sft", "--out", str(out))

    (row,) = map(json.loads, out.read_text().splitlines())
    assert code == 0
    assert row["prompt"] == [{"role": "user", "content": "question 1"}]
    assert err == "sidecar: wrote 1 line, 1 left out (not in this form)\n"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert run("export", "--out", str(out))[0] == 1
    assert len(run("export", "--held-out")[1].splitlines()) == 3


def test_scored_groups_are_exported(database: Database, run: Run) -> None:
    save(database, 1)
    save(database, 2)
    for number, scores in ((1, (0.2, 0.8)), (2, (0.5, 0.5))):
        score(database, f"e{number}", scores)

    _, art, _ = run("export", "--form", "art")
    _, pairs, err = run("export", "--form", "trl-preference")

    rewards = [
        [one["reward"] for one in json.loads(line)["trajectories"]] for line in art.splitlines()
    ]
    assert rewards == [[0.5, 0.5], [0.2, 0.8]]
    assert [json.loads(line)["chosen"][0]["content"] for line in pairs.splitlines()] == ["b"]
    assert "1 left out" in err


def score(database: Database, exchange_id: str, scores: tuple[float, float]) -> None:
    group_id = group_id_of(exchange_id)
    answers = tuple(
        Answer(index=i, origin="sampled", message=message(word), finish_reason="stop")
        for i, word in enumerate("ab")
    )
    with database.write() as session:
        save_group(
            session,
            Group(
                group_id=group_id,
                exchange_id=exchange_id,
                session_key="s",
                adapter="base",
                request=b"",
                prompt_token_ids=(),
                answers=answers,
            ),
            now=1.0,
        )
        mark_sampled(session, group_id)
        mark_scored(
            session,
            group_id,
            scores=scores,
            explanations=("", ""),
            judge_model="j",
            rubric_hash="h",
            now=2.0,
        )


def test_a_damaged_record_is_named_and_the_others_are_written(database: Database, run: Run) -> None:
    for number in range(3):
        save(database, number)
    score(database, "e0", (0.1, 0.9))
    with database.write() as session:
        session.execute(text("UPDATE exchange SET request_body = X'00' WHERE exchange_id = 'e1'"))

    code, out, err = run("export")

    assert code == 0
    assert [json.loads(line)["exchange_id"] for line in out.splitlines()] == ["e2", "e0"]
    assert "left out: exchange e1 is damaged" in err
    assert run("show", "e1")[0] == 1
    with database.write() as session:
        session.execute(update(GroupRow).values(exchange_id="e1"))
    _, groups, group_error = run("export", "--form", "art")
    assert groups == ""
    assert "left out: group " in group_error


def test_a_missing_key_is_said_as_such(tmp_path: Path, run: Run) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    open_migrated(tmp_path / "store.db").close()
    with closing(Database(url, Keyring({"old": b"o" * 32}))) as sealed:
        save(sealed, 1)
        score(sealed, "e1", (0.1, 0.9))
    with closing(Database(url)) as plain:
        save(plain, 2)
    out = tmp_path / "out.jsonl"
    said = "exchange e1 is encrypted with the key 'old', which is missing; add it to store."

    listed, shown = run("ls"), run("show", "e1")
    code, _, err = run("export", "--out", str(out))

    assert listed[0] == 0
    assert listed[1].startswith("e2 ")
    assert shown[0] == 1
    assert code == 1
    assert [json.loads(line)["exchange_id"] for line in out.read_text().splitlines()] == ["e2"]
    assert "wrote 1 line, 1 left out (their key is missing)" in err
    assert all(said in one for one in (listed[2], shown[2], err))
    assert "damaged" not in listed[2] + shown[2] + err
    code, rows, err = run("export", "--form", "art")
    assert (code, rows) == (1, "")
    assert "is encrypted with the key 'old', which is missing" in err
    assert "damaged" not in err


def test_an_export_on_a_full_disk_is_one_line_and_leaves_no_half(
    database: Database, run: Run, tmp_path: Path
) -> None:
    for number in range(9):
        save(database, number)
    out = tmp_path / "out.jsonl"

    with full_disk():
        code, _, err = run("export", "--out", str(out))

    assert code == 1
    assert "cannot be written (File too large), and no part of it is kept" in err
    assert not out.exists()
    assert run("export", "--out", str(out))[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "--form", "csv"),
        ("ls", "--since", "yesterday"),
        ("export", "--form", "art", "--user", "x"),
    ],
)
def test_what_is_not_known_is_refused(
    database: Database, run: Run, arguments: tuple[str, ...]
) -> None:
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert err.count("\n") == 1
