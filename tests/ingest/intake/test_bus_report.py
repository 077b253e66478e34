"""What ingest writes about the bus, and that a change of partitions makes it remember anew."""

from __future__ import annotations

from collections.abc import Callable

from ingest.errors import BusError
from ingest.intake.loop import Intake
from sidecar.conditions import read
from sidecar.records import encode_exchange
from sidecar.settings import Groups, Serving, Settings
from support.ingest_kit import Kit, MemoryBus

SETTINGS = Settings(
    serving=Serving(model="smollm", sampling_defaults={}, grammar="as_asked"),
    groups=Groups(held_out_rate=0.0),
)
AWAY = BusError("Kafka at h:9092, topic t: nobody answers")


class Broken(MemoryBus):
    away = False

    def read(self, *_: int) -> list[object]:  # type: ignore[override]
        if self.away:
            raise AWAY
        return []


def intake(kit: Kit, bus: MemoryBus, now: Callable[[], float]) -> Intake:
    return Intake(bus, kit.database, SETTINGS, now=now)


def state(kit: Kit) -> tuple[str, float, object, str] | None:
    with kit.database.read() as session:
        one = read(session, "bus")
    return None if one is None else (one.code, one.at, one.data.get("lag"), one.message)


def test_the_lag_is_written_every_ten_seconds(kit: Kit) -> None:
    times = iter([100.0, 109.0, 110.0])
    bus = kit.MemoryBus([encode_exchange(kit.exchange("a"))])
    worker = intake(kit, bus, lambda: next(times))
    assert state(kit) is None

    worker.step()
    assert state(kit) == ("bus_read", 100.0, 1, "1 record waits on the bus")
    worker.step()
    assert state(kit) == ("bus_read", 100.0, 1, "1 record waits on the bus")
    worker.step()
    assert state(kit) == ("bus_read", 110.0, 0, "0 records wait on the bus")


def test_a_bus_that_is_away_is_written_and_so_is_its_return(kit: Kit) -> None:
    bus = Broken()
    worker = intake(kit, bus, lambda: 100.0)
    bus.away = True

    worker.attempt()
    assert state(kit) == ("bus_away", 100.0, None, f"ingest cannot read the bus: {AWAY}")

    bus.away = False
    worker.attempt()
    assert state(kit) == ("bus_read", 100.0, 0, "0 records wait on the bus")


def test_records_of_another_reader_make_it_read_the_sessions_from_the_store(kit: Kit) -> None:
    messages = [{"role": "user", "content": "first, and long enough to tell apart"}]
    first = kit.exchange("a", request={"model": "m", "messages": messages})
    again = [
        *messages,
        {"role": "assistant", "content": "served"},
        {"role": "user", "content": "second"},
    ]
    second = kit.exchange("b", request={"model": "m", "messages": again})
    bus = kit.MemoryBus([])
    worker = intake(kit, bus, lambda: 100.0)
    worker.step()
    another = intake(kit, kit.MemoryBus([encode_exchange(first)]), lambda: 100.0)
    another.step()

    bus.number = 1
    bus.kept = kit.MemoryBus([encode_exchange(second)]).kept
    worker.step()

    with kit.database.read() as session:
        from sqlalchemy import select

        from sidecar.store.models import ExchangeRow

        rows = {row.exchange_id: row for row in session.scalars(select(ExchangeRow))}
    assert rows["b"].parent_id == "a"
    assert rows["b"].session_id == rows["a"].session_id
