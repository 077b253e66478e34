"""A secret on its way through ingest, the store and the judge, by policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ingest.intake.bus import OutboxBus
from ingest.intake.choose import Sessions, choose_new
from ingest.intake.consume import Consumed, consume
from ingest.privacy import screen, texts, texts as judge_view
from ingest.privacy.screen import Screen
from ingest.privacy.texts import JudgeView
from ingest.store.exchanges import load_exchange
from sidecar.capture.outbox import Outbox, OutboxReader
from sidecar.errors import SettingsError
from sidecar.records import Exchange
from sidecar.settings import Privacy, load_settings
from sidecar.store.database import Database
from sidecar.store.keyring import Keyring
from support.clock import Clock
from support.ingest_kit import Kit
from tests.ingest.conftest import put_group

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit

KEY = "sk-ant-" + "zebra0marker0" * 4
MAIL = "zebra.marker@example.com"


def exchange(name: str, text: str = f"my key is {KEY}", **changes: Any) -> Exchange:
    messages = [{"role": "user", "content": text}]
    return Kit.exchange(
        name,
        request=json.dumps({"model": "m", "messages": messages}).encode(),
        prompt_token_ids=(1, 2, 3),
        **changes,
    )


def take(kit: Kit, settings: Privacy, *exchanges: Exchange) -> Consumed:
    screen = Screen(settings)
    return kit.take(*exchanges, now=1.0, screen=screen, keeps_unread=screen.keeps_unread)


def test_by_default_a_secret_keeps_its_exchange_out_of_training(kit: Kit) -> None:
    done = take(kit, Privacy(), exchange("a"), exchange("b", f"write to {MAIL}"))

    assert (done.stored, done.dropped) == (2, 0)
    flagged, plain = kit.stored("a").exchange, kit.stored("b").exchange
    assert flagged.untrainable_reason == "private"
    assert KEY.encode() in flagged.request
    assert plain.untrainable_reason is None
    assert kit.counts("privacy") == {"found_secret": 1, "kept_out": 1}
    choose_new(kit.database, kit.rules(), model="m", limit=10, now=2.0)
    found = kit.stored("a")
    assert found.selection == "untrainable:private"


def test_a_project_may_drop_what_another_learns_from(kit: Kit) -> None:
    settings = Privacy.model_validate(
        {"projects": {"bank": {"flagged": "drop"}, "lab": {"flag": []}}}
    )

    done = take(
        kit,
        settings,
        exchange("a", project="bank"),
        exchange("b", "hello", project="bank"),
        exchange("c", project="lab"),
    )

    assert (done.stored, done.dropped, done.read) == (2, 1, 3)
    with kit.database.read() as session:
        assert load_exchange(session, "a") is None
    kept = kit.stored("c").exchange
    assert kept.untrainable_reason is None
    assert kit.counts("privacy") == {"found_secret": 1, "dropped": 1}
    assert kit.counts("consume") == {"stored": 2, "dropped": 1}


def test_values_are_replaced_before_storage(kit: Kit) -> None:
    reply = kit.choice(f"Noted: {KEY} of {MAIL}", token_ids=(7, 8), logprobs=(-0.1, -0.2))
    done = take(kit, Privacy(before_storage=True), exchange("a", choices=(reply,)))

    assert done.stored == 1
    kept = kit.stored("a").exchange
    assert json.loads(kept.request)["messages"][0]["content"] == "my key is <SECRET_1>"
    assert json.loads(kept.choices[0].message)["content"] == "Noted: <SECRET_1> of <EMAIL_1>"
    assert kept.prompt_token_ids == kept.choices[0].token_ids == kept.choices[0].logprobs == ()
    assert kept.untrainable_reason == "private"
    assert kit.counts("privacy")["redacted"] == 1


def files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_with_a_key_no_file_ever_holds_a_redacted_value(kit: Kit, tmp_path: Path) -> None:
    keyring = Keyring({"k": b"k" * 32})
    outbox = Outbox(tmp_path / "outbox.db", max_rows=10, keyring=keyring)
    outbox.write([exchange("a"), exchange("b", "hello")])
    assert b"zebra" not in files(tmp_path)
    assert b"hello" not in files(tmp_path)
    database = Database(kit.database.url, keyring)
    bus = OutboxBus(OutboxReader(tmp_path / "outbox.db"))
    try:
        done = consume(
            bus,
            database,
            limit=10,
            sessions=Sessions(held_out_rate=0.0),
            now=1.0,
            screen=Screen(Privacy(before_storage=True)),
        )
        assert done.stored == 2
        assert b"zebra" not in files(tmp_path)
        assert b"zebra" not in Kit(database).stored("a").exchange.request
    finally:
        bus.close()
        database.close()
        outbox.close()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector that raises for one exchange."""
    real = texts.kinds_in

    def kinds_in(bodies: Any, *arguments: Any, **named: Any) -> list[str]:
        if any(b"break it" in body for body in bodies):
            raise RuntimeError(f"broken by {bodies}")
        return real(bodies, *arguments, **named)

    monkeypatch.setattr("ingest.privacy.screen.kinds_in", kinds_in)


