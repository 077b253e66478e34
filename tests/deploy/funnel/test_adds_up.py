"""No record is counted twice and none vanishes, whatever happens between a request and a run.

Random traffic goes through the real recorder, outbox, intake, selection, groups and learner's
source. Processes die, records come twice, are damaged, dropped and refused, and retention deletes
what has ended; the funnel must add up after each of it.
"""

from __future__ import annotations

import json
import random
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from sqlalchemy import func, select

from deploy.forgetting import end_runs
from deploy.funnel import Funnel, exchanges_by_selection, groups_by_status, read_funnel, stages_of
from ingest.errors import BusError
from ingest.intake.bus import OutboxBus
from ingest.intake.choose import Sessions, choose_backlog, decide
from ingest.intake.consume import consume
from ingest.records import Answer
from ingest.retention.deletion import delete_exchanges
from ingest.store.groups import append_answers, mark_sampled, mark_scored, set_aside
from learner.runs import source
from sidecar.capture.outbox import DurableCounts, Outbox, OutboxReader, counts_of, growth
from sidecar.capture.recorder import Capture, Limits
from sidecar.metrics.families import MetricTable
from sidecar.metrics.proxy import Metrics
from sidecar.records import Assignment, RawCapture, Timings
from sidecar.relay.context import Accounts
from sidecar.store.database import Database
from sidecar.store.models import AnswerRow, DeadLetterRow, ExchangeRow, GroupRow
from sidecar.store.tables import add_counts
from support.ingest_kit import Kit
from support.migrated_store import open_migrated
from support.stores import NewStore

MODEL = "smollm"
ROUTE = Assignment(adapter="base", arm="champion", propensity=1.0, upstream_model=MODEL)
WAITING_FOR_SELECTION = ("new", "backlog")
ENDED_GROUPS = ("set_aside", "trained", "dropped")


