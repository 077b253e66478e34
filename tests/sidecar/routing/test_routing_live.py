"""The routing table of a real store, obeyed by running proxies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sidecar.routing.assignment import CompiledRouting, bucket
from sidecar.routing.table import RoutingTable, encode_table
from sidecar.store.models import RoutingRow
from support.fake_vllm import FakeVllm
from support.migrated_store import open_migrated
from support.proxy_kit import FreePort, Running, StartProxy, Wire

BASE = "smollm2-135m"
CHAMPION, CANARY = f"{BASE}--v1-0123456789ab", f"{BASE}--v2-0123456789ab"
REQUEST = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi"}]}'


class Store:
    """The store of the proxies under test."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "store.db"
        self.database = open_migrated(self.path)
        self._generation = 0

    def write(self, **changes: Any) -> None:
        self._generation += 1
        table = RoutingTable(model=BASE, generation=self._generation, **changes)
        with self.database.write() as session:
            session.merge(
                RoutingRow(
                    model=BASE,
                    generation=self._generation,
                    body=encode_table(table),
                    updated_at=0.0,
                )
            )

    def delete(self) -> None:
        self.database.close()
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


@pytest.fixture
def store(state_dir: Path) -> Iterator[Store]:
    store = Store(state_dir)
    yield store
    store.database.close()


@pytest.fixture
async def two(start_proxy: StartProxy, free_port: FreePort) -> list[Any]:
    """Two proxies on one store."""
    return [await start_proxy(proxy={"port": free_port()}) for _ in range(2)]


async def adapter_of(running: Running, wire: Wire, session: str = "s") -> str:
    sent = wire.post(REQUEST, headers=f"x-sidecar-session: {session}\r\n")
    line, headers, _ = wire.split(await running.send(sent))
    assert line == "HTTP/1.1 200 OK"
    adapter: str = headers["x-sidecar-adapter"]
    return adapter


async def test_a_new_table_is_obeyed_by_all_proxies_after_one_poll(
    store: Store, two: list[Any], fake_vllm: FakeVllm, wire: Wire
) -> None:
    assert await adapter_of(two[0], wire) == "base"
    for number in range(5):
        adapter = f"{BASE}--v{number}-0123456789ab"
        store.write(champion=adapter)
        for running in two:
            running.proxy.lines.source.poll()
        assert [await adapter_of(running, wire) for running in two] == [adapter, adapter]

    seen = [json.loads(request.body)["model"] for request in fake_vllm.requests]
    assert seen[-1] == f"{BASE}--v4-0123456789ab"


@given(
    st.text(max_size=20),
    st.lists(st.integers(0, 10_000), min_size=2, max_size=5),
    st.text(st.characters(codec="ascii"), max_size=8),
)
def test_the_bucket_and_the_weight_say_who_answers_and_no_raise_moves_a_session_out(
    key: str, weights: list[int], salt: str
) -> None:
    was_in = False
    for weight in sorted(weights):
        table = RoutingTable(
            model="m", champion="m--v1", canary="m--v2", canary_weight_bp=weight, salt=salt
        )
        arms = [(route.adapter, route.arm) for route in CompiledRouting(table).routes(key)]

        behind = [("m--v1", "champion"), ("base", "champion")]
        is_in = bucket(salt, key) < weight
        assert arms == ([("m--v2", "canary"), *behind] if is_in else behind)
        assert not (was_in and not is_in)
        was_in = is_in


async def test_a_session_without_a_name_is_known_by_how_it_opens(
    store: Store, two: list[Any], wire: Wire
) -> None:
    """Turn two of a conversation goes where turn one went, also through another proxy."""
    store.write(champion=CHAMPION, canary=CANARY, canary_weight_bp=5_000, salt="x")
    for running in two:
        await running.metric_reaches(1, "sidecar_routing_generation")
    arms = set()
    for number in range(12):
        first = {"role": "user", "content": f"Question {number}"}
        more = [{"role": "assistant", "content": "A"}, {"role": "user", "content": "And?"}]
        adapters = set()
        for running, messages in zip(two, ([first], [first, *more]), strict=True):
            body = json.dumps({"model": BASE, "messages": messages}).encode()
            _, headers, _ = wire.split(await running.send(wire.post(body)))
            adapters.add(headers["x-sidecar-adapter"])
        assert len(adapters) == 1
        arms |= adapters
    assert arms == {CHAMPION, CANARY}
