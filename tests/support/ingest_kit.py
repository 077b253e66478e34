"""Records, stores and fakes for the tests of intake and sampling."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from ingest.grouping.request import EngineFacts
from ingest.grouping.selection import Rules, group_id_of
from ingest.intake.bus import BATCH_BYTES, BusReader, Envelope
from ingest.intake.choose import Sessions, choose_new
from ingest.intake.consume import Consumed, consume
from ingest.records import Group
from ingest.sessions.messages import Place
from ingest.store.bases import encode_children, store_children
from ingest.store.exchanges import StoredExchange, load_exchange, save_exchange
from ingest.store.groups import load_group
from sidecar.feedback import Feedback, encode_feedback
from sidecar.forwarding.process import Tally
from sidecar.forwarding.sender import ensure_topics
from sidecar.records import Choice, Exchange, Sampling, Timings, encode_exchange
from sidecar.routing.table import RoutingTable, encode_table
from sidecar.settings import Kafka as KafkaSettings, KafkaUrl, read_bus_url
from sidecar.store.contents import content_cache
from sidecar.store.database import Database
from sidecar.store.models import (
    AnswerRow,
    ChoiceRow,
    CounterRow,
    ExchangeRow,
    GroupRow,
    RoutingRow,
    SignalRow,
    WatchedAnswerRow,
)
from support.fake_load import FakeRoom, ScriptedLoad
from support.fake_sampler import FakeSampler
from support.kafka_broker import UP_S, Broker
from support.stores import NewStore

PROMPT = (1, 9, 9, 4)
REQUEST = {"model": "smollm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}


def message(content: str) -> bytes:
    return json.dumps({"role": "assistant", "content": content}).encode()


def make_choice(content: str = "served", **changes: Any) -> Choice:
    plain = Choice(
        index=0,
        message=message(content),
        finish_reason="stop",
        token_ids=(5, 6, 2),
        logprobs=(-0.5, -0.25, -1.0),
    )
    return msgspec.structs.replace(plain, **changes)


def make_exchange(exchange_id: str = "e1", **changes: Any) -> Exchange:
    """A served exchange that selection likes; `request` may be given as a dict."""
    if isinstance(changes.get("request"), dict):
        changes["request"] = json.dumps(changes["request"]).encode()
    plain = Exchange(
        exchange_id=exchange_id,
        surface="chat",
        public_model="smollm",
        adapter="base",
        arm="champion",
        propensity=1.0,
        replica="http://127.0.0.1:8000",
        session_key=f"m:{exchange_id}",
        request=json.dumps(REQUEST).encode(),
        choices=(make_choice(),),
        prompt_token_ids=PROMPT,
        sampling=Sampling(temperature=1.0, max_tokens=16),
        stream=False,
        status=200,
        outcome="ok",
        timings=Timings(started_at=1_000.0),
    )
    return msgspec.structs.replace(plain, **changes)


def make_place(exchange_id: str, parent: str | None = None, **changes: Any) -> Place:
    """The place of an exchange in the session "s"."""
    plain = Place(
        exchange_id=exchange_id,
        session="s",
        parent=parent,
        turn=0,
        branch=0,
        segment=0,
        how="answered" if parent else "root",
    )
    return replace(plain, **changes)


def make_feedback(name: str, target: str = "e1", **changes: Any) -> Feedback:
    """Good feedback on an exchange, by a user of the default project."""
    plain = Feedback(
        feedback_id=name,
        kind="feedback",
        target_kind="exchange",
        target=target,
        project="default",
        source="user:bob",
        received_at=1.0,
        score=1.0,
    )
    return msgspec.structs.replace(plain, **changes)


class MemoryBus:
    """A bus in memory: what is committed is gone, what is not is read again."""

    def __init__(self, payloads: Sequence[bytes] = ()) -> None:
        self.kept = [Envelope(position=n, payload=p) for n, p in enumerate(payloads, start=1)]
        self.aside: list[tuple[bytes, str]] = []
        self.number = 0
        """What `epoch` returns."""

    def epoch(self) -> int:
        return self.number

    def read(self, limit: int, limit_bytes: int = BATCH_BYTES) -> Sequence[Envelope]:
        sizes = accumulate(len(envelope.payload) for envelope in self.kept[:limit])
        return self.kept[: max(1, sum(size <= limit_bytes for size in sizes))]

    def commit(self, position: int) -> None:
        self.kept = [envelope for envelope in self.kept if envelope.position > position]

    def lag(self) -> int:
        return len(self.kept)

    def put_aside(self, envelope: Envelope, reason: str) -> None:
        self.aside.append((envelope.payload, reason))

    def close(self) -> None:
        """Nothing to let go of."""


def rebase_children(session: Session, gone: Collection[str], *, limit: int = 256) -> int:
    """Encode anew those that stand on exchanges that will be deleted, in the transaction that
    deletes them. Returns: how many; 0: none is left."""
    done = store_children(session, encode_children(session, gone, {}, limit=limit), gone)
    for one in gone:
        content_cache(session).drop(one)
    return done


class Kit:
    """A store, and short ways to fill it and to look into it."""

    exchange = staticmethod(make_exchange)
    choice = staticmethod(make_choice)
    message = staticmethod(message)
    MemoryBus = MemoryBus
    FakeSampler = FakeSampler
    FakeRoom = FakeRoom
    ScriptedLoad = ScriptedLoad

    def __init__(self, database: Database) -> None:
        self.database = database

    @staticmethod
    def rules(**changes: Any) -> Rules:
        plain = Rules(
            size=4,
            rate=1.0,
            max_groups_per_session=4,
            max_pending_groups=64,
            logprobs_mode="processed_logprobs",
            facts=EngineFacts(defaults=frozenset(), grammar="as_asked"),
        )
        return replace(plain, **changes)

    def store(
        self,
        *exchanges: Exchange,
        held_out: bool = False,
        now: float = 1.0,
        place: Place | None = None,
    ) -> None:
        with self.database.write() as session:
            for exchange in exchanges:
                assert save_exchange(session, exchange, held_out=held_out, now=now, place=place)

    def take(
        self,
        *records: Exchange | Feedback,
        sessions: Sessions | None = None,
        now: float = 5.0,
        **more: Any,
    ) -> Consumed:
        """Consume these records from a bus in memory."""
        bus = MemoryBus([payload for _, payload in packed(records)])
        sessions = sessions or Sessions(held_out_rate=0.0)
        return consume(bus, self.database, limit=100, sessions=sessions, now=now, **more)

    def choose(self, *exchanges: Exchange, **rules: Any) -> list[str]:
        """Store exchanges and make groups of them. Returns: the groups' ids."""
        self.store(*exchanges)
        choose_new(self.database, self.rules(**rules), model="smollm", limit=100, now=2.0)
        return [group_id_of(exchange.exchange_id) for exchange in exchanges]

    def route(self, *, champion: str, canary: str | None = None) -> None:
        """Write the routing table."""
        table = RoutingTable(model="smollm", champion=champion, canary=canary)
        row = RoutingRow(model="smollm", generation=1, body=encode_table(table), updated_at=1.0)
        with self.database.write() as session:
            session.merge(row)

    def counts(self, stage: str) -> dict[str, int]:
        """The durable counters of a stage, without those at 0."""
        with self.database.read() as session:
            rows = session.scalars(select(CounterRow).where(CounterRow.stage == stage))
            return {row.reason: row.count for row in rows if row.count}

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Nothing in the store at the start: for tests that run many examples on one."""
        with self.database.write() as session:
            for table in (
                AnswerRow,
                GroupRow,
                ChoiceRow,
                ExchangeRow,
                CounterRow,
                SignalRow,
                WatchedAnswerRow,
            ):
                session.execute(delete(table))
        yield

    def group_count(self) -> int:
        with self.database.read() as session:
            return session.scalar(select(func.count()).select_from(GroupRow)) or 0

    def scalars(self, statement: Any) -> list[Any]:
        """What a SELECT of one column or table finds."""
        with self.database.read() as session:
            return list(session.scalars(statement))

    def stored(self, exchange_id: str) -> StoredExchange:
        with self.database.read() as session:
            found = load_exchange(session, exchange_id)
        assert found is not None
        return found

    def group(self, group_id: str) -> Group:
        with self.database.read() as session:
            found = load_group(session, group_id)
        assert found is not None
        return found

    def row(self, group_id: str) -> GroupRow:
        with self.database.read() as session:
            return session.scalars(select(GroupRow).where(GroupRow.group_id == group_id)).one()


@pytest.fixture
def kit(new_store: NewStore) -> Kit:
    return Kit(new_store())


FillBus = Callable[[Sequence[Exchange | Feedback]], BusReader]


@pytest.fixture(params=["memory", "outbox", "kafka"])
def filled_bus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FillBus]:
    """A function that makes a bus, fake or real, holding these exchanges."""
    from ingest.intake.bus import open_bus
    from sidecar.capture.outbox import Outbox

    opened: list[BusReader] = []
    broker: Broker | None = None
    if request.param == "kafka":
        broker = request.getfixturevalue("broker")

    def fill(exchanges: Sequence[Exchange | Feedback]) -> BusReader:
        bus: BusReader
        if request.param == "memory":
            bus = MemoryBus([payload for _, payload in packed(exchanges)])
        elif broker is not None:
            url = broker.new_url()
            forward(url, exchanges, tmp_path)
            bus = open_bus(url)
            settle(bus, len(exchanges))
        else:
            outbox = Outbox(tmp_path / "outbox.db", max_rows=1_000)
            outbox.append(packed(exchanges))
            outbox.close()
            bus = open_bus(f"sqlite:///{tmp_path}/outbox.db")
        opened.append(bus)
        return bus

    yield fill
    for bus in opened:
        bus.close()


def packed(records: Sequence[Exchange | Feedback]) -> list[tuple[str, bytes]]:
    """Each record's id, and its payload on the bus."""
    return [
        (one.feedback_id, encode_feedback(one))
        if isinstance(one, Feedback)
        else (one.exchange_id, encode_exchange(one))
        for one in records
    ]


