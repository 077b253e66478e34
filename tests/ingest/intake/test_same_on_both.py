"""What one store takes, the other takes too, and both give back the same."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st

from ingest.intake.choose import Sessions
from ingest.intake.consume import Consumed, consume
from ingest.store.exchanges import load_exchange
from sidecar import bounds
from sidecar.records import Choice, Exchange, Sampling, Timings, decode_exchange, encode_exchange
from sidecar.store.database import Database
from support.ingest_kit import MemoryBus, make_exchange
from support.migrated_store import open_migrated
from support.postgres import Databases

EXAMPLES = 80
odd_text = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="\0a\ufffdé😀", max_size=8),
    st.sampled_from(["x" * 32, "x" * 48, "x" * 64, "é" * 65, "x" * 255, "x" * 256, "😀" * 300]),
)
odd_float = st.one_of(st.floats(), st.sampled_from([0.0, 1e308, 5e-324])).map(lambda x: x + 0.0)
"""Without -0.0, which SQLite stores as 0.0 and PostgreSQL as it is: both equal 0.0."""
odd_int = st.one_of(
    st.integers(0, 600),
    st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]),
)
maybe_float = st.none() | odd_float
maybe_int = st.none() | odd_int
choices = st.builds(
    Choice,
    index=odd_int,
    message=st.binary(max_size=8),
    finish_reason=st.none() | odd_text,
    token_ids=st.lists(odd_int, max_size=3).map(tuple),
    logprobs=st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(tuple),
)
TEXTS = ("exchange_id", "adapter", "project", "session_key", "user", "turn_id", "trace_id")
NUMBERS = ("status", "retry_count", "reply_bytes")
exchanges = st.builds(
    Exchange,
    **dict.fromkeys((*TEXTS, "public_model", "replica", "fallback_from"), odd_text),
    **dict.fromkeys((*NUMBERS, "returned_index", "request_bytes"), odd_int),
    surface=st.sampled_from(["chat", "embeddings"]),
    arm=st.just("champion"),
    propensity=odd_float,
    request=st.binary(max_size=8),
    choices=st.lists(choices, max_size=2).map(tuple),
    sampling=st.builds(Sampling, temperature=maybe_float, top_k=maybe_int, seed=maybe_int),
    stream=st.booleans(),
    outcome=st.just("ok"),
    timings=st.builds(Timings, started_at=odd_float, queue_s=maybe_float, total_s=odd_float),
    untrainable_reason=st.none() | odd_text,
    completion_tokens=maybe_int,
)
single_changes: st.SearchStrategy[dict[str, Any]] = st.one_of(
    [st.fixed_dictionaries({name: odd_text}) for name in TEXTS]
    + [st.fixed_dictionaries({name: odd_int}) for name in NUMBERS]
)


records = st.one_of(
    exchanges,
    single_changes.map(lambda changes: make_exchange(**{"exchange_id": "e", **changes})),
)


@given(record=records)
@settings(max_examples=200)
def test_a_record_that_is_plain_needs_no_change(record: Exchange) -> None:
    """The quick check of `bound` passes nothing that the whole one changes or refuses."""
    if bounds._is_plain(record):
        assert bounds._bound(record) == (record, ())


@given(record=records)
@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def _take_alike(stores: list[Database], record: Exchange) -> None:
    payload = encode_exchange(record)
    exchange_id = decode_exchange(payload).exchange_id
    found = [_take(database, payload, exchange_id) for database in stores]

    assert found[0] == found[1]


def _take(database: Database, payload: bytes, exchange_id: str) -> tuple[Consumed, str]:
    """Store the record. Returns: the outcome and what the store gives back; nothing stays."""
    taken = consume(
        MemoryBus([payload]), database, limit=1, sessions=Sessions(held_out_rate=0.0), now=5.0
    )
    with database.write() as session:
        clean = "\0" not in exchange_id
        stored = load_exchange(session, exchange_id) if clean else None
        for table in ("choice", "exchange", "dead_letter"):
            session.connection().exec_driver_sql(f"DELETE FROM {table}")
    return taken, repr(stored)


def test_both_stores_take_records_and_give_them_back_equal(
    tmp_path: Path, postgres: Databases
) -> None:
    url = postgres.new()
    with closing(open_migrated(tmp_path / "s.db")) as here, closing(Database(url)) as there:
        _take_alike([here, there])
    postgres.drop(url)