@pytest.mark.usefixtures("broken")
def test_a_detector_that_raises_costs_its_record_alone(kit: Kit) -> None:
    exchanges = (exchange("a", "hello"), exchange("b", "break it"), exchange("c", "hello"))
    done = take(kit, Privacy(), *exchanges)

    assert (done.stored, done.poison) == (3, 0)
    kept = kit.stored("b").exchange
    assert kept.untrainable_reason == "private"
    assert kit.counts("privacy") == {"failed": 1, "kept_out": 1}


@pytest.mark.usefixtures("broken")
def test_what_nobody_could_search_is_not_stored_where_values_must_be_replaced(kit: Kit) -> None:
    done = take(kit, Privacy(before_storage=True), exchange("b", "break it"), exchange("c", "hi"))

    assert (done.stored, done.dropped) == (1, 1)
    assert kit.counts("privacy") == {"failed": 1, "dropped": 1}


def test_an_exchange_over_the_limit_is_not_learned_from(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "SEARCHED_BYTES", 1_000)
    take(kit, Privacy(), exchange("a", "x" * 2_000))

    kept = kit.stored("a").exchange
    assert kept.untrainable_reason == "private"
    assert kit.counts("privacy") == {"too_large": 1, "kept_out": 1}


def put_answers(kit: Kit, *answers: str) -> None:
    request = exchange("e", f"I am {MAIL}, key {KEY}").request
    put_group(kit.database, "g1", *answers, request=request)


async def test_the_judge_sees_placeholders(kit: Kit, clock: Clock, judge_kit: JudgeKit) -> None:
    put_answers(kit, f"Write to {MAIL}", "Write to other.marker@example.com", f"Key {KEY}")
    judge = judge_kit.FakeJudge(
        judge_kit.score_by_content(
            {"Write to <EMAIL_1>": 0.9, "Write to <EMAIL_2>": 0.2, "Key <SECRET_1>": 0.1}
        )
    )

    assert await judge_kit.worker(kit.database, judge, clock).step() == 1

    said = json.dumps(judge.conversations)
    assert "marker" not in said
    assert "I am \\\\u003cEMAIL_1>, key \\\\u003cSECRET_1>" in said
    assert judge_kit.status(kit.database, "g1") == ("scored", None)
    # The learner has them as they were sampled.
    assert MAIL.encode() in kit.group("g1").answers[0].message


async def test_without_a_search_the_judge_sees_nothing(
    kit: Kit, clock: Clock, judge_kit: JudgeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(KEY)

    monkeypatch.setattr(texts.Redaction, "json", fail)
    put_answers(kit, "one", "two")
    judge = judge_kit.FakeJudge()

    await judge_kit.worker(kit.database, judge, clock).step()

    assert judge.conversations == []
    assert judge_kit.status(kit.database, "g1") == ("set_aside", "not_redacted")
    assert KEY not in str(judge_kit.group_row(kit.database, "g1").detail)


def test_the_judge_may_be_shown_all_by_an_operator() -> None:
    view = JudgeView(Privacy(hide=()))
    seen = judge_view.View(context=[{"content": MAIL}], tools=(), answers=[{"content": KEY}])
    assert view(seen).answers == [{"content": KEY}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[privacy.patterns]\nA = '(a)\\1'", "invalid escape sequence"),
        ("[privacy.patterns]\nA = '((a{1,100}){1,100}){1,100}'", "must be one of RE2"),
        ("[privacy.patterns]\nA = '('", "missing"),
        ("[privacy.patterns]\nA = 'a*'", "matches the empty text"),
        ("[privacy.patterns]\nA = '\\b'", "an edge of words"),
        ("[privacy.patterns]\nA = '\\b\\w*'", "an edge of words"),
        ("[privacy.patterns]\nemail = 'a'", "is no kind"),
        ("[privacy.patterns]\nEMAIL = 'a'", "EMAIL is built in"),
        ("[privacy]\nflag = ['PASSWORD']", "PASSWORD is no kind; known are"),
        ("[privacy.projects.a]\nflag = ['PASSWORD']", "PASSWORD is no kind"),
        ("[privacy]\nflagged = 'encrypt'", "without a key; set store.encryption_key_file"),
    ],
)
def test_settings_that_cannot_be_obeyed_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "sidecar.toml").write_text(text)
    with pytest.raises(SettingsError, match=why):
        load_settings(tmp_path / "sidecar.toml")
