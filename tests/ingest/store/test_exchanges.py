from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ingest.store.exchanges import load_by_selection, load_exchange, set_selection
from sidecar.errors import StoreError
from sidecar.records import Sampling, Timings, decode_exchange
from sidecar.store.database import Database
from support.ingest_kit import Kit


@pytest.mark.both_stores
def test_an_exchange_comes_back_as_it_went_in(kit: Kit) -> None:
    exchange = kit.exchange(
        "e1",
        adapter="smollm--v3-0123456789ab",
        arm="canary",
        propensity=0.25,
        choices=(kit.choice("one"), kit.choice("two", index=1, finish_reason=None)),
        sampling=Sampling(temperature=0.7, top_k=5, seed=3),
        timings=Timings(
            started_at=2.5, queue_s=0.0625, first_byte_s=0.125, total_s=1.0, overhead_s=0.25
        ),
        stream=True,
        outcome="cut",
        untrainable_reason="no_logprobs",
        completion_tokens=6,
        returned_index=1,
        trace_id="ab" * 16,
        project="p",
        user="Zoë",
        surface="completions",
        key_id="k1",
        turn_id="t1",
        retry_count=2,
        request_bytes=123,
        reply_bytes=456,
        fallback_from="smollm--v4-0123456789ab",
    )

    kit.store(exchange, held_out=True)

    stored = kit.stored("e1")
    assert (stored.exchange, stored.held_out, stored.selection) == (exchange, True, "new")
    with kit.database.read() as session:
        assert load_exchange(session, "nobody") is None


@pytest.mark.both_stores
def test_exchanges_are_found_by_what_selection_said_in_either_order(kit: Kit) -> None:
    kit.store(*(kit.exchange(name) for name in ("a", "b", "c")))
    with kit.database.write() as session:
        set_selection(session, ["b"], "rate")

    with kit.database.read() as session:
        oldest = [s.exchange.exchange_id for s in load_by_selection(session, "new", limit=5)]
        newest = load_by_selection(session, "new", limit=1, newest_first=True)

    assert oldest == ["a", "c"]
    assert [stored.exchange.exchange_id for stored in newest] == ["c"]


def test_a_store_without_its_tables_is_a_store_error(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/empty.db")

    with pytest.raises(StoreError, match="no such table"), database.read() as session:
        load_exchange(session, "a")
    database.close()


def test_a_record_of_the_first_release_on_the_bus_is_still_read(kit: Kit) -> None:
    record = msgspec.to_builtins(kit.exchange("a"), builtin_types=(bytes,))
    newer = ("key_id", "turn_id", "retry_count", "request_bytes", "reply_bytes", "fallback_from")
    for name in newer:
        record.pop(name, None)
    for name in ("queue_s", "per_token_s"):
        record["timings"].pop(name, None)

    assert decode_exchange(msgspec.msgpack.encode(record)) == kit.exchange("a")
