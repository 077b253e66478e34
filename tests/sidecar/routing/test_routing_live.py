"""The routing table of a real store, obeyed by running proxies."""

from __future__ import annotations

import asyncio
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


async def test_a_life_from_nine_to_one_to_all_and_back_under_traffic_without_an_error(
    store: Store, two: list[Any], wire: Wire
) -> None:
    """Each reply is by the arm of its session under the table of then, from the first request that
    is sent after the proxies took it: none strays."""
    weights = (1_000, 3_000, 9_000, 10_000, 0)
    phase, replies, enough = -1, list[tuple[int, str, str, str]](), asyncio.Event()

    async def client(number: int) -> None:
        asked = 0
        while phase < len(weights):
            sent_in, session, asked = phase, f"c{number}-{asked}", asked + 1
            sent = wire.post(REQUEST, headers=f"x-sidecar-session: {session}\r\n")
            line, headers, _ = wire.split(await two[number % 2].send(sent))
            replies.append((sent_in, session, line, headers.get("x-sidecar-adapter", "")))
            if [one[0] for one in replies].count(phase) >= 24:
                enough.set()

    store.write(champion=CHAMPION)
    for running in two:
        running.proxy.lines.source.poll()
    clients = [asyncio.create_task(client(number)) for number in range(6)]
    for at, weight in enumerate((*weights, None)):
        await enough.wait()
        if weight is not None:
            canary = {"canary": CANARY, "canary_weight_bp": weight, "salt": "salt"}
            store.write(champion=CHAMPION, **(canary if weight else {}))
            for running in two:
                running.proxy.lines.source.poll()
        phase = at
        enough.clear()
    phase = len(weights)
    await asyncio.gather(*clients)

    assert {line for _, _, line, _ in replies} == {"HTTP/1.1 200 OK"}
    for sent_in, session, _, adapter in replies:
        # The table is the one of its phase, or of the next when it was changed in mid-request.
        known = [weights[one] for one in (sent_in, sent_in + 1) if 0 <= one < len(weights)]
        inside = [bucket("salt", f"h:{session}") < weight for weight in known]
        assert adapter in {CANARY if one else CHAMPION for one in inside} or sent_in == -1
    after = [adapter for sent_in, _, _, adapter in replies if sent_in == len(weights) - 1]
    assert set(after) == {CHAMPION}, "none strays after the way back"
    assert all([one[0] for one in replies].count(at) >= 24 for at in range(len(weights)))


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