def reply(rng: random.Random) -> bytes:
    """A reply of vLLM; some without token ids, some with nothing in them."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": rng.choice(["yes", "no", ""])},
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": "t", "logprob": -0.5}]},
    }
    if rng.random() < 0.8:
        choice["token_ids"] = [7]
    body = {"model": MODEL, "prompt_token_ids": [1, 2], "choices": [choice]}
    return json.dumps(body | {"usage": {"completion_tokens": 1}}).encode()


class DyingBus(OutboxBus):
    """The embedded bus of an ingest that may be killed before it commits."""

    dies = False

    def commit(self, position: int) -> None:
        if self.dies:
            raise BusError("killed")
        super().commit(position)


class System:
    """All stages over one store, each moved on by a call."""

    def __init__(self, database: Database, folder: Path, seed: int) -> None:
        self.database, self.path, self.rng = (
            database,
            folder / f"outbox-{seed}.db",
            random.Random(seed),
        )
        self.path.unlink(missing_ok=True)
        self.bus = DyingBus(OutboxReader(self.path))
        self.sessions = Sessions(held_out_rate=0.2)
        self.number = 0
        self.now = 1_000.0

    def proxy(self) -> None:
        """A proxy's life: requests of all kinds, a queue and an outbox that are too small."""
        table = MetricTable()
        metrics = Metrics(table)
        accounts = Accounts(metrics)
        outbox = Outbox(self.path, max_rows=12)
        capture = Capture(Limits(max_pending=6), outbox, metrics, None)
        for _ in range(self.rng.randrange(10)):
            self.number += 1
            if self.rng.random() < 0.1:
                metrics.models_unknown.inc()
                continue
            outcome = self.rng.choice(["ok", "ok", "ok", "cut", "upstream_error"])
            accounts.exchange(outcome, ROUTE)  # type: ignore[arg-type]
            if self.rng.random() < 0.2:
                accounts.skipped(self.rng.choice(["not_sampled", "header"]))
                continue
            capture.offer(self.request(outcome))
        capture.start()
        assert capture.stop(60.0)
        told: dict[tuple[str, str], int] = {}
        for _ in range(2):  # the second time there is nothing to tell
            now = counts_of([table.read()])
            with self.database.engine.begin() as connection:
                add_counts(connection, growth(told, now))
            told = now

    def request(self, outcome: Any) -> RawCapture:
        asked = {
            "model": MODEL,
            "temperature": self.rng.choice([0, 1]),
            "messages": [{"role": "user", "content": f"question {self.rng.randrange(30)}"}],
        }
        return RawCapture(
            exchange_id=f"ex-{self.number}",
            public_model=MODEL,
            route=ROUTE,
            replica="http://vllm",
            session_key=f"h:{self.rng.randrange(8)}",
            user="",
            request=json.dumps(asked).encode(),
            reply=(reply(self.rng),),
            streamed=False,
            status=200,
            outcome=outcome,
            timings=Timings(started_at=self.now),
        )

    def damage(self) -> None:
        """A record on the bus that no ingest has stored becomes unreadable.

        One that a killed ingest stored and that is damaged before the bus gives it out again ends
        twice, as stored and as poison: its bytes no longer say whose it was. The funnel then shows
        one record more than entered, as `unreported`.
        """
        if self.bus.dies:
            return
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(
                "UPDATE outbox SET payload = x'c1' WHERE seq = (SELECT MAX(seq) FROM outbox)"
            )

    def ingest(self, *, dies: bool = False) -> None:
        """One batch; an ingest that dies has stored it, and the bus gives it to the next one."""
        self.now += 10.0
        self.bus.dies = dies
        rules = replace(Kit.rules(), max_pending_groups=3, rate=0.9)
        try:
            consume(
                self.bus,
                self.database,
                limit=5,
                sessions=self.sessions,
                now=self.now,
                decide=partial(decide, rules=rules, model=MODEL, now=self.now)
                if self.rng.random() < 0.7
                else None,
            )
        except BusError:
            self.sessions = Sessions(held_out_rate=0.2)
            self.sessions.restore(self.database, now=self.now)
        choose_backlog(self.database, rules, model=MODEL, now=self.now)

    def score(self) -> None:
        """Sampling and judging; some groups come to two workers, of whom one wins."""
        for group_id in self.groups("sampling"):
            with self.database.write() as session:
                answer = Answer(
                    index=1,
                    origin="sampled",
                    message=b'{"content": "other"}',
                    finish_reason="stop",
                    token_ids=(8,),
                    logprobs=(-0.5,),
                    temperature=1.0,
                )
                append_answers(session, group_id, [answer], size=2)
                if self.rng.random() < 0.3:
                    set_aside(session, group_id, "sampling_failed")
                for _ in range(2):
                    mark_sampled(session, group_id)
        for group_id in self.groups("sampled"):
            with self.database.write() as session:
                if self.rng.random() < 0.3:
                    set_aside(session, group_id, "judge_refused")
                for _ in range(2):
                    answers = session.scalars(
                        select(AnswerRow.index).where(AnswerRow.group_id == group_id)
                    ).all()
                    scores = [float(index) for index in answers]
                    mark_scored(session, group_id, scores, ["" for _ in scores], "j", "r", self.now)

    def learn(self) -> None:
        """A run: it trains, drops, or dies and gives its groups back."""
        self.number += 1
        run, scored = f"run-{self.number}", self.groups("scored")
        with self.database.write() as session:
            taken = source.claim(session, run, [*scored, *scored])
        with self.database.write() as session:
            match self.rng.randrange(4):
                case 0:
                    source.mark_trained(session, [*taken, *taken])
                case 1:
                    source.drop(session, run, dict.fromkeys(taken, "no_spread"), before="claimed")
                    source.drop(session, run, dict.fromkeys(taken, "stale"), before="scored")
                case 2:
                    source.give_back(session, run)
                case _:
                    pass  # it still runs

    def retain(self, *, all_of_them: bool) -> None:
        """Retention deletes what has ended, or an operator has all forgotten."""
        with self.database.read() as session:
            waiting = select(GroupRow.exchange_id).where(GroupRow.status.not_in(ENDED_GROUPS))
            names = select(ExchangeRow.exchange_id)
            if not all_of_them:
                names = names.where(
                    ExchangeRow.selection.not_in(WAITING_FOR_SELECTION),
                    ExchangeRow.exchange_id.not_in(waiting),
                )
            gone = session.scalars(names).all()
        delete_exchanges(
            self.database,
            gone,
            why="forgotten" if all_of_them else "expired",
            now=self.now,
            release=end_runs(self.now),
        )

    def groups(self, status: str) -> list[str]:
        with self.database.read() as session:
            return list(session.scalars(select(GroupRow.group_id).where(GroupRow.status == status)))

    def funnel(self) -> Funnel:
        with self.database.read() as session:
            return read_funnel(session, MODEL)

    def rows(self, column: Any) -> dict[str, int]:
        with self.database.read() as session:
            rows = session.execute(select(column, func.count()).group_by(column)).all()
        return dict(rows)


