from __future__ import annotations

import struct
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from hypothesis import given
from hypothesis import strategies as st

from ingest.errors import StoreError
from ingest.store.arrays import pack_floats, pack_ids, unpack_floats, unpack_ids
from ingest.store.database import MIGRATIONS, Database
from ingest.store.exchanges import load_by_selection, load_exchange, save_exchange, set_selection
from sidecar.records import Sampling, Timings


def test_an_exchange_comes_back_as_it_went_in(kit) -> None:
    exchange = kit.exchange(
        "e1",
        adapter="smollm--v3-0123456789ab",
        arm="canary",
        propensity=0.25,
        choices=(kit.choice("one"), kit.choice("two", index=1, finish_reason=None)),
        sampling=Sampling(temperature=0.7, top_k=5, seed=3),
        timings=Timings(started_at=2.5, first_byte_s=0.125, total_s=1.0, overhead_s=0.25),
        stream=True,
        outcome="cut",
        untrainable_reason="no_logprobs",
        completion_tokens=6,
        trace_id="ab" * 16,
        project="p",
        user="Zoë",
    )

    with kit.database.write() as session:
        assert save_exchange(session, exchange, held_out=True, now=9.0)

    with kit.database.read() as session:
        stored = load_exchange(session, "e1")
    assert stored is not None
    assert stored.exchange == exchange
    assert stored.held_out is True
    assert stored.selection == "new"


def test_an_exchange_that_is_not_there_is_none(kit) -> None:
    with kit.database.read() as session:
        assert load_exchange(session, "nobody") is None


def test_exchanges_are_found_by_what_selection_said_in_either_order(kit) -> None:
    kit.store(*(kit.exchange(name) for name in ("a", "b", "c")))
    with kit.database.write() as session:
        set_selection(session, ["b"], "rate")

    with kit.database.read() as session:
        oldest = [s.exchange.exchange_id for s in load_by_selection(session, "new", limit=5)]
        newest = load_by_selection(session, "new", limit=1, newest_first=True)

    assert oldest == ["a", "c"]
    assert [stored.exchange.exchange_id for stored in newest] == ["c"]


def test_a_failed_write_transaction_leaves_nothing(kit) -> None:
    def fail_half_way() -> None:
        with kit.database.write() as session:
            save_exchange(session, kit.exchange("a"), held_out=False, now=1.0)
            save_exchange(session, kit.exchange("b", prompt_token_ids=(-(2**40),)), **rest)

    rest = {"held_out": False, "now": 1.0}
    with pytest.raises(OverflowError):
        fail_half_way()

    with kit.database.read() as session:
        assert load_exchange(session, "a") is None


def test_a_store_without_its_tables_is_a_store_error(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/empty.db")

    with pytest.raises(StoreError, match="no such table"), database.read() as session:
        load_exchange(session, "a")
    database.close()


def test_upgrading_an_empty_store_gives_the_models_and_twice_is_once(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()
    database.upgrade()

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.check(config)  # raises when a migration is missing
    database.close()


@given(st.lists(st.integers(min_value=0, max_value=2**31 - 1)))
def test_token_ids_come_back_from_their_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
    assert len(pack_ids(ids)) == 4 * len(ids)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_log_probabilities_come_back_from_their_packing(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == tuple(values)


def test_the_packing_is_little_endian_everywhere() -> None:
    assert pack_ids([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert pack_floats([-0.5]) == struct.pack("<f", -0.5)
