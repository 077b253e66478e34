from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import MetaData, inspect, select, text

from ingest.store.exchanges import load_by_selection, load_exchange, save_exchange, set_selection
from sidecar.errors import StoreError
from sidecar.records import Sampling, Timings, decode_exchange
from sidecar.store.database import MIGRATIONS, Database
from sidecar.store.models import ExchangeRow
from support.ingest_kit import Kit

pytestmark = pytest.mark.both_stores


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

    with kit.database.write() as session:
        assert save_exchange(session, exchange, held_out=True, now=9.0)

    with kit.database.read() as session:
        stored = load_exchange(session, "e1")
    assert stored is not None
    assert stored.exchange == exchange
    assert stored.held_out is True
    assert stored.selection == "new"


def test_an_exchange_that_is_not_there_is_none(kit: Kit) -> None:
    with kit.database.read() as session:
        assert load_exchange(session, "nobody") is None


def test_exchanges_are_found_by_what_selection_said_in_either_order(kit: Kit) -> None:
    kit.store(*(kit.exchange(name) for name in ("a", "b", "c")))
    with kit.database.write() as session:
        set_selection(session, ["b"], "rate")

    with kit.database.read() as session:
        oldest = [s.exchange.exchange_id for s in load_by_selection(session, "new", limit=5)]
        newest = load_by_selection(session, "new", limit=1, newest_first=True)

    assert oldest == ["a", "c"]
    assert [stored.exchange.exchange_id for stored in newest] == ["c"]


def test_a_failed_write_transaction_leaves_nothing(kit: Kit) -> None:
    def fail_half_way() -> None:
        with kit.database.write() as session:
            save_exchange(session, kit.exchange("a"), held_out=False, now=1.0)
            save_exchange(session, broken, held_out=False, now=1.0)

    broken = kit.exchange("b", prompt_token_ids=(-(2**40),))
    with pytest.raises(OverflowError):
        fail_half_way()

    with kit.database.read() as session:
        assert load_exchange(session, "a") is None


def test_a_store_without_its_tables_is_a_store_error(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/empty.db")

    with pytest.raises(StoreError, match="no such table"), database.read() as session:
        load_exchange(session, "a")
    database.close()


def test_an_exchange_of_an_older_store_had_its_first_choice_returned(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        columns = {
            column["name"]: column["type"] for column in inspect(connection).get_columns("exchange")
        }
        values = {
            name: "{}" if "JSON" in str(kind) else b"" if "BLOB" in str(kind) else 1
            for name, kind in columns.items()
        }
        table = ", ".join(f'"{name}"' for name in values)
        places = ", ".join(f":{name}" for name in values)
        connection.execute(text(f"INSERT INTO exchange ({table}) VALUES ({places})"), values)

    database.upgrade()

    with database.read() as session:
        assert session.scalars(select(ExchangeRow.returned_index)).all() == [0]
    database.close()


def test_a_store_of_the_first_schema_is_upgraded_with_what_it_holds(
    empty_store: str, kit: Kit
) -> None:
    old = Database(empty_store)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with old.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    # What the first release stored: only its columns, and timings without the newer members.
    exchange = kit.exchange("a", session_key="m:s", user="u")
    kit.store(exchange)
    timings = {"started_at": 1_000.0, "first_byte_s": None, "total_s": 0.5, "overhead_s": 0.0}
    with kit.database.read() as session, old.engine.begin() as connection:
        first = MetaData()
        first.reflect(connection)
        for name in ("exchange", "choice"):
            table = first.tables[name]
            row = dict(session.execute(select(table)).one()._mapping)
            if name == "exchange":
                row["timings"] = timings
            connection.execute(table.insert().values(row))
            assert not {"turn_id", "fallback_from"} & set(row)

    old.upgrade()

    with old.read() as session:
        stored = load_exchange(session, "a")
        revision = session.scalar(text("SELECT version_num FROM alembic_version"))
    old.close()
    assert stored is not None
    assert stored.exchange.timings.total_s == 0.5
    assert stored.exchange.timings.queue_s is None
    assert stored.exchange.choices == exchange.choices
    assert (stored.exchange.session_key, stored.exchange.user) == ("m:s", "u")
    assert (stored.exchange.turn_id, stored.exchange.key_id) == ("", "")
    assert (stored.exchange.retry_count, stored.exchange.fallback_from) == (0, "")
    assert (stored.exchange.request_bytes, stored.exchange.reply_bytes) == (0, 0)
    assert revision != "0001"


def test_a_record_of_the_first_release_on_the_bus_is_still_read(kit: Kit) -> None:
    record = msgspec.to_builtins(kit.exchange("a"), builtin_types=(bytes,))
    newer = ("key_id", "turn_id", "retry_count", "request_bytes", "reply_bytes", "fallback_from")
    for name in newer:
        record.pop(name, None)
    for name in ("queue_s", "per_token_s"):
        record["timings"].pop(name, None)

    assert decode_exchange(msgspec.msgpack.encode(record)) == kit.exchange("a")