STEPS = ("proxy", "damage", "ingest", "dying ingest", "score", "learn")


@given(steps=st.lists(st.sampled_from(STEPS), max_size=14), seed=st.integers(0, 10_000))
@settings(
    max_examples=12,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),  # explaining takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_entered_a_stage_is_what_left_it_and_what_waits(
    steps: list[str], seed: int, tmp_path: Path
) -> None:
    file = tmp_path / f"store-{seed}.db"
    for old in tmp_path.glob(f"{file.name}*"):
        old.unlink()
    with closing(open_migrated(file)) as database:
        system = System(database, tmp_path, seed)
        for step in ["proxy", "ingest", *steps]:
            match step:
                case "proxy":
                    system.proxy()
                case "damage":
                    system.damage()
                case "ingest":
                    system.ingest()
                case "dying ingest":
                    system.ingest(dies=True)
                case "score":
                    system.score()
                case _:
                    system.learn()
        if system.bus.dies:
            system.ingest()  # what was stored leaves the bus
        found = system.funnel()
        assert_adds_up(found)
        assert_rows_agree(found, system)

        system.retain(all_of_them=False)
        assert system.funnel().stages == found.stages, "what retention deletes stays counted"

        system.retain(all_of_them=True)
        assert system.rows(ExchangeRow.selection) == system.rows(GroupRow.status) == {}
        assert_nothing_waits(found, system.funnel())


def assert_adds_up(found: Funnel) -> None:
    for stage in found.stages:
        ends = stage.passed + sum(stage.ended.values()) + sum(stage.waiting.values())
        assert stage.entered == ends, stage
        assert stage.unreported == 0, stage
    for before, after in (
        ("requests", "bus"),
        ("bus", "selection"),
        ("selection", "sampling"),
        ("sampling", "judging"),
        ("judging", "learning"),
    ):
        assert found.stage(before).passed == found.stage(after).entered


def assert_nothing_waits(before: Funnel, found: Funnel) -> None:
    """All that waited in the store was deleted, and is counted as that."""
    assert_adds_up(found)
    selection = found.stage("selection")
    waited = sum(before.stage("selection").waiting.values())
    assert selection.ended.get("forgotten", 0) == waited
    groups = groups_by_status(found.stages)
    for name, status in (("sampling", "sampling"), ("judging", "sampled"), ("learning", "scored")):
        was, now = before.stage(name), found.stage(name)
        assert (now.passed, now.waiting) == (was.passed, {})
        assert now.ended.get("deleted", 0) == sum(was.waiting.values())
        assert status not in groups
    assert sum(groups.values()) == sum(groups_by_status(before.stages).values())


