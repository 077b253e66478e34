"""`sidecar forget` on both stores: nothing is left in any file, and lineage tells of it."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from sqlalchemy import inspect, select, text, update

from deploy import forgetting
from deploy.forgetting import Report, Target, forget
from deploy.registry import versions
from deploy.registry.lineage import render_lineage, trace_lineage
from ingest.best_of import BestOfScores, save_scores
from ingest.feedback.deriving import save_feedback
from ingest.intake.choose import Sessions
from ingest.intake.consume import consume
from ingest.judges.replies import ReplyStore
from ingest.retention.sweep import Sweeper
from ingest.ruler.calls import save_judge_calls
from ingest.ruler.judge import JudgeReply
from ingest.ruler.ruler import JudgeCall
from ingest.sessions.messages import Place
from ingest.store.exchanges import dead_letter, load_exchange, save_exchange
from learner.errors import RunStoppedError
from learner.runs.publish import Sealed, register
from learner.runs.runs import end_run
from sidecar.capture.outbox import Outbox, OutboxReader
from sidecar.errors import StoreError
from sidecar.feedback import Feedback, encode_feedback
from sidecar.forwarding.sender import DeadLetters
from sidecar.records import Exchange, encode_exchange
from sidecar.routing.session_key import session_key
from sidecar.settings import Bus, Retention, Serving, Settings, Store
from sidecar.store import traces
from sidecar.store.contents import load_contents
from sidecar.store.database import Database, compress
from sidecar.store.keyring import BUS, Keyring
from sidecar.store.models import (
    AdapterRow,
    AliasRow,
    AnswerRow,
    CanaryRow,
    ExchangeRow,
    FeedbackRow,
    GateComparisonRow,
    GroupRow,
    RehearsalRow,
    SignalRow,
)
from support.finished_run import finished_run
from support.ingest_kit import Kit, kit, packed
from support.planted import plant, repeated

__all__ = ["kit"]
pytestmark = pytest.mark.both_stores
MARKER = "Zq7PurpleWalrusXv"
NOW = 2_000.0
MODEL = "smollm"
USER = f"user-{MARKER}@example.org"
SESSION = f"h:task-{MARKER}"
TRACE = "7" * 32
LONG_KEY = session_key(header="x" * 300, user="", project="shop")
KEYRING = Keyring({"k": b"k" * 32})


@pytest.fixture
def settings(kit: Kit, tmp_path: Path) -> Settings:
    return Settings(
        state_dir=tmp_path,
        serving=Serving(model=MODEL),
        bus=Bus(url=f"sqlite:///{tmp_path}/outbox.db"),
        store=Store(url=kit.database.url),
    )


@pytest.fixture
def of_sqlite(store_kind: str) -> None:
    if store_kind != "sqlite":
        pytest.skip("of SQLite's files")


def marked(kit: Kit, name: str, turn: int, **changes: object) -> Exchange:
    """A turn of the forgotten user: the marker stands in the prompt, the reply and a tool call."""
    messages: list[dict[str, object]] = [{"role": "system", "content": "Be kind. " * 100}]
    for number in range(turn + 1):
        messages.append({"role": "user", "content": f"{MARKER} asks {number}. " * 50})
        messages.append({"role": "assistant", "content": f"{MARKER} is told {number}. " * 50})
    reply = messages.pop()
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": f'"{MARKER}"'}}
    choice = kit.choice(message=json.dumps({**reply, "tool_calls": [call]}).encode())
    return kit.exchange(
        f"{name}{turn}",
        request={"model": MODEL, "messages": messages, "user": USER},
        choices=(choice,),
        **{"user": USER, "session_key": SESSION, "trace_id": TRACE, **changes},
    )


def place(name: str, parent: str | None, session: str) -> Place:
    return Place(
        exchange_id=name,
        session=session,
        parent=parent,
        turn=0,
        branch=0,
        segment=0,
        how="answered" if parent else "root",
    )


def judge_call(words: str) -> JudgeCall:
    return JudgeCall(
        judge_model="j", order_seed=1, attempt=0, error=words, reply=JudgeReply(text=words)
    )


def fill(kit: Kit, settings: Settings) -> None:
    """The marker wherever the sidecar keeps what somebody said."""
    kit.choose(marked(kit, "a", 0), kit.exchange("other", user="bob"))
    with kit.database.write() as session:
        for turn in (1, 2, 3):
            here = place(f"a{turn}", f"a{turn - 1}", SESSION)
            assert save_exchange(
                session, marked(kit, "a", turn), held_out=False, now=3.0, place=here
            )
    for name, status, adapter in (("a0", "trained", "v1"), ("other", "trained", "v2")):
        learned(kit, name, status, adapter)
    with kit.database.write() as session:
        group = session.scalars(select(GroupRow).where(GroupRow.exchange_id == "a0")).one()
        session.add(
            AnswerRow(
                group_id=group.group_id,
                index=1,
                origin="sampled",
                message_body=compress(json.dumps({"content": f"{MARKER} sampled"}).encode()),
                token_ids=b"",
                logprobs=b"",
                temperature=1.0,
                score=1.0,
                explanation=f"{MARKER} is praised",
            )
        )
        for subject in (group.group_id, "c-1", "probe"):
            save_judge_calls(session, subject, [judge_call(MARKER)], rubric_hash="r", now=4.0)
        answer = {
            "arm": "candidate",
            "adapter": "v1",
            "content": MARKER,
            "short": False,
            "score": 1.0,
        }
        canary(session, "v1", "promoted", created_at=5.0)
        session.flush()
        session.add(
            GateComparisonRow(
                comparison_id="c-1",
                canary_id="canary-v1",
                exchange_id="a1",
                status="scored",
                difference=0.5,
                answers=[{**answer, "explanation": MARKER, "tool_calls": [MARKER]}],
            )
        )
        save_scores(
            session,
            BestOfScores(
                exchange_id="a2",
                at=1.0,
                answers_digest="d",
                scores=(1.0,),
                explanations=(MARKER,),
                judge_model="j",
                rubric_hash="r",
            ),
        )
    replies = ReplyStore(kit.database, max_bytes=10**6, max_age_s=1e9, clock=lambda: 4.0)
    for digest, owner in (("d1", "a0"), ("d2", "a1"), ("d3", ""), ("d4", "other")):
        words = "of another" if owner == "other" else MARKER
        replies.keep(digest, owner, JudgeReply(text=words))
    with kit.database.write() as session:
        dead_letter(
            session, b"\xc1" + f"{USER} {SESSION}".encode(), where="1", reason="unreadable", now=4.0
        )
        dead_letter(session, b"of somebody else", where="2", reason="unreadable", now=4.0)
    tell(kit)
    outbox = Outbox(settings.state_dir / "outbox.db", max_rows=100, keyring=kit.database.keyring)
    outbox.write([marked(kit, "drained", 0)])
    reader = OutboxReader(settings.state_dir / "outbox.db")
    reader.delete_through(1)
    outbox.write([kit.exchange("waits", user="bob"), marked(kit, "b", 0), kit.exchange("waits2")])
    told = [feedback("5", target="a1"), feedback("6", target="other", comment="of another")]
    outbox.append([(one.feedback_id, encode_feedback(one)) for one in told])
    aside = DeadLetters(settings.state_dir / "dead-letters.db")
    for row in reader.read(0, 10):
        aside.keep(row, "too large")
    reader.close()
    outbox.close()
    logs = settings.state_dir / "logs"
    logs.mkdir()
    lines = ["started", f"judge failed {USER} {SESSION}", "event exchange_id=a1 said=" + MARKER]
    (logs / "score.log").write_text("\n".join([*lines, "ended", ""]))
    export = {"exchange_id": "a0", "request": MARKER}
    (settings.state_dir / "export.jsonl").write_text(f'{json.dumps(export)}\n{{"id": "other"}}\n')


def tell(kit: Kit) -> None:
    """Feedback and signals with the marker, joined to its exchanges or not."""
    with kit.database.write() as session:
        conflicts = save_feedback(
            session,
            [
                feedback("1", target="a1"),
                feedback("2", target="a2", project="of-another"),
                feedback("3", target_kind="session", target="a0"),
                feedback("4", target_kind="trace", target=TRACE, project="of-another"),
                feedback("7", target="other", comment="of another"),
                feedback("8", target="b0"),  # its exchange waits on the bus
            ],
            now=4.0,
        )
        assert conflicts == []
        # Joined to the session by an exchange that is in another one by now.
        moved = update(FeedbackRow).where(FeedbackRow.feedback_id == "fb_3")
        session.execute(moved.values(exchange_id="other", session_id=SESSION))
        for name, by_id, where in (
            ("a1", "a2", SESSION),
            ("other", "a3", "elsewhere"),
            ("left", None, SESSION),
        ):
            session.add(
                SignalRow(
                    exchange_id=name,
                    kind="correction",
                    session_id=where,
                    by_id=by_id,
                    at=1.0,
                    evidence={"rule": MARKER},
                )
            )
        session.add(
            SignalRow(
                exchange_id="other",
                kind="retry",
                session_id="elsewhere",
                by_id="other",
                at=1.0,
                evidence={},
            )
        )


def feedback(name: str, **changes: Any) -> Feedback:
    plain = Feedback(
        feedback_id=f"fb_{name}",
        kind="feedback",
        target_kind="exchange",
        target="other",
        project="default",
        received_at=1.0,
        comment=f"{MARKER} is told",
    )
    return msgspec.structs.replace(plain, **changes)


def learned(
    kit: Kit, exchange_id: str, status: str, adapter: str | None, parent: str = "base"
) -> None:
    """Give the exchange's group to a run, which makes an adapter of it or is at work."""
    run_id = f"run-{exchange_id}"
    with kit.database.write() as session:
        status_of_run = "finished" if adapter else "running"
        run = finished_run(run_id, status=status_of_run, heartbeat_at=NOW, parent=parent)
        run.model, run.adapter = MODEL, adapter
        session.add(run)
        where = GroupRow.exchange_id == exchange_id
        session.execute(update(GroupRow).where(where).values(run_id=run_id, status=status))
        if adapter:
            version(session, adapter, parent, run_id)


