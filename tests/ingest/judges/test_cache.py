"""A question is paid for once: what a hit is, what it is not, and that nothing is lost by it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from sqlalchemy import select, update

from ingest.judges.replies import (
    NO_EXCHANGE,
    SECRET_FLAG,
    CachedJudge,
    ContentSeeds,
    KeptReplies,
    ReplyStore,
    keyed_digest,
)
from ingest.retention.deletion import delete_exchanges
from ingest.ruler.group import ask_probe
from ingest.ruler.judge import Judge, JudgeReply, replies_kept_for
from ingest.ruler.prompt import reply_schema
from ingest.store.groups import load_group
from ingest.store.rotation import rotate
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database, get_flag
from sidecar.store.keyring import Keyring
from sidecar.store.models import JudgeReplyRow
from support.clock import Clock
from support.fake_judge import FakeJudge, score_by_content
from tests.ingest.judges.conftest import Bench

SETTINGS = JudgeSettings(model="scripted", rubric="Be good.", passes=2)
IDS = ("ab", "cd")
SCHEMA = reply_schema(IDS)
GOOD = json.dumps({"scores": [{"id": one, "explanation": "why", "score": 0.5} for one in IDS]})
SECRET_WORDS = "the-judge-says-tangerine"
MESSAGES = [{"role": "system", "content": "judge"}, {"role": "user", "content": "ab or cd?"}]


def store_of(database: Database, clock: Clock | None = None, **limits: float) -> ReplyStore:
    values = {"max_bytes": 10**6, "max_age_s": 3600.0, **limits}
    return ReplyStore(
        database,
        max_bytes=int(values["max_bytes"]),
        max_age_s=values["max_age_s"],
        clock=clock or Clock(),
    )


def cached(judge: Judge, store: ReplyStore, settings: JudgeSettings = SETTINGS) -> CachedJudge:
    return CachedJudge(judge, settings, KeptReplies(store))


async def ask(judge: Judge, text: str = "ab or cd?", exchange_id: str = NO_EXCHANGE) -> JudgeReply:
    messages = [MESSAGES[0], {"role": "user", "content": text}]
    with replies_kept_for(exchange_id):
        return await judge.complete(messages, SCHEMA)


def rows(database: Database) -> list[JudgeReplyRow]:
    with database.read() as session:
        return list(session.scalars(select(JudgeReplyRow).order_by(JudgeReplyRow.seq)))


@pytest.mark.both_stores
async def test_a_question_is_paid_for_once_also_by_another_process(database: Database) -> None:
    judge = FakeJudge(GOOD)
    first = await ask(cached(judge, store_of(database)))
    second = await ask(cached(judge, store_of(database)))

    assert len(judge.conversations) == 1
    assert (first.cached, first.prompt_tokens) == (False, 100)
    assert (second.text, second.cached) == (first.text, True)
    assert (second.cost_usd, second.prompt_tokens, second.completion_tokens) == (0.0, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"api_base": "http://127.0.0.1:9/v1"},
        {"params": {"temperature": 0.5}},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_what_changes_a_reply_is_asked(database: Database, change: dict[str, Any]) -> None:
    judge = FakeJudge(GOOD)
    await ask(cached(judge, store_of(database)))

    await ask(cached(judge, store_of(database), SETTINGS.model_copy(update=change)))
    await ask(cached(judge, store_of(database)), text="cd or ab?")

    assert len(judge.conversations) == 3


async def test_a_key_and_the_time_limit_are_no_part_of_it(database: Database) -> None:
    judge = FakeJudge(GOOD)
    await ask(cached(judge, store_of(database)))

    other = JudgeSettings.model_validate(
        {"model": "scripted", "api_key": "another", "timeout_s": 1.0}
    )
    assert (await ask(cached(judge, store_of(database), other))).cached


async def test_without_an_owner_or_for_a_probe_the_judge_is_asked(database: Database) -> None:
    judge = FakeJudge(score_by_content({}, otherwise=0.5))
    asked = cached(judge, store_of(database))
    for _ in range(2):
        await asked.complete(MESSAGES, SCHEMA)
        with replies_kept_for(NO_EXCHANGE):
            await ask_probe(asked, SETTINGS, seed=1, on_call=lambda _: None)

    assert len(judge.conversations) == 4
    assert rows(database) == []


@pytest.mark.parametrize("text", ["no scores", '{"scores": []}', GOOD.replace("0.5", "7"), ""])
async def test_a_reply_without_usable_scores_is_not_kept(database: Database, text: str) -> None:
    judge = FakeJudge(text, GOOD)
    asked = cached(judge, store_of(database))

    await ask(asked)
    assert rows(database) == []
    assert (await ask(asked)).text == GOOD


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_only_equal_lists_have_one_digest(one: list[bytes], other: list[bytes]) -> None:
    assert (keyed_digest(b"k", *one) == keyed_digest(b"k", *other)) is (one == other)


@pytest.mark.both_stores
async def test_all_together_stay_under_their_limit_and_the_oldest_go(bench: Bench) -> None:
    judge, limit = FakeJudge(GOOD), 5_000
    asked = cached(judge, store_of(bench.database, max_bytes=limit))
    for number in range(30):
        await ask(asked, f"question {number}")
        held = rows(bench.database)
        assert sum(row.size_bytes for row in held) <= limit

    sizes = {len(row.reply) + 300 for row in rows(bench.database)}
    assert len(rows(bench.database)) == limit // max(sizes)
    assert (await ask(asked, "question 29")).cached
    assert not (await ask(asked, "question 0")).cached
    counted = bench.counts("judge_cache")
    assert counted["stored"] == 31
    assert counted["evicted"] == 31 - len(rows(bench.database))


@pytest.mark.both_stores
async def test_parallel_writers_keep_to_the_limit(database: Database) -> None:
    limit = 5_000
    judges = [cached(FakeJudge(GOOD), store_of(database, max_bytes=limit)) for _ in range(4)]

    await asyncio.gather(*(ask(judges[n % 4], f"question {n}") for n in range(40)))
    for judge in judges:
        await judge._kept.aclose()

    held = rows(database)
    assert 0 < sum(len(row.reply) for row in held) <= limit
    sums = sorted(row.written_bytes for row in held)
    assert all(b - a >= len(GOOD) for a, b in pairwise(sums)), "each its own"


async def test_one_that_is_larger_than_the_limit_is_not_kept(database: Database) -> None:
    asked = cached(FakeJudge(GOOD), store_of(database, max_bytes=100))

    await ask(asked)

    assert rows(database) == []


@pytest.mark.both_stores
async def test_an_old_reply_is_not_given_and_goes_with_the_next(bench: Bench) -> None:
    bench.clock, judge = Clock(), FakeJudge(GOOD)
    asked = cached(judge, store_of(bench.database, bench.clock, max_age_s=100.0))
    await ask(asked, "old")
    bench.clock.now += 101.0

    assert not (await ask(asked, "old")).cached
    bench.clock.now += 101.0
    await ask(asked, "new")

    assert len(rows(bench.database)) == 1
    assert bench.counts("judge_cache") == {"stored": 3, "expired": 1}


@pytest.mark.both_stores
async def test_it_goes_with_its_exchange_and_none_is_kept_of_a_deleted_one(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    bench.put("g2", "good", "bad")
    asked = cached(FakeJudge(GOOD), store_of(bench.database))
    await ask(asked, "one", "x-g1")
    await ask(asked, "two", "x-g2")

    delete_exchanges(bench.database, ["x-g1"], why="forgotten", now=2.0)
    await ask(asked, "three", "x-g1")

    assert [row.exchange_id for row in rows(bench.database)] == ["x-g2"]


async def test_a_damaged_reply_costs_a_call_and_is_replaced(bench: Bench) -> None:
    judge = FakeJudge(GOOD)
    asked = cached(judge, store_of(bench.database))
    for damage in ("", "{", '{"text": 3}', '{"text": "no scores", "cut": false}', "sealed:AAAA"):
        await ask(asked)
        with bench.database.write() as session:
            session.execute(update(JudgeReplyRow).values(reply=damage))
        before = len(judge.conversations)

        assert (await ask(asked)).text == GOOD
        assert len(judge.conversations) == before + 1
        assert (await ask(asked)).cached
    assert bench.counts("judge_cache")["damaged"] >= 3


async def test_a_damaged_time_costs_a_call(database: Database) -> None:
    asked = cached(FakeJudge(GOOD), store_of(database))
    await ask(asked)
    with database.write() as session:
        session.execute(update(JudgeReplyRow).values(at=float(10**12)))

    assert not (await ask(asked)).cached


@contextmanager
def locked(database: Database) -> Iterator[None]:
    path = database.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def test_a_locked_store_costs_a_judgement_two_seconds_at_most(bench: Bench) -> None:
    if not bench.database.url.startswith("sqlite"):
        pytest.skip("the lock is SQLite's")
    store = store_of(bench.database)
    store.secret()
    asked = cached(FakeJudge(GOOD), store)
    loop = asyncio.get_running_loop()
    with locked(bench.database):
        began = loop.time()
        for number in range(20):
            assert (await ask(asked, f"question {number}")).text == GOOD
        took_s = loop.time() - began

    assert took_s < 6.0, "two writes wait, and nobody for them"
    await asked._kept.aclose()
    await ask(asked, "later")
    assert bench.counts("judge_cache") == {"not_stored": 18, "stored": 3}


async def test_a_store_that_is_away_costs_calls_alone(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = FakeJudge(GOOD)
    store = store_of(Database("sqlite:////nowhere/at/all.db"))
    asked = cached(judge, store)

    replies = [await ask(asked) for _ in range(2)]

    assert [one.text for one in replies] == [GOOD, GOOD]
    assert len(judge.conversations) == 2
    assert len(store.secret()) == 32


@pytest.mark.both_stores
async def test_an_encrypted_store_has_nothing_in_clear_and_rotates(database: Database) -> None:
    said = GOOD.replace("why", SECRET_WORDS)
    both = Keyring({"new": b"n" * 32, "old": b"o" * 32})
    with closing(Database(database.url, Keyring({"old": b"o" * 32}))) as old:
        await ask(cached(FakeJudge(said), store_of(old)))
        (row,) = rows(old)
        assert SECRET_WORDS not in row.reply
        with old.read() as session:
            assert (get_flag(session, SECRET_FLAG) or "").startswith("sealed:")
    with closing(Database(database.url, both)) as rotating:
        assert not rotate(rotating).unreadable
        judge = FakeJudge(GOOD)
        assert (await ask(cached(judge, store_of(rotating)))).text == said
    with closing(Database(database.url, Keyring({"new": b"n" * 32}))) as new:
        judge = FakeJudge(GOOD)
        # The secret was drawn under the old key: questions have other digests, and are asked anew.
        assert (await ask(cached(judge, store_of(new)))).text == GOOD
        assert (await ask(cached(judge, store_of(new)))).cached


@pytest.mark.both_stores
def test_seeds_are_the_contents_and_of_one_store_and_of_what_cannot_be_read_too(
    bench: Bench, new_store: Callable[[], Database]
) -> None:
    for name, other in (("g1", "bad"), ("g2", "bad"), ("g3", "worse")):
        bench.put(name, "good", other)
    with bench.database.read() as session:
        groups: list[Any] = [load_group(session, name) for name in ("g1", "g2", "g3")]
    one, same, other_group = groups
    seeds, again = ContentSeeds(store_of(bench.database)), ContentSeeds(store_of(bench.database))

    assert seeds(one) == again(one) == seeds(same)
    others = {ContentSeeds(store_of(store))(one) for store in (new_store(), new_store())}
    drawn = {seeds(one), seeds(other_group), seeds(replace(one, request=b"{")), *others}
    assert len(drawn) == 5
    assert all(0 <= seed < 2**29 for seed in drawn)
