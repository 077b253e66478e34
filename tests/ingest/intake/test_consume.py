from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import pytest
from sqlalchemy import func, select

from ingest.intake import consume as consuming
from ingest.intake.bus import BusReader, open_bus
from ingest.intake.choose import Sessions
from ingest.intake.consume import Consumed, consume
from sidecar.capture.outbox import Outbox
from sidecar.errors import StoreError
from sidecar.records import encode_exchange
from sidecar.store.models import ChoiceRow, DeadLetterRow, ExchangeRow
from support.ingest_kit import FillBus, Kit


def take(kit: Kit, bus: BusReader, *, limit: int = 100) -> Consumed:
    sessions = Sessions(held_out_rate=0.0)
    return consume(bus, kit.database, limit=limit, sessions=sessions, now=5.0)


def stored_ids(kit: Kit) -> list[str]:
    return kit.scalars(select(ExchangeRow.exchange_id).order_by(ExchangeRow.seq))


@pytest.mark.both_stores
def test_records_go_from_the_bus_to_the_store_in_order(kit: Kit, filled_bus: FillBus) -> None:
    bus = filled_bus([kit.exchange(name) for name in ("a", "b", "c")])

    assert take(kit, bus, limit=2) == Consumed(stored=2, repeated=0, poison=0)
    assert take(kit, bus, limit=2) == Consumed(stored=1, repeated=0, poison=0)

    assert stored_ids(kit) == ["a", "b", "c"]
    assert bus.lag() == 0
    assert kit.counts("consume") == {"stored": 3}


@pytest.mark.both_stores
def test_consuming_a_record_twice_changes_nothing(kit: Kit) -> None:
    first = kit.exchange("a")
    other = kit.exchange("a", session_key="m:other", choices=())
    kit.take(first)

    again = kit.take(first, other)

    assert again == Consumed(stored=0, repeated=2, poison=0)
    assert kit.counts("consume") == {"stored": 1, "repeated": 2}
    assert kit.stored("a").exchange == first
    assert kit.scalars(select(func.count()).select_from(ChoiceRow)) == [1]


def test_the_tokens_that_users_were_answered_with_are_counted_once(kit: Kit) -> None:
    for _ in range(2):
        kit.take(kit.exchange("a", completion_tokens=7), kit.exchange("b"))

    assert kit.counts("served_tokens") == {"1970-01-01": 7 + 3}  # three ids were recorded


def test_a_store_that_fails_leaves_a_batch_alone(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = kit.MemoryBus([encode_exchange(kit.exchange("a"))])

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("locked")

    with monkeypatch.context() as broken:
        broken.setattr(kit.database, "write", refuse)
        with pytest.raises(StoreError):
            take(kit, bus)
    assert bus.lag() == 1

    assert take(kit, bus) == Consumed(stored=1, repeated=0, poison=0)


def test_large_records_are_stored_in_portions(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record a portion: the second store fails, and the first record does not come again."""
    monkeypatch.setattr(consuming, "PORTION_BYTES", 1)
    bus = kit.MemoryBus([encode_exchange(kit.exchange(name)) for name in ("a", "b", "c")])
    write, times = kit.database.write, iter([True, False])

    def write_once(*, alone: bool) -> object:
        if next(times):
            return write(alone=alone)
        raise StoreError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(kit.database, "write", write_once)
        with pytest.raises(StoreError):
            take(kit, bus)

    assert stored_ids(kit) == ["a"]
    assert bus.lag() == 2
    assert take(kit, bus) == Consumed(stored=2)
    assert kit.counts("consume") == {"stored": 3}


def test_a_record_that_comes_twice_in_a_batch_is_stored_once(kit: Kit) -> None:
    assert kit.take(*map(kit.exchange, "aba")) == Consumed(stored=2, repeated=1)

    assert stored_ids(kit) == ["a", "b"]


def test_memory_is_bounded(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 20,000 tokens takes 60 kB on the bus and 0.8 MB once it is read. The bus gives
    all 24 at once; 4 MB may be in memory."""
    monkeypatch.setattr(consuming, "PORTION_BYTES", 4 * 2**20)
    tokens = tuple(range(1_000, 21_000))
    outbox = Outbox(tmp_path / "outbox.db", max_rows=100)
    outbox.write([kit.exchange(f"e{number}", prompt_token_ids=tokens) for number in range(24)])
    outbox.close()
    bus = open_bus(f"sqlite:///{tmp_path}/outbox.db")
    kit.take(kit.exchange("first"))  # what is made once

    tracemalloc.start()
    try:
        taken = take(kit, bus)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        bus.close()

    assert taken == Consumed(stored=24)
    payloads, one = 24 * 3 * len(tokens), 44 * len(tokens)
    remembered = 24 * 10_000  # sessions and messages
    most = payloads + consuming.PORTION_BYTES + 2 * one + remembered
    assert peak < most
    assert 24 * one > 2 * most, "all at once is far more"


@pytest.mark.parametrize("payload", [b"\xc1 not msgpack", b"", b"\x81\xa1a\x01"])
def test_poison_is_kept_whole_counted_and_holds_nobody_up(kit: Kit, payload: bytes) -> None:
    good = encode_exchange(kit.exchange("a"))
    bus = kit.MemoryBus([payload, good])

    assert take(kit, bus) == Consumed(stored=1, repeated=0, poison=1)

    assert bus.lag() == 0
    assert stored_ids(kit) == ["a"]
    assert kit.counts("consume") == {"stored": 1, "poison": 1}
    (letter,) = kit.scalars(select(DeadLetterRow))
    assert letter.payload == payload
    assert letter.at == 5.0
    assert bus.aside == [(payload, letter.reason)]


def test_poison_that_the_bus_gives_again_is_kept_and_counted_once(kit: Kit) -> None:
    both = [b"\xc1", b"\xc1"]  # of the same bytes, from two places

    first, again = take(kit, kit.MemoryBus(both)), take(kit, kit.MemoryBus(both))

    assert (first, again) == (Consumed(poison=2), Consumed(repeated=2))
    assert kit.counts("consume") == {"poison": 2, "repeated": 2}
    assert kit.scalars(select(func.count()).select_from(DeadLetterRow)) == [2]


def test_values_that_no_row_can_hold_are_poison_and_leave_no_half_record(kit: Kit) -> None:
    huge_id = kit.exchange("huge", prompt_token_ids=(2**31,))
    twins = kit.exchange("twins", choices=(kit.choice("x"), kit.choice("y")))
    huge_status = kit.exchange("status", status=2**63)

    taken = kit.take(huge_id, twins, huge_status, kit.exchange("good"))

    assert taken == Consumed(stored=1, repeated=0, poison=3)

    assert stored_ids(kit) == ["good"]


@pytest.mark.both_stores
def test_a_refused_row_is_put_aside_alone(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    # NaN is stored as NULL, and the column is NOT NULL: without the bounds only the INSERT finds
    # out.
    monkeypatch.setattr(consuming, "bound", lambda exchange: (exchange, ()))
    refused = kit.exchange("nan", propensity=math.nan)
    bus = kit.MemoryBus(
        [encode_exchange(item) for item in (kit.exchange("a"), refused, kit.exchange("b"))]
    )

    assert take(kit, bus) == Consumed(stored=2, repeated=0, poison=1)

    assert stored_ids(kit) == ["a", "b"]
    assert kit.counts("consume") == {"stored": 2, "poison": 1}
    (letter,) = kit.scalars(select(DeadLetterRow))
    assert letter.payload == encode_exchange(refused)
    assert "IntegrityError" in letter.reason
    assert bus.aside == [(letter.payload, letter.reason)]