def version(  # type: ignore[no-untyped-def]
    session, name: str, parent: str, run_id: str | None = None, folder: Path = Path(__file__).parent
) -> None:
    session.add(
        AdapterRow(
            name=name,
            model=MODEL,
            version=int(name[1:]),
            digest=name * 10,
            path=str(folder),
            parent=parent,
            run_id=run_id,
            state="registered",
            created_at=float(name[1:]),
        )
    )
    session.flush()


def canary(session, name: str, state: str, created_at: float) -> None:  # type: ignore[no-untyped-def]
    session.add(
        CanaryRow(
            canary_id=f"canary-{name}",
            model=MODEL,
            candidate=name,
            champion="base",
            state=state,
            salt="s",
            created_at=created_at,
            step_started_at=1.0,
            evidence={"steps": [10_000]},
        )
    )


def three_champions(kit: Kit) -> None:
    """v1 to v3, promoted one after the other."""
    with kit.database.write() as session:
        for number, name in enumerate(("v1", "v2", "v3")):
            canary(session, name, "promoted", created_at=float(number))
        session.add(AliasRow(model=MODEL, alias="champion", adapter="v3", generation=1))


def do(kit: Kit, settings: Settings, kind: str, name: str, **more: object) -> Report:
    return forget(kit.database, settings, Target(kind, name), now=NOW, **more)  # type: ignore[arg-type]


