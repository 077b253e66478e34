"""The routing table of a real store, obeyed by running proxies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.routing.assignment import CompiledRouting, bucket
from sidecar.routing.table import RoutingTable, encode_table
from sidecar.settings import Proxy
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


async def until_obeyed(proxies: list[Any], wire: Wire, adapter: str) -> None:
    """Ask all until all answer with this adapter."""
    async with asyncio.timeout(60):
        for running in proxies:
            while await adapter_of(running, wire) != adapter:
                await asyncio.sleep(0.01)


def test_the_store_is_polled_five_times_a_second_unless_told_otherwise() -> None:
    """What is obeyed after one poll is then obeyed within half a second."""
    assert Proxy().routing_poll_s == 0.2


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


async def test_a_rollback_to_the_base_is_a_table_like_any_other(
    store: Store, two: list[Any], wire: Wire
) -> None:
    store.write(champion=CHAMPION, canary=CANARY, canary_weight_bp=10_000)
    await until_obeyed(two, wire, CANARY)

    store.write()

    await until_obeyed(two, wire, "base")


async def test_raising_the_weight_takes_sessions_in_and_lets_none_out_in_any_proxy(
    store: Store, two: list[Any], wire: Wire
) -> None:
    sessions = [f"s{number}" for number in range(40)]
    before: set[str] = set()
    counts = []
    for generation, weight in enumerate((0, 1_000, 5_000, 10_000), start=1):
        store.write(champion=CHAMPION, canary=CANARY, canary_weight_bp=weight, salt="salt")
        for running in two:
            await running.metric_reaches(generation, "sidecar_routing_generation")
        arms = [
            {session for session in sessions if await adapter_of(running, wire, session) == CANARY}
            for running in two
        ]
        assert arms[0] == arms[1]
        assert before <= arms[0]
        before = arms[0]
        counts.append(len(before))

    half = [session for session in sessions if bucket("salt", f"h:{session}") < 5_000]
    assert (counts[0], counts[2], counts[3]) == (0, len(half), 40)
    assert 0 < counts[1] < counts[2] < 40


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


async def test_a_store_that_is_deleted_leaves_the_last_table(
    store: Store, two: list[Any], wire: Wire
) -> None:
    store.write(champion=CHAMPION)
    await until_obeyed(two, wire, CHAMPION)
    polls = [
        running.metric("sidecar_routing_failures_total", reason="store_away") for running in two
    ]

    store.delete()
    async with asyncio.timeout(60):
        for running, before in zip(two, polls, strict=True):
            while (
                running.metric("sidecar_routing_failures_total", reason="store_away") < before + 2
            ):
                await asyncio.sleep(0.01)

    assert [await adapter_of(running, wire) for running in two] == [CHAMPION, CHAMPION]
    assert not store.path.exists(), "the proxy does not make a store"


async def test_rubbish_and_an_older_table_are_not_taken(
    store: Store, two: list[Any], wire: Wire
) -> None:
    store.write()
    store.write(champion=CHAMPION)
    await until_obeyed(two, wire, CHAMPION)

    with store.database.write() as session:
        session.get_one(RoutingRow, BASE).body = "{"
    async with asyncio.timeout(60):
        for running in two:
            while running.metric("sidecar_routing_failures_total", reason="unreadable") < 1:
                await asyncio.sleep(0.01)
    assert await adapter_of(two[0], wire) == CHAMPION

    store._generation = 0
    store.write(champion=CANARY)
    await asyncio.sleep(0.3)
    assert [await adapter_of(running, wire) for running in two] == [CHAMPION, CHAMPION]


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
