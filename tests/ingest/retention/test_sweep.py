"""Retention on both stores: what goes, what stays, and what can still be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from random import Random

import msgspec
import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from deploy.funnel import exchanges_by_selection, groups_by_status, read_funnel
from ingest.feedback.deriving import save_feedback
from ingest.intake.loop import Intake
from ingest.judges.replies import ReplyStore
from ingest.retention import deletion, sweep
from ingest.retention.sweep import Sweeper, read_state
from ingest.ruler.calls import save_judge_calls
from ingest.ruler.judge import JudgeReply
from ingest.ruler.ruler import JudgeCall
from ingest.store.exchanges import dead_letter
from sidecar.errors import StoreError
from sidecar.records import Exchange
from sidecar.settings import Groups, Retention, Serving, Settings
from sidecar.store import traces
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.store.disk import space_of
from sidecar.store.keyring import Keyring, is_sealed
from sidecar.store.models import (
    AnswerRow,
    Base,
    ChoiceRow,
    DeadLetterRow,
    ExchangeRow,
    FeedbackRow,
    GroupDigestRow,
    GroupRow,
    JudgeCallRow,
    JudgeReplyRow,
    RunRow,
    RunStepRow,
)
from support.clock import Clock
from support.finished_run import finished_run
from support.ingest_kit import Kit, make_feedback, make_place

DAY_S = 86_400.0
NOW = 1_000 * DAY_S
FOR_GOOD = {name: 0.0 for name in Retention.model_fields if name.endswith("_days")}


def retention(**days: float) -> Retention:
    return Retention.model_validate({**FOR_GOOD, **days})


def sweep_once(database: Database, settings: Retention, now: float = NOW) -> int:
    """One pass. Returns: the number of its steps."""
    return run(Sweeper(database, settings), now)


def run(sweeper: Sweeper, now: float = NOW) -> int:
    return sum(1 for _ in iter(lambda: sweeper.step(now), False))


def store(kit: Kit, *exchanges: Exchange, days_ago: float, session: str = "s") -> None:
    """Store exchanges, each as the continuation of the one before it."""
    parent = None
    for one in exchanges:
        place = make_place(one.exchange_id, parent, session=session)
        kit.store(one, now=NOW - days_ago * DAY_S, place=place)
        parent = one.exchange_id


def conversation(kit: Kit, name: str, count: int) -> list[Exchange]:
    rng = Random(name)
    system = " ".join(f"{Random(1).getrandbits(32):x}" for _ in range(200))
    messages = [{"role": "system", "content": system}]
    found = []
    for turn in range(count):
        messages.append({"role": "user", "content": f"{rng.getrandbits(256):x}"})
        reply = f"{rng.getrandbits(256):x}"
        found.append(
            kit.exchange(
                f"{name}{turn}",
                request={"model": "m", "messages": messages},
                choices=(kit.choice(reply),),
            )
        )
        messages.append({"role": "assistant", "content": reply})
    return found


def names(kit: Kit) -> set[str]:
    return set(kit.scalars(select(ExchangeRow.exchange_id)))


def rows(kit: Kit, table: type[Base]) -> int:
    return int(kit.scalars(select(func.count()).select_from(table))[0])


def give_run(kit: Kit, group_id: str, run_id: str, adapter: str | None, status: str) -> None:
    with kit.database.write() as session:
        ended = "finished" if adapter else "failed"
        session.add(finished_run(run_id, status=ended, ended_at=2.0, adapter=adapter))
        session.execute(
            update(GroupRow)
            .where(GroupRow.group_id == group_id)
            .values(run_id=run_id, status=status, judge_model="j", rubric_hash="r")
        )
        session.execute(update(AnswerRow).where(AnswerRow.group_id == group_id).values(score=0.5))


def test_old_exchanges_go_with_their_choices_and_the_others_stay(kit: Kit) -> None:
    store(kit, kit.exchange("old"), days_ago=31)
    store(kit, kit.exchange("young"), days_ago=29)

    sweep_once(kit.database, retention(exchanges_days=30))

    assert names(kit) == {"young"}
    assert rows(kit, ChoiceRow) == 1
    assert kit.counts("retention") == {"exchanges": 1}
    assert kit.counts("selection") == {"expired": 1}  # it was never decided


def test_with_every_age_at_0_nothing_goes(kit: Kit) -> None:
    store(kit, kit.exchange("old"), days_ago=999)

    assert sweep_once(kit.database, retention()) == 0
    assert names(kit) == {"old"}


@pytest.mark.both_stores
def test_a_group_goes_as_a_whole_at_its_own_age_and_the_totals_stay(kit: Kit) -> None:
    kit.choose(kit.exchange("grouped"))  # stored at 1.0, so it is very old
    store(kit, kit.exchange("alone"), days_ago=31)
    with kit.database.read() as session:
        assert groups_by_status(read_funnel(session, "smollm").stages) == {"sampling": 1}

    sweep_once(kit.database, retention(exchanges_days=30))
    assert names(kit) == {"grouped"}

    sweep_once(kit.database, retention(groups_days=30))

    assert names(kit) == set()
    assert [rows(kit, table) for table in (GroupRow, AnswerRow, ChoiceRow, GroupDigestRow)] == [
        0
    ] * 4
    with kit.database.read() as session:
        stages = read_funnel(session, "smollm").stages
    assert groups_by_status(stages) == {"deleted": 1}
    assert exchanges_by_selection(stages)["chosen"] == 1
    assert exchanges_by_selection(stages)["expired"] == 1


def test_what_an_adapter_learned_from_stays_as_a_digest(kit: Kit) -> None:
    learned, dropped, failed = kit.choose(*map(kit.exchange, ("a", "b", "c")))
    give_run(kit, learned, "run-1", "m--v1", "trained")
    give_run(kit, dropped, "run-2", "m--v2", "dropped")
    give_run(kit, failed, "run-3", None, "dropped")
    rewarded = update(GroupRow).where(GroupRow.group_id == dropped).values(reward_rule="{}")
    with kit.database.write() as session:
        session.execute(rewarded)
        session.execute(update(AnswerRow).values(reward=0.75))

    sweep_once(kit.database, retention(groups_days=30))

    with kit.database.read() as session:
        kept = {row.group_id: row for row in session.scalars(select(GroupDigestRow))}
    assert set(kept) == {learned, dropped}
    row = kept[learned]
    assert (row.run_id, row.exchange_id, row.status, row.scores) == ("run-1", "a", "trained", [0.5])
    assert (row.rewards, kept[dropped].rewards) == (None, [0.75])
    assert (row.forgotten, row.deleted_at) == (False, NOW)
    assert len(row.content_digest) == len(row.session_digest) == 64
    assert row.content_digest != kept[dropped].content_digest or row.exchange_id != "b"


def test_a_group_that_a_run_has_now_stays(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("a"))
    give_run(kit, group_id, "run-1", None, "claimed")

    sweep_once(kit.database, retention(groups_days=30, exchanges_days=30, max_bytes=1))

    assert names(kit) == {"a"}
    assert rows(kit, AnswerRow) == 1


@pytest.mark.both_stores
def test_what_stands_on_a_deleted_exchange_can_still_be_read(kit: Kit) -> None:
    mine, others = conversation(kit, "mine", 6), conversation(kit, "others", 2)
    store(kit, *mine[:4], days_ago=31)
    kit.store(others[0], now=NOW)  # the first request of another session repeats mine
    kit.store(mine[4], now=NOW, place=make_place("mine4", "mine3", session="s2"))
    with kit.database.read() as session:
        found = session.execute(select(ExchangeRow.exchange_id, ExchangeRow.base_id))
        bases = {row.exchange_id: row.base_id for row in found}
    assert bases["mine4"] == "mine3"
    assert bases["others0"] == "mine0"

    with closing(Database(kit.database.url)) as other_process:
        sweep_once(other_process, retention(exchanges_days=30))

    assert names(kit) == {"mine4", "others0"}
    cold = Kit(Database(kit.database.url))
    assert cold.stored("mine4").exchange.request == mine[4].request
    assert cold.stored("others0").exchange.request == others[0].request
    cold.database.close()


def test_a_parent_of_many_branches_goes_in_short_steps_that_another_process_may_end(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "REBASED", 4)
    mine = conversation(kit, "mine", 2)
    store(kit, mine[0], days_ago=31)
    for number in range(20):
        branch = msgspec.structs.replace(mine[1], exchange_id=f"b{number}")
        kit.store(branch, now=NOW, place=make_place(branch.exchange_id, "mine0"))

    def left() -> int:
        with kit.database.read() as session:
            where = ExchangeRow.base_id == "mine0"
            return session.scalar(select(func.count()).where(where)) or 0

    first = Sweeper(kit.database, retention(exchanges_days=30))
    assert [(first.step(NOW), left()) for _ in range(2)] == [(True, 16), (True, 12)]
    with closing(Database(kit.database.url)) as other_process:
        second = Sweeper(other_process, retention(exchanges_days=30))
        assert [(second.step(NOW), left()) for _ in range(4)] == [
            (True, 8),
            (True, 4),
            (True, 0),
            (True, 0),
        ]

    assert len(names(kit)) == 20
    cold = Kit(Database(kit.database.url))
    assert all(cold.stored(name).exchange.request == mine[1].request for name in names(kit))
    cold.database.close()


def test_without_the_key_of_what_stands_on_it_an_exchange_stays(kit: Kit) -> None:
    keys = {"k": b"k" * 32}
    talk = conversation(kit, "talk", 4)
    store(kit, *talk[:2], days_ago=31)  # plain
    store(kit, kit.exchange("alone"), days_ago=31, session="s2")
    with closing(Database(kit.database.url, Keyring(keys))) as keyed:
        continue_talk(Kit(keyed), talk)

    sweep_once(kit.database, retention(exchanges_days=30))  # an ingest without the key

    assert names(kit) == {"talk0", "talk1", "talk2", "talk3"}
    with closing(Database(kit.database.url, Keyring(keys))) as keyed:
        assert Kit(keyed).stored("talk3").exchange.request == talk[3].request
        sweep_once(keyed, retention(exchanges_days=30))
        assert names(kit) == {"talk2", "talk3"}
        with kit.database.read() as session:  # encoded anew, under the place of each
            assert all(map(is_sealed, session.scalars(select(ExchangeRow.request_body))))
        assert Kit(keyed).stored("talk3").exchange.request == talk[3].request


def continue_talk(kit: Kit, talk: list[Exchange]) -> None:
    """Store the last two turns today, each as a difference from the one before it."""
    for before, one in pairwise(talk[1:]):
        kit.store(one, now=NOW, place=make_place(one.exchange_id, before.exchange_id))
    with kit.database.read() as session:
        based = select(ExchangeRow.base_id).where(ExchangeRow.exchange_id == talk[2].exchange_id)
        assert session.scalar(based) == talk[1].exchange_id


def test_a_transaction_has_at_most_so_many_rows_and_bytes_but_one_row() -> None:
    sizes = enumerate((40, 40, 40, 500, 1, 1, 1, 1))

    assert deletion.divide(sizes, 3, 100) == [[0, 1], [2], [3], [4, 5, 6], [7]]


def test_a_transaction_deletes_so_many_exchanges(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "ROWS", 4)
    for number in range(10):
        store(kit, kit.exchange(f"e{number}"), days_ago=31, session=f"s{number}")
    sweeper = Sweeper(kit.database, retention(exchanges_days=30))
    left = [rows(kit, ExchangeRow)]

    while sweeper.step(NOW):
        left.append(rows(kit, ExchangeRow))

    assert left == [10, 6, 2, 0]


def test_rows_with_a_wrong_time_hide_no_others(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((deletion, "PAGE"), (sweep, "ROWS")):
        monkeypatch.setattr(module, name, 3)
    for number in range(5):
        days_ago = 31 if number == 4 else -3650  # 4 of a clock that was ten years ahead, 1 old one
        store(kit, kit.exchange(f"e{number}"), days_ago=days_ago, session=f"s{number}")
        at = NOW - days_ago * DAY_S
        with kit.database.write() as session:
            judge_said(session, f"g-{number}", at=at)
            dead_letter(session, b"%d" % number, where=f"{number}", reason="r", now=at)
            save_feedback(session, [make_feedback(f"fb-{number}", f"none-{number}")], now=at)

    sweep_once(kit.database, Retention.model_validate(dict.fromkeys(FOR_GOOD, 30)))

    tables = (ExchangeRow, JudgeCallRow, DeadLetterRow, FeedbackRow)
    assert [rows(kit, table) for table in tables] == [4] * 4
    assert kit.counts("retention") == {
        "exchanges": 1,
        "judge_calls": 1,
        "dead_letters": 1,
        "feedback": 1,
    }


def test_a_pass_while_the_clock_was_ahead_does_not_put_the_next_one_off(kit: Kit) -> None:
    sweeper = Sweeper(kit.database, retention(exchanges_days=30))
    run(sweeper, NOW + 10 * DAY_S)
    store(kit, kit.exchange("old"), days_ago=31)

    run(sweeper)

    assert names(kit) == set()
    store(kit, kit.exchange("next"), days_ago=31)
    assert not sweeper.step(NOW + 59.0)
    assert sweeper.step(NOW + 60.0)


def test_a_pass_that_deletes_nothing_looks_at_a_bounded_number_of_rows_and_the_next_goes_on(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "PAGE", 2)
    monkeypatch.setattr(sweep, "PAGES", 3)
    kit.choose(*(kit.exchange(f"e{number}") for number in range(14)))  # groups stay for good
    store(kit, kit.exchange("old"), days_ago=31)
    sweeper = Sweeper(kit.database, retention(exchanges_days=30))

    looked_at = []
    for minute in range(3):
        steps = run(sweeper, NOW + 60.0 * minute)
        looked_at.append((steps, "old" in names(kit)))

    # One page a step; the 15th row is alone on the 8th page, and ends the round.
    assert looked_at == [(3, True), (3, True), (2, False)]


def test_what_verifiers_found_counts_in_the_size_of_an_exchange(kit: Kit) -> None:
    kit.choose(kit.exchange("grouped"))

    def size() -> int:
        with kit.database.read() as session:
            (held,) = deletion.held_after(session, 0)
        return held.stored_bytes

    before = size()
    with kit.database.write() as session:
        session.execute(update(AnswerRow).values(checks="x" * 1_000))

    assert before > 0
    assert size() == before + 1_000


@pytest.mark.both_stores
def test_a_store_that_is_too_large_loses_the_oldest_first(kit: Kit) -> None:
    for number in range(12):
        prompt = tuple(Random(number).choices(range(49_000), k=20_000))
        one = kit.exchange(f"e{number:02}", prompt_token_ids=prompt)
        store(kit, one, days_ago=1, session=f"s{number}")
    with kit.database.read() as session:
        used = space_of(session, limit=1).used

    for _ in range(3):  # what a row takes is an estimate, so one pass may delete too little
        sweep_once(kit.database, retention(max_bytes=used - 250_000))

    kept = names(kit)
    assert 3 <= len(kept) <= 9
    assert kept == set(sorted(f"e{number:02}" for number in range(12))[-len(kept) :])
    with kit.database.read() as session:
        state = read_state(session)
    assert state is not None
    assert state.used_bytes <= state.max_bytes == used - 250_000
    assert state.oldest_at == NOW - DAY_S


def test_what_a_size_limit_deletes_makes_the_store_no_larger(kit: Kit) -> None:
    rules = " ".join(f"{Random(1).getrandbits(32):x}{number}" for number in range(8_000))
    for number in range(20):
        system = {"role": "system", "content": rules}
        asked = {"role": "user", "content": f"question {number}"}
        request = {"model": "m", "messages": [system, asked]}
        store(kit, kit.exchange(f"e{number}", request=request), days_ago=1, session=f"s{number}")

    def of_requests() -> int:
        return int(kit.scalars(select(func.sum(func.length(ExchangeRow.request_body))))[0])

    before = of_requests()
    with kit.database.read() as session:
        used = space_of(session, limit=1).used

    sweep_once(kit.database, retention(max_bytes=used - 1))

    assert names(kit) == {f"e{number}" for number in range(1, 20)}  # the others are based on e0
    assert before * 0.9 < of_requests() < before


def test_after_a_crash_the_next_pass_goes_on(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "ROWS", 2)
    talk = conversation(kit, "talk", 8)
    store(kit, *talk[:7], days_ago=31)
    kit.store(talk[7], now=NOW, place=make_place("talk7", "talk6"))

    crashes = 0
    for _ in range(20):
        with dying(kit.database, after=1) as database:
            try:
                sweep_once(database, retention(exchanges_days=30))
            except StoreError:
                crashes += 1
        cold = Kit(Database(kit.database.url))
        for name in names(kit):
            assert cold.stored(name).exchange.request == talk[int(name[-1])].request
        cold.database.close()
        if names(kit) == {"talk7"}:
            break
    assert crashes >= 3
    sweep_once(kit.database, retention(exchanges_days=30))

    assert names(kit) == {"talk7"}
    assert kit.counts("retention") == {"exchanges": 7}


@contextmanager
def dying(database: Database, *, after: int) -> Iterator[Database]:
    """A store whose process dies in the transaction after so many, before it commits."""
    left = after

    class Dying(Database):
        @contextmanager
        def write(self, *, alone: bool = True) -> Iterator[Session]:
            nonlocal left
            with super().write(alone=alone) as session:
                yield session
                left -= 1
                if left < 0:
                    raise StoreError("dies here")

    made = Dying(database.url)
    yield made
    made.close()


@pytest.mark.both_stores
def test_replies_of_the_judge_dead_letters_and_failed_runs_go_at_their_ages(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("a"))
    give_run(kit, group_id, "failed", None, "dropped")
    give_run(kit, group_id, "made", "m--v1", "trained")
    with kit.database.write() as session:
        for subject, at in (("g-1", 1.0), ("c-1", 1.0), ("g-2", NOW)):
            judge_said(session, subject, at=at)
        dead_letter(session, b"old", where="1", reason="r", now=1.0)
        dead_letter(session, b"young", where="2", reason="r", now=NOW)

    for digest, at in (("old", 1.0), ("young", NOW)):
        kept = ReplyStore(kit.database, max_bytes=10**6, max_age_s=1e12, clock=Clock(at))
        kept.keep(digest, "", JudgeReply(text="words"))

    with kit.database.write() as session:
        for run_id in ("made", *session.scalars(select(RunRow.run_id)).all()):
            session.merge(RunStepRow(run_id=run_id, step=1, at=1.0, body={}))

    sweep_once(kit.database, retention(groups_days=1))

    with kit.database.read() as session:
        assert session.scalars(select(RunStepRow.run_id)).all() == ["made"]
        found = session.execute(select(JudgeCallRow.group_id, JudgeCallRow.reply))
        calls = [(row.group_id, row.reply) for row in found]
        assert session.scalars(select(DeadLetterRow.payload)).all() == [b"young"]
        assert session.scalars(select(JudgeReplyRow.digest)).all() == ["young"]
        assert session.scalars(select(RunRow.run_id)).all() == ["made"]
    assert sorted(calls) == [("c-1", ""), ("g-2", "words")]
    assert kit.counts("retention") == {
        "exchanges": 1,
        "groups": 1,
        "judge_calls": 1,
        "judge_replies": 1,
        "dead_letters": 1,
        "runs": 1,
    }


@pytest.mark.both_stores
def test_feedback_without_an_exchange_goes_by_age(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "PAGE", 3)
    store(kit, kit.exchange("here"), days_ago=20)
    for days_ago, targets in ((31, "ab"), (31, ["here"] * 4), (31, "c"), (29, "def")):
        records = [
            make_feedback(f"fb-{days_ago}-{target}-{number}", target)
            for number, target in enumerate(targets)
        ]
        with kit.database.write() as session:
            save_feedback(session, records, now=NOW - days_ago * DAY_S)
    sweeper = Sweeper(kit.database, retention(exchanges_days=30))

    run(sweeper)

    left = kit.scalars(select(FeedbackRow.target).order_by(FeedbackRow.seq))
    assert left == ["here"] * 4 + ["d", "e", "f"]
    assert kit.counts("retention") == {"feedback": 3}
    run(sweeper, NOW + 2 * DAY_S)
    assert kit.counts("retention") == {"feedback": 6}
    assert rows(kit, FeedbackRow) == 4


def test_ingest_deletes_while_it_stores(kit: Kit) -> None:
    store(kit, kit.exchange("old"), days_ago=31)
    settings = Settings(
        serving=Serving(model="smollm", sampling_defaults={}, grammar="as_asked"),
        groups=Groups(held_out_rate=0.0),
        retention=retention(exchanges_days=30),
    )
    intake = Intake(kit.MemoryBus([]), kit.database, settings, now=lambda: NOW)

    while intake.step():
        continue

    assert names(kit) == set()


@pytest.mark.parametrize("kind", ["exchange", "judge_call", "feedback", "dead_letter"])
def test_what_retention_deleted_is_overwritten_by_the_next_forget(kit: Kit, kind: str) -> None:
    with kit.database.write() as session:
        assert get_flag(session, traces.FLAG) == "1"
        if kind == "judge_call":
            judge_said(session, "g-1", at=1.0)
        elif kind == "feedback":
            save_feedback(session, [make_feedback("fb", "nothing")], now=1.0)
        elif kind == "dead_letter":
            dead_letter(session, b"old", where="1", reason="r", now=1.0)
    if kind == "exchange":
        store(kit, kit.exchange("old"), days_ago=31)

    sweep_once(kit.database, retention(exchanges_days=30, groups_days=30))

    with kit.database.read() as session:
        assert get_flag(session, traces.FLAG) is None  # `forget` rewrites the file


def judge_said(session: Session, subject: str, *, at: float) -> None:
    words = JudgeReply(text="words", prompt_tokens=1, completion_tokens=1, cost_usd=None, seconds=1)
    call = JudgeCall(judge_model="j", order_seed=1, attempt=0, error=None, reply=words)
    save_judge_calls(session, subject, [call], rubric_hash="r", now=at)


def test_a_file_gives_space_of_deleted_rows_back(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "KEPT_FREE_BYTES", 30_000)
    for number in range(12):
        prompt = tuple(Random(number).choices(range(49_000), k=20_000))
        store(kit, kit.exchange(f"e{number}", prompt_token_ids=prompt), days_ago=31)
    with kit.database.read() as session:
        before = session.execute(text("PRAGMA page_count")).scalar_one()

    sweep_once(kit.database, retention(exchanges_days=30))

    with kit.database.read() as session:
        after = session.execute(text("PRAGMA page_count")).scalar_one()
    assert before * 4096 > after * 4096 + 300_000
    assert after * 4096 < 650_000


def test_a_damaged_state_is_no_state(kit: Kit) -> None:
    with kit.database.write() as session:
        set_flag(session, sweep.FLAG, json.dumps({"at": "?"}), now=1.0)
    with kit.database.read() as session:
        assert read_state(session) is None