def names(kit: Kit) -> set[str]:
    with kit.database.read() as session:
        return set(session.scalars(select(ExchangeRow.exchange_id)))


def decoded(value: object) -> Iterator[bytes]:
    """A value, and what it is decompressed; decrypted, if it is a record of the bus."""
    data = value if isinstance(value, bytes) else str(value).encode()
    with suppress(ValueError):
        data = KEYRING.open(data, BUS)
    yield data
    for decode in (zlib.decompress, zstandard.ZstdDecompressor().decompress):
        try:
            yield decode(data)
        except (zlib.error, zstandard.ZstdError):
            continue


def values_with_the_marker(kit: Kit) -> list[str]:
    """Every place in the rows of the store that holds the marker, decoded or not."""
    needle = MARKER.encode()
    found = []
    with kit.database.read() as session:
        tables = inspect(session.connection()).get_table_names()
        for table in tables:
            for row in session.execute(text(f'SELECT * FROM "{table}"')).mappings():
                found += [
                    f"{table}.{column}"
                    for column, value in row.items()
                    if any(needle in one for one in decoded(value))
                ]
        ids = session.scalars(select(ExchangeRow.exchange_id)).all()
        contents = load_contents(session, ids)
        assert contents.damage == {}
        found += [
            f"{one}.request" for one, what in contents.found.items() if needle in what.request
        ]
    return found


def told_of(kit: Kit) -> tuple[list[str], list[tuple[str, str]]]:
    """The feedback and the signals that the store holds."""
    with kit.database.read() as session:
        signals = session.execute(select(SignalRow.exchange_id, SignalRow.kind)).all()
        ids = session.scalars(select(FeedbackRow.feedback_id)).all()
    return list(ids), [(name, kind) for name, kind in signals]


def files_with_the_marker(folder: Path) -> set[str]:
    needles = [MARKER.encode(), MARKER.encode("utf-16-le")]
    return {
        path.name
        for path in folder.rglob("*")
        if path.is_file() and any(needle in path.read_bytes() for needle in needles)
    }


