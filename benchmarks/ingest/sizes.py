"""Bytes and CPU of an exchange in the store, beside rows that are compressed one by one.

The streams are those of the sessions benchmark (multi-turn tasks of `bfcl-eval` and tau2), rendered
by the model's chat template and encoded by its tokenizer. Log-probabilities are drawn at random:
no float32 of a real model is more compressible. The peer stores the same exchanges in the same
tables as zlib bodies and plain arrays, each row by itself, which this project did at first.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from sqlalchemy import func, insert, select, text

from benchmarks.ingest.cells import Json
from benchmarks.ingest.traffic import WEIGHTS
from benchmarks.sessions.mixes import BY_NAME
from benchmarks.sessions.records import SentRequest
from benchmarks.sessions.streams import Data
from ingest.sessions.messages import Place
from ingest.sessions.rows import arrival_of
from ingest.sessions.tree import SessionTree
from ingest.store.exchanges import ExchangeRows, encode_exchanges, insert_exchanges, rows_of
from sidecar.records import Choice, Exchange, Sampling, Timings
from sidecar.store.codec import pack_ids
from sidecar.store.contents import load_contents
from sidecar.store.database import Database
from sidecar.store.models import ChoiceRow, ExchangeRow

MIXES = ("bfcl-base", "tau2-airline", "tau2-retail")
BATCH = 200
COLUMNS = (
    (ExchangeRow, ("request_body", "prompt_token_ids", "base_id", "sampling", "timings")),
    (ChoiceRow, ("message_body", "token_ids", "logprobs")),
)
Placed = tuple[Exchange, Place]


def measure(folder: Path, data: Path, *, requests: int) -> Iterator[tuple[Json, Json]]:
    """Yield the rows of the store and of its peer for each mix. Raises: OSError without data."""
    streams = Data.read(data)
    for mix in MIXES:
        sent = [one for one in BY_NAME[mix].make(streams, "1") if one.surface == "chat"]
        placed = list(_placed(sent[:requests]))
        yield (
            _row(f"deltas: {mix}", folder / f"{mix}-deltas.db", placed, _by_deltas, _read_deltas),
            _row(f"zlib: {mix}", folder / f"{mix}-zlib.db", placed, _one_by_one, _read_each),
        )


def _placed(sent: Sequence[SentRequest]) -> Iterator[Placed]:
    from jinja2 import Environment
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    environment = Environment(autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string((WEIGHTS / "chat_template.jinja").read_text())
    tree, rng = SessionTree(), Random(1)

    def render(request: Json, messages: Sequence[Json], *, prompt: bool) -> str:
        return template.render(
            messages=messages, tools=request.get("tools"), add_generation_prompt=prompt
        )

    def ids_of(rendered: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(rendered, add_special_tokens=False).ids)

    for one in sent:
        request = json.loads(one.request)
        prompt = render(request, request["messages"], prompt=True)
        choices = []
        for index, reply in enumerate(one.replies):
            whole = render(request, [*request["messages"], json.loads(reply)], prompt=False)
            ids = ids_of(whole[len(prompt) :].rstrip("\n"))
            logprobs = tuple(-math.exp(rng.gauss(-3, 3)) for _ in ids)
            choices.append(
                Choice(index=index, message=reply, token_ids=ids, logprobs=logprobs,
                       finish_reason="stop")
            )  # fmt: skip
        exchange = _exchange(one, ids_of(prompt), tuple(choices), rng)
        yield exchange, tree.place(arrival_of(exchange), now=one.at)[0]


def _exchange(
    one: SentRequest, ids: tuple[int, ...], choices: tuple[Choice, ...], rng: Random
) -> Exchange:
    name = "ex_" + hashlib.sha256(one.exchange_id.encode()).hexdigest()[:26]
    return Exchange(
        exchange_id=name,
        surface="chat",
        public_model="model",
        adapter="model--v3-0123456789ab",
        arm="champion",
        propensity=0.9,
        replica="http://127.0.0.1:8000",
        session_key="m:" + hashlib.sha256(one.true_session.encode()).hexdigest()[:32],
        request=one.request,
        choices=choices,
        prompt_token_ids=ids,
        sampling=Sampling(temperature=1.0),
        stream=True,
        status=200,
        outcome="ok",
        timings=Timings(
            started_at=one.at, queue_s=rng.random() / 1e3, first_byte_s=rng.random(),
            per_token_s=rng.random() / 100, total_s=rng.random() * 9, overhead_s=rng.random() / 1e3,
        ),
        completion_tokens=sum(len(choice.token_ids) for choice in choices),
        project=one.project,
        key_id=one.key_id,
        turn_id=name,
        request_bytes=len(one.request),
        reply_bytes=3_000,
    )  # fmt: skip


def _by_deltas(database: Database, batch: Sequence[ExchangeRows], _: Sequence[Placed]) -> float:
    """Store a batch. Returns: the CPU seconds of compressing requests and prompts."""
    with database.read() as session:
        began = time.process_time()
        encode_exchanges(session, batch)
        took = time.process_time() - began
    with database.write() as session:
        insert_exchanges(session, batch)
    return took


def _one_by_one(
    database: Database, batch: Sequence[ExchangeRows], placed: Sequence[Placed]
) -> float:
    began = time.process_time()
    for rows, (exchange, _) in zip(batch, placed, strict=True):
        rows.exchange["request_body"] = zlib.compress(exchange.request, 1)
        rows.exchange["prompt_token_ids"] = pack_ids(exchange.prompt_token_ids)
    took = time.process_time() - began
    for rows, (exchange, _) in zip(batch, placed, strict=True):
        rows.exchange["sampling"] = msgspec.to_builtins(exchange.sampling)
        rows.exchange["timings"] = msgspec.to_builtins(exchange.timings)
        rows.exchange["base_id"] = None
    with database.write() as session:
        session.execute(insert(ExchangeRow), [one.exchange for one in batch])
        session.execute(insert(ChoiceRow), [choice for one in batch for choice in one.choices])
    return took


def _read_deltas(database: Database, names: Sequence[str]) -> int:
    with database.read() as session:
        found = load_contents(session, names).found
    return sum(len(one.request) + len(one.prompt_ids) for one in found.values())


def _read_each(database: Database, names: Sequence[str]) -> int:
    statement = select(ExchangeRow.request_body, ExchangeRow.prompt_token_ids)
    with database.read() as session:
        rows = session.execute(statement.where(ExchangeRow.exchange_id.in_(names)))
        return sum(len(zlib.decompress(body)) + len(ids) for body, ids in rows)


def _row(
    what: str,
    path: Path,
    placed: Sequence[Placed],
    store: Callable[[Database, Sequence[ExchangeRows], Sequence[Placed]], float],
    read: Callable[[Database, Sequence[str]], int],
) -> Json:
    encode_s = store_s = read_s = 0.0
    raw = 0
    with closing(Database(f"sqlite:///{path}")) as database:
        database.upgrade()
        with database.read() as session:
            empty = _file_bytes(session.connection())
        for start in range(0, len(placed), BATCH):
            batch = []
            for exchange, place in placed[start : start + BATCH]:
                rows = rows_of(exchange, now=exchange.timings.started_at)
                rows.put(place, exchange, held_out=False)
                batch.append(rows)
            began = time.process_time()
            encode_s += store(database, batch, placed[start : start + BATCH])
            store_s += time.process_time() - began
    with closing(Database(f"sqlite:///{path}")) as database:  # nothing is in its cache
        names = [exchange.exchange_id for exchange, _ in placed]
        for start in range(0, len(names), BATCH):
            began = time.process_time()
            raw += read(database, names[start : start + BATCH])
            read_s += time.process_time() - began
        with database.read() as session:
            stored = _file_bytes(session.connection()) - empty
            columns = {
                name: (session.scalar(select(func.sum(func.length(getattr(table, name))))) or 0)
                for table, names_of in COLUMNS
                for name in names_of
            }
    expected = sum(len(one.request) + 4 * len(one.prompt_token_ids) for one, _ in placed)
    if raw != expected:
        raise ValueError(f"{what}: {raw} bytes came back, {expected} were stored")
    per = len(placed)
    return {
        "what": what,
        "records": per,
        "bytes": round(stored / per),
        **{name: round(size / per) for name, size in columns.items()},
        "encode_us": round(encode_s / per * 1e6),
        "store_us": round(store_s / per * 1e6),
        "read_us": round(read_s / per * 1e6),
    }


def _file_bytes(connection: Any) -> int:  # Any: SQLAlchemy's connection
    pages: int = connection.execute(text("PRAGMA page_count")).scalar_one()
    size: int = connection.execute(text("PRAGMA page_size")).scalar_one()
    return pages * size
