"""One contract, run against the fake bus and the real outbox."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from kafka.errors import KafkaTimeoutError

from ingest.errors import BusError
from ingest.intake.bus import Envelope, KafkaBus, open_bus
from sidecar.records import decode_exchange, encode_exchange
from sidecar.settings import Kafka, KafkaUrl, read_bus_url
from support.ingest_kit import FillBus, Kit


def ids(envelopes: Sequence[Envelope]) -> list[str]:
    return [decode_exchange(envelope.payload).exchange_id for envelope in envelopes]


def test_an_empty_bus_gives_nothing_and_has_no_lag(filled_bus: FillBus) -> None:
    bus = filled_bus([])

    assert list(bus.read(10)) == []
    assert bus.lag() == 0


def test_records_come_in_order_and_no_more_than_asked(kit: Kit, filled_bus: FillBus) -> None:
    bus = filled_bus([kit.exchange(name) for name in ("a", "b", "c")])

    assert ids(bus.read(2)) == ["a", "b"]
    assert bus.lag() == 3


def test_a_batch_is_bounded_in_bytes_but_never_empty(kit: Kit, filled_bus: FillBus) -> None:
    exchanges = [kit.exchange(name, request=b"x" * 1_000) for name in ("a", "b", "c")]
    bus = filled_bus(exchanges)
    size = len(encode_exchange(exchanges[0]))

    assert ids(bus.read(10, 2 * size)) == ["a", "b"]
    assert ids(bus.read(10, 2 * size - 1)) == ["a"]
    assert ids(bus.read(10, 1)) == ["a"]
    assert ids(bus.read(10, 3 * size)) == ["a", "b", "c"]


def test_after_a_commit_reading_goes_on_behind_it(kit: Kit, filled_bus: FillBus) -> None:
    bus = filled_bus([kit.exchange(name) for name in ("a", "b", "c")])
    first, second, _ = bus.read(10)
    assert first.position < second.position

    for _ in range(2):
        bus.commit(second.position)

    assert ids(bus.read(10)) == ["c"]
    assert bus.lag() == 1


def test_a_file_that_is_no_outbox_is_a_bus_error(tmp_path: Path) -> None:
    (tmp_path / "outbox.db").write_bytes(b"not a database, not by far" * 50)
    bus = open_bus(f"sqlite:///{tmp_path}/outbox.db")

    for use in (lambda: bus.read(1), lambda: bus.commit(1), bus.lag):
        with pytest.raises(BusError, match="outbox"):
            use()


def test_dead_letters_that_are_away_are_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait of 10 s for each would last longer than the brokers wait for this process."""
    place = read_bus_url("kafka://127.0.0.1:1/exchanges")
    assert isinstance(place, KafkaUrl)
    bus = KafkaBus(place, Kafka())
    tries: list[int] = []

    def away() -> None:
        tries.append(1)
        raise KafkaTimeoutError("the topic is away")

    monkeypatch.setattr(bus, "_dead_letters", away)
    for number in range(200):
        bus.put_aside(Envelope(position=number, payload=b""), "poison")

    assert len(tries) == 1