@pytest.mark.parametrize(
    ("kind", "name", "encrypted"),
    [("user", USER, False), ("session", SESSION[2:], False), ("user", USER, True)],
)
def test_no_byte_of_what_was_said_is_left(
    kit: Kit, settings: Settings, store_kind: str, kind: str, name: str, encrypted: bool
) -> None:
    if encrypted:
        kit = Kit(Database(kit.database.url, KEYRING))
    fill(kit, settings)
    found = set(values_with_the_marker(kit))
    assert len(found) >= 10
    assert {"feedback.comment", "signal.evidence", "dead_letter.payload"} <= found
    plain = {"score.log", "export.jsonl"}
    if not encrypted:
        plain |= {"outbox.db", "dead-letters.db"}
    assert plain <= files_with_the_marker(settings.state_dir)

    report = do(kit, settings, kind, name)

    assert values_with_the_marker(kit) == []
    assert files_with_the_marker(settings.state_dir) == set()
    assert names(kit) == {"other"}
    assert (report.exchanges, report.groups, report.on_the_bus) == (4, 1, 4)
    assert told_of(kit) == (["fb_7"], [("other", "retry")])
    assert report.dead_letters == 1
    assert report.traces == []
    assert (report.notes == []) == (store_kind == "sqlite")
    log = (settings.state_dir / "logs" / "score.log").read_text().split("\n")
    assert (log[0], log[1].strip(), log[2].strip(), log[3]) == ("started", "", "", "ended")
    with closing(OutboxReader(settings.state_dir / "outbox.db")) as reader:
        assert [row.exchange_id for row in reader.read(0, 10)] == ["waits", "waits2", "fb_6"]
    if encrypted:
        kit.database.close()


@pytest.mark.usefixtures("of_sqlite")  # PostgreSQL keeps the types of its columns
def test_damaged_rows_are_forgotten_with_the_others(kit: Kit, settings: Settings) -> None:
    fill(kit, settings)
    for table, column, name in (("exchange", "timings", "a0"), ("choice", "finish_reason", "a1")):
        plant(kit.database, table, column, f"exchange_id = '{name}'")

    repeated(lambda: do(kit, settings, "user", USER))

    assert names(kit) == {"other"}
    assert values_with_the_marker(kit) == []


def test_lineage_keeps_digests_and_the_adapters_are_marked(kit: Kit, settings: Settings) -> None:
    fill(kit, settings)
    with kit.database.write() as session:
        version(session, "v3", parent="v1")
        version(session, "v4", parent="v2")

    report = do(kit, settings, "user", USER)

    assert report.adapters == ["v1", "v3"]
    with kit.database.read() as session:
        marks = {row.name: row.forgotten_at for row in session.scalars(select(AdapterRow))}
        shown = render_lineage(trace_lineage(session, MODEL, "v3"))
        comparison = session.get_one(GateComparisonRow, "c-1")
    assert marks == {"v1": NOW, "v2": None, "v3": NOW, "v4": None}
    assert "learned from content that is forgotten" in shown
    assert "exchange a0, answers of base, scores - 1.00" in shown
    assert "content forgotten, sha256" in shown
    assert comparison.difference == 0.5
    assert comparison.answers[0]["content"] == ""
    assert comparison.answers[0]["short"] is False

    # What is trained later from a marked adapter has it in its weights too.
    sealed = Sealed(folder=settings.state_dir, digest="d" * 64, lineage_sha256="l", card_sha256="c")
    with kit.database.write() as session:
        made = register(
            session,
            model=MODEL,
            parent="v3",
            run_id="r",
            sealed=sealed,
            path=settings.state_dir,
            now=NOW,
        )
        assert session.get_one(AdapterRow, made.adapter).forgotten_at == NOW


def test_run_again_it_says_the_same_of_adapters_and_removes_nothing(
    kit: Kit, settings: Settings
) -> None:
    fill(kit, settings)
    do(kit, settings, "user", USER)

    again = do(kit, settings, "user", USER)

    assert (again.exchanges, again.groups, again.on_the_bus, again.lines) == (0, 0, 0, {})
    assert again.adapters == ["v1"]
    assert kit.counts("forget")["exchanges"] == 4
    assert kit.counts("forget")["adapters"] == 1