def assert_rows_agree(found: Funnel, system: System) -> None:
    """The tables, counted from end to end, say the same."""
    assert found.stage("requests").waiting == {}
    waiting = sum(found.stage("bus").waiting.values())
    assert waiting == system.bus.lag()
    assert sum(system.rows(ExchangeRow.selection).values()) == found.stage("bus").passed
    assert found.stage("bus").ended.get("poison", 0) == sum(
        system.rows(DeadLetterRow.digest).values()
    )
    assert exchanges_by_selection(found.stages) == system.rows(ExchangeRow.selection)
    assert groups_by_status(found.stages) == system.rows(GroupRow.status)


def test_groups_that_were_deleted_while_they_waited_wait_no_more() -> None:
    counters = {
        "selection": {"chosen": 9},
        "sampling": {"sampled": 7, "sampling_failed": 1},
        "judging": {"scored": 5, "judge_refused": 1},
        "learn": {"trained": 1, "stale": 1, "answer_masked_top_p": 40, "parent_altered": 2},
        "deleted_groups": {"sampling": 1, "sampled": 1, "scored": 2, "trained": 1},
    }

    stages = {one.name: one for one in stages_of(counters, claimed=1, adapters={})}

    assert stages["sampling"].ended == {"sampling_failed": 1, "deleted": 1}
    assert stages["judging"].ended == {"judge_refused": 1, "deleted": 1}
    assert stages["learning"].ended == {"stale": 1, "deleted": 2}
    assert stages["learning"].waiting == {"claimed": 1}
    assert {one.unreported for one in stages.values() if one.name != "bus"} == {0, 9}
    assert groups_by_status(tuple(stages.values())) == {
        "set_aside": 2,
        "deleted": 4,
        "claimed": 1,
        "trained": 1,
        "dropped": 1,
    }


@pytest.mark.both_stores
def test_a_proxy_tells_the_store_what_its_metrics_grew_by(new_store: NewStore) -> None:
    database, table = new_store(), MetricTable()
    metrics = Metrics(table)
    counts = DurableCounts(database.url, lambda: [table.read()], interval_s=0.01)
    metrics.captures_kept.inc(2)
    metrics.exchanges.labels("ok").inc(4)
    metrics.models_unknown.inc(3)
    metrics.forwarding.expired.inc(2)
    counts.start()
    metrics.captures_lost.labels("queue_full").inc()
    metrics.captures_skipped.labels("not_sampled").inc()
    metrics.bodies_unreadable.labels("not_json").inc()
    counts.stop()

    with database.read() as session:
        found = read_funnel(session, MODEL)
    assert found.counters == {
        "capture": {"kept": 2, "lost_queue_full": 1, "skipped_not_sampled": 1},
        "requests": {"ok": 4, "refused_unknown_model": 3, "refused_not_json": 1},
        "retention": {"proxy_dead_letters": 2},
    }
    requests = found.stage("requests")
    assert (requests.entered, requests.passed, requests.waiting) == (8, 2, {})
    assert requests.ended == {
        "lost_queue_full": 1,
        "skipped_not_sampled": 1,
        "refused_unknown_model": 3,
        "refused_not_json": 1,
    }


def test_counts_wait_for_a_store_that_is_away(tmp_path: Path) -> None:
    table = MetricTable()
    metrics = Metrics(table)
    reads, there = 0, threading.Event()

    def read() -> list[dict[bytes, tuple[float, ...]]]:
        nonlocal reads
        reads += 1
        if reads == 3:
            open_migrated(tmp_path / "store.db").close()
            there.set()
        return [table.read()]

    counts = DurableCounts(f"sqlite:///{tmp_path}/store.db", read, interval_s=0.01)
    metrics.captures_kept.inc(5)
    counts.start()
    assert there.wait(60)
    counts.stop()

    with (
        closing(Database(f"sqlite:///{tmp_path}/store.db")) as database,
        database.read() as session,
    ):
        assert read_funnel(session, MODEL).counters == {"capture": {"kept": 5}}