def settle(bus: BusReader, count: int) -> None:
    """Wait until the brokers have given this reader the partitions and `count` records."""
    deadline = time.monotonic() + UP_S
    while not bus.epoch() or len(bus.read(max(1, count))) < count:
        assert time.monotonic() < deadline


def forward(
    url: str, exchanges: Sequence[Exchange | Feedback], folder: Path, **kafka: Any
) -> Tally:
    """Send exchanges by way of an outbox, as a proxy does. Returns: what was counted."""
    from sidecar.capture.outbox import Outbox, OutboxReader
    from sidecar.forwarding.process import Forwarder
    from sidecar.forwarding.sender import FILE, DeadLetters, KafkaSender

    outbox = Outbox(folder / "sent.db", max_rows=100_000)
    outbox.append(packed(exchanges))
    outbox.close()
    settings, place = KafkaSettings(**{"partitions": 2, **kafka}), read_bus_url(url)
    assert isinstance(place, KafkaUrl)
    ensure_topics(place, settings)
    tally = Tally()
    reader = OutboxReader(folder / "sent.db")
    forwarder = Forwarder(
        reader,
        lambda: KafkaSender(place, settings),
        DeadLetters(folder / FILE),
        tally,
        partition_by=settings.partition_by,
    )
    try:
        while forwarder.step():
            continue
    finally:
        forwarder.close()
        reader.close()
    return tally