def test_after_a_crash_in_the_middle_the_next_run_does_the_rest(
    kit: Kit, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(kit, settings)
    steps: list[str] = []

    def dies(step: str) -> Callable[..., object]:
        def die(*_: object, **__: object) -> object:
            steps.append(step)
            raise StoreError("dies here")

        return die

    for step in ("delete_exchanges", "learners_of", "remove_dead_letters", "remove_traces"):
        with monkeypatch.context() as patch:
            patch.setattr(forgetting, step, dies(step))
            with pytest.raises(StoreError):
                do(kit, settings, "user", USER)
    assert steps == ["delete_exchanges", "learners_of", "remove_dead_letters", "remove_traces"]

    report = do(kit, settings, "user", USER)

    assert report.adapters == ["v1"]
    assert values_with_the_marker(kit) == []
    assert files_with_the_marker(settings.state_dir) == set()


@pytest.mark.usefixtures("of_sqlite")
def test_the_first_exchanges_that_go_have_the_file_rewritten_whatever_comes_after(
    kit: Kit, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:

    def die(*_: object, **__: object) -> None:
        raise StoreError("dies here")

    kit.store(marked(kit, "a", 0))
    path = Path(kit.database.url.removeprefix("sqlite:///"))
    do(kit, settings, "user", "nobody")
    with closing(sqlite3.connect(path, isolation_level=None)) as moved:
        moved.execute("PRAGMA secure_delete=OFF")
        moved.execute("INSERT INTO flag VALUES ('x', ?, 1)", (MARKER * 1_000,))
        moved.execute("DELETE FROM flag WHERE name = 'x'")
    with monkeypatch.context() as patch:
        patch.setattr(forgetting, "mark_digests", die)
        with pytest.raises(StoreError):
            do(kit, settings, "user", USER)

    again = do(kit, settings, "user", USER)

    assert (again.exchanges, again.traces) == (0, [])
    assert files_with_the_marker(path.parent) == set()


@pytest.mark.usefixtures("of_sqlite")
def test_rows_that_go_while_the_file_is_rewritten_have_it_rewritten_again(
    kit: Kit, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten: list[str] = []
    connect = traces._connection

    class Connection:
        """Another process deletes rows as soon as the file is written."""

        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def execute(self, statement: str) -> sqlite3.Cursor:
            done = self.connection.execute(statement)
            if statement == "VACUUM":
                rewritten.append(statement)
                with kit.database.write() as session:
                    traces.mark_replaced(session)
            return done

    @contextmanager
    def connection(database: Database) -> Iterator[Connection]:
        with connect(database) as real:
            yield Connection(real)

    with kit.database.write() as session:
        traces.mark_replaced(session)
    monkeypatch.setattr(traces, "_connection", connection)

    traces.rewrite(kit.database)
    traces.rewrite(kit.database)

    assert len(rewritten) == 2


def test_a_record_that_arrives_later_is_dropped_and_counted(kit: Kit, settings: Settings) -> None:
    fill(kit, settings)
    do(kit, settings, "user", USER)
    with kit.database.write() as session:
        save_feedback(session, [feedback("9", target="late0")], now=NOW)
    late = marked(kit, "late", 0)
    after = marked(kit, "after", 0)
    timings = type(after.timings)(started_at=NOW + 3_600.0)
    after = type(after)(
        **{**{f: getattr(after, f) for f in after.__struct_fields__}, "timings": timings}
    )
    bus = kit.MemoryBus([encode_exchange(one) for one in (late, after, kit.exchange("new"))])

    consumed = consume(
        bus, kit.database, limit=10, sessions=Sessions(held_out_rate=0.0), now=NOW + 3_700.0
    )

    assert (consumed.stored, consumed.forgotten, consumed.read) == (2, 1, 3)
    assert names(kit) == {"other", "after0", "new"}
    assert kit.counts("consume") == {"stored": 2, "forgotten": 1}
    assert bus.kept == []
    assert told_of(kit)[0] == ["fb_7"]


def test_what_comes_of_a_forgotten_session_later_is_dropped_for_good(
    kit: Kit, settings: Settings
) -> None:
    fill(kit, settings)
    do(kit, settings, "session", SESSION[2:])
    bus = kit.MemoryBus([encode_exchange(marked(kit, "late", 0, user="carol"))])

    consumed = consume(bus, kit.database, limit=10, sessions=Sessions(held_out_rate=0.0), now=9e9)

    assert (consumed.stored, consumed.forgotten) == (0, 1)


def test_an_exchange_of_another_session_that_was_stored_as_a_difference_stays_readable(
    kit: Kit, settings: Settings
) -> None:
    first = marked(kit, "a", 0)
    other = kit.exchange("x", user=USER, request=json.loads(first.request))
    with kit.database.write() as session:
        assert save_exchange(
            session, first, held_out=False, now=1.0, place=place("a0", None, SESSION)
        )
        assert save_exchange(session, other, held_out=False, now=1.0, place=place("x", "a0", "s2"))
        base = session.scalar(select(ExchangeRow.base_id).where(ExchangeRow.exchange_id == "x"))
    assert base == "a0"

    do(kit, settings, "session", SESSION)

    with closing(Database(kit.database.url)) as cold, cold.read() as session:
        found = load_exchange(session, "x")
    assert found is not None
    assert found.exchange.request == other.request
    assert names(kit) == {"x"}


def test_one_exchange_goes_and_its_session_stays(kit: Kit, settings: Settings) -> None:
    fill(kit, settings)

    report = do(kit, settings, "exchange", "a1")

    assert (report.exchanges, report.groups, report.adapters) == (1, 0, [])
    assert names(kit) == {"a0", "a2", "a3", "other"}


def test_a_run_that_learns_from_it_now_registers_nothing(kit: Kit, settings: Settings) -> None:
    kit.choose(marked(kit, "a", 0))
    learned(kit, "a0", "claimed", None)

    report = do(kit, settings, "user", USER)

    assert (report.exchanges, report.groups) == (1, 1)
    assert any("no outbox at" in note for note in report.notes)
    with kit.database.write() as session, pytest.raises(RunStoppedError):
        end_run(session, "run-a0", "finished", now=NOW, adapter="v1")


def test_retire_goes_back_to_the_newest_champion_that_did_not_learn_from_it(
    kit: Kit, settings: Settings
) -> None:
    kit.choose(marked(kit, "a", 0), kit.exchange("other", user="bob"))
    learned(kit, "other", "trained", "v1")
    learned(kit, "a0", "trained", "v2", parent="v1")
    with kit.database.write() as session:
        version(session, "v3", parent="v2")
        version(session, "v4", parent="v2")
        session.add(AliasRow(model=MODEL, alias="previous", adapter="v2", generation=1))
    three_champions(kit)

    report = do(kit, settings, "user", USER, retire=True)

    assert report.adapters == ["v2", "v3", "v4"]
    assert report.rolled_back_to == "v1"
    with kit.database.read() as session:
        assert versions.aliases_of(session, MODEL) == {"champion": "v1", "previous": "v1"}
        assert session.get_one(AdapterRow, "v4").state == "retired"
    assert do(kit, settings, "user", USER, retire=True).rolled_back_to is None


def test_content_that_retention_deleted_is_known_by_its_digest(
    kit: Kit, settings: Settings
) -> None:
    from ingest.retention.deletion import delete_exchanges

    fill(kit, settings)
    delete_exchanges(kit.database, ["a0"], why="expired", now=NOW)

    assert do(kit, settings, "user", USER).adapters == ["v1"]


@pytest.mark.usefixtures("of_sqlite")
def test_it_works_while_others_read_and_write(kit: Kit, settings: Settings) -> None:
    fill(kit, settings)
    path = kit.database.url.removeprefix("sqlite:///")
    with (
        closing(sqlite3.connect(path)) as reader,
        closing(Outbox(settings.state_dir / "outbox.db", max_rows=100)) as outbox,
    ):
        reader.execute("SELECT count(*) FROM exchange").fetchone()
        outbox.write([kit.exchange("before")])

        report = do(kit, settings, "user", USER)

        outbox.write([kit.exchange("afterwards")])
        assert reader.execute("SELECT count(*) FROM exchange").fetchone() == (1,)
    assert report.traces == []
    assert files_with_the_marker(settings.state_dir) == set()


@pytest.mark.usefixtures("of_sqlite")
def test_while_a_reader_keeps_an_older_state_it_says_what_is_left(
    kit: Kit, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "WAIT_S", 0.1)
    fill(kit, settings)
    path = kit.database.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM exchange").fetchone()
        report = do(kit, settings, "user", USER)
    assert "run this again" in report.traces[0]

    assert do(kit, settings, "user", USER).traces == []
    assert files_with_the_marker(settings.state_dir) == set()


@pytest.mark.usefixtures("of_sqlite")
def test_the_file_of_an_older_version_is_rewritten(kit: Kit, settings: Settings) -> None:
    path = Path(kit.database.url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.execute("PRAGMA secure_delete=OFF")
        old.execute("DELETE FROM flag WHERE name = 'overwrites_deleted'")
        old.execute("INSERT INTO flag VALUES ('x', ?, 1)", (MARKER * 1_000,))
        old.execute("DELETE FROM flag WHERE name = 'x'")
        old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert files_with_the_marker(path.parent) == {path.name}

    assert do(kit, settings, "user", "nobody").traces == []

    assert files_with_the_marker(path.parent) == set()


@pytest.mark.parametrize("by", ["", "user:"])
def test_what_a_user_told_of_others_goes_too(kit: Kit, settings: Settings, by: str) -> None:
    with kit.database.write() as session:
        sent = [feedback("1", source=by + USER), feedback("2", source=f"{by}another")]
        save_feedback(session, sent, now=1.0)
    outbox = Outbox(settings.state_dir / "outbox.db", max_rows=100)
    outbox.append(packed([feedback("3", source=by + USER, target="elsewhere")]))
    outbox.close()

    report = do(kit, settings, "user", USER)

    assert told_of(kit)[0] == ["fb_2"]
    assert report.on_the_bus == 1


def test_feedback_that_a_forgotten_user_sent_before_is_dropped_when_it_arrives(
    kit: Kit, settings: Settings
) -> None:
    kit.store(marked(kit, "a", 0, session_key="h:hers", trace_id="1" * 32))
    do(kit, settings, "user", USER)
    sent = [
        feedback("1", source=USER, target="of-another"),
        feedback("2", source=f"user:{USER}", target="of-another"),
        feedback("3", target_kind="trace", target="1" * 32),
        feedback("4", source=f"user:{USER}", target="of-another", received_at=NOW + 3_600.0),
        feedback("5", source="user:another", target="of-another"),
    ]

    with kit.database.write() as session:
        save_feedback(session, sent, now=NOW + 3_600.0)

    assert told_of(kit)[0] == ["fb_4", "fb_5"]


@pytest.mark.parametrize(
    ("named", "gone"),
    [
        ("shop/task-7", "h:shop/task-7"),
        ("default/shop/task-7", "h:default/shop/task-7"),
        ("task-7", "h:task-7"),
        (f"shop/{'x' * 300}", LONG_KEY),
    ],
)
def test_a_name_means_the_session_of_one_project(
    kit: Kit, settings: Settings, named: str, gone: str
) -> None:
    keys = {
        "h:shop/task-7",
        "h:default/shop/task-7",
        "h:task-7",
        LONG_KEY,
    }
    kit.store(*(kit.exchange(f"e{at}", session_key=key) for at, key in enumerate(sorted(keys))))

    report = do(kit, settings, "session", named)

    assert report.exchanges == 1
    with kit.database.read() as session:
        left = set(session.scalars(select(ExchangeRow.session_key)))
    assert left == keys - {gone}


def test_retire_never_goes_back_to_an_adapter_that_was_rolled_back(
    kit: Kit, settings: Settings
) -> None:
    kit.choose(marked(kit, "a", 0), kit.exchange("other", user="bob"))
    learned(kit, "a0", "trained", "v3", parent="v1")
    with kit.database.write() as session:
        version(session, "v1", parent="base")
        version(session, "v2", parent="base")
        session.flush()
        versions.set_state(session, "v2", "rolled_back", "answers nonsense")
    three_champions(kit)

    report = do(kit, settings, "user", USER, retire=True)

    assert report.rolled_back_to == "v1"


def test_retire_passes_over_an_adapter_whose_folder_is_gone(kit: Kit, settings: Settings) -> None:
    kit.choose(marked(kit, "a", 0))
    with kit.database.write() as session:
        version(session, "v1", parent="base")
        version(session, "v2", parent="v1", folder=settings.state_dir / "gone")
    learned(kit, "a0", "trained", "v3", parent="v1")
    three_champions(kit)

    report = do(kit, settings, "user", USER, retire=True)

    assert report.rolled_back_to == "v1"
    assert "v2 was passed over: its folder is not on this machine" in report.notes


def test_a_name_beyond_ascii_is_found_in_what_was_exported(kit: Kit, settings: Settings) -> None:
    export = settings.state_dir / "exported.jsonl"
    export.parent.mkdir(parents=True, exist_ok=True)
    export.write_text(json.dumps({"user": "Åsa Öberg", "text": MARKER}) + "\n")

    do(kit, settings, "user", "Åsa Öberg")

    assert MARKER not in export.read_text()


def test_feedback_on_a_session_in_which_others_spoke_stays(kit: Kit, settings: Settings) -> None:
    kit.store(
        marked(kit, "a", 0, session_key="h:team"),
        kit.exchange("bobs", user="bob", session_key="h:team"),
    )
    on_both = feedback("1", target_kind="session", target="h:team", comment="of both")
    with kit.database.write() as session:
        save_feedback(session, [on_both], now=1.0)
        # It was joined by the exchange that stays.
        session.execute(update(FeedbackRow).values(exchange_id="bobs", session_id="h:team"))
        session.execute(update(ExchangeRow).values(session_id="h:team"))

    do(kit, settings, "user", USER)

    assert told_of(kit)[0] == ["fb_1"]


@pytest.mark.parametrize(
    ("kind", "name"), [("user", USER), ("session", SESSION), ("exchange", "a0")]
)
def test_feedback_that_comes_later_on_what_is_forgotten_is_dropped_and_counted(
    kit: Kit, settings: Settings, kind: str, name: str
) -> None:
    kit.store(marked(kit, "a", 0))
    do(kit, settings, kind, name)
    told = [feedback("1", target="a0"), feedback("2", target="other")]
    bus = kit.MemoryBus([encode_feedback(one) for one in told])

    consumed = consume(bus, kit.database, limit=10, sessions=Sessions(held_out_rate=0.0), now=9e9)

    assert (consumed.feedback, consumed.read) == (2, 2)
    assert told_of(kit)[0] == ["fb_2"]
    assert kit.counts("feedback") == {"forgotten": 1, "stored_feedback": 1}


def test_what_cannot_be_decrypted_is_reported(kit: Kit, settings: Settings) -> None:
    outbox = Outbox(settings.state_dir / "outbox.db", max_rows=100, keyring=KEYRING)
    outbox.write([marked(kit, "b", 0)])
    outbox.close()
    with closing(Database(kit.database.url, KEYRING)) as keyed:
        first = marked(kit, "a", 0)
        other = kit.exchange("x", user="bob", request=json.loads(first.request))
        with kit.database.write() as session:
            assert save_exchange(
                session, first, held_out=False, now=1.0, place=place("a0", None, SESSION)
            )
        with keyed.write() as session:
            at = place("x", "a0", "s2")
            assert save_exchange(session, other, held_out=False, now=1.0, place=at)

        report = do(kit, settings, "user", USER)  # without the key

        assert (report.exchanges, report.on_the_bus) == (0, 0)
        traces = [line for line in report.traces if "the key 'k'" in line or "a key that" in line]
        assert len(traces) == 2
        assert traces[0].startswith("1 record on the bus")
        assert traces[1].startswith("1 exchange stays")

        report = do(Kit(keyed), settings, "user", USER)

        assert (report.exchanges, report.on_the_bus) == (1, 1)
        with keyed.read() as session:
            found = load_exchange(session, "x")
    assert found is not None
    assert found.exchange.request == other.request


def test_a_short_name_is_a_word_of_its_own_in_logs(kit: Kit, settings: Settings) -> None:
    logs = settings.state_dir / "logs"
    logs.mkdir()
    others = ["at 12:07:47 of 127 rows 27 were 7up", "ended"]
    (logs / "score.log").write_text("\n".join([*others, "user=7 said", '{"user":"7"}', ""]))

    report = do(kit, settings, "user", "7")

    assert report.lines == {str(logs / "score.log"): 2}
    left = (logs / "score.log").read_text().split("\n")
    assert [line for line in left if line.strip()] == others


@pytest.mark.parametrize(("kind", "name"), [("session", SESSION), ("user", USER)])
def test_what_a_task_began_with_is_forgotten_with_its_rehearsals(
    kit: Kit, settings: Settings, kind: str, name: str
) -> None:
    with kit.database.write() as session:
        here = place("a0", None, SESSION)
        assert save_exchange(session, marked(kit, "a", 0), held_out=False, now=3.0, place=here)
    of_task = {"user": "", "task": "a0", "origin": "rehearsal", "trace_id": ""}
    attempts = [
        marked(kit, f"r{number}", 0, session_key=f"h:rehearsal-{number}", **of_task)
        for number in range(3)
    ]
    for number, one in enumerate(attempts[:2]):
        key = f"h:rehearsal-{number}"
        with kit.database.write() as session:
            here = place(one.exchange_id, None, key)
            assert save_exchange(session, one, held_out=False, now=4.0, place=here)
            told = feedback(f"r{number}", kind="outcome", target_kind="session", target=key)
            assert save_feedback(session, [told], now=4.0) == []
            session.add(
                RehearsalRow(
                    session_id=key,
                    task="a0",
                    project="default",
                    adapter="base",
                    attempt=number,
                    began_at=4.0,
                    result="runner_error",
                    detail=MARKER,
                )
            )

    report = do(kit, settings, kind, name)

    assert report.exchanges == 3
    late = kit.MemoryBus([encode_exchange(attempts[2])])  # it was under way
    sessions = Sessions(held_out_rate=0.0)
    assert consume(late, kit.database, limit=10, sessions=sessions, now=NOW).forgotten == 1
    with kit.database.read() as session:
        for table in (ExchangeRow, RehearsalRow, FeedbackRow):
            assert session.scalars(select(table)).all() == [], table


def test_retention_deletes_rehearsals_with_what_their_task_began_with(kit: Kit) -> None:
    with kit.database.write() as session:
        here = place("a0", None, SESSION)
        assert save_exchange(session, marked(kit, "a", 0), held_out=False, now=3.0, place=here)
        one = marked(kit, "r", 0, session_key="h:rehearsal-1", task="a0", origin="rehearsal")
        here = place("r0", None, "h:rehearsal-1")
        assert save_exchange(session, one, held_out=False, now=8 * 86_400.0, place=here)
    sweeper = Sweeper(kit.database, Retention(exchanges_days=10.0, groups_days=10.0))

    while sweeper.step(11 * 86_400.0):
        pass

    with kit.database.read() as session:
        assert session.scalars(select(ExchangeRow.exchange_id)).all() == []
