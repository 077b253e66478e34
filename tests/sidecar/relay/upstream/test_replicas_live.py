"""Several vLLMs behind one proxy, over real sockets: who answers when some of them cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.routing.table import RoutingTable
from support.proxy_kit import MoreVllms, StartProxy, Wire

BASE = "smollm2-135m"
CHAMPION = f"{BASE}--v1-0123456789ab"
CANARY = f"{BASE}--v2-0123456789ab"
GONE = json.dumps(
    {
        "error": {
            "message": "The model `x` does not exist. Valid aliases: smollm2-135m.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }
).encode()


class Fleet:
    """Fakes that answer for the models they have, and a proxy before them."""

    def __init__(self, wire: Wire, more_vllms: MoreVllms, start_proxy: StartProxy) -> None:
        self._wire, self._more_vllms, self._start_proxy = wire, more_vllms, start_proxy
        self.fakes: list[Any] = []
        self.running: Any = None
        self.now = 1000.0
        """The time that the clock of ejections shows, in seconds."""

    async def start(
        self, *has: list[str], lists: list[list[str] | None] | None = None, **sections: Any
    ) -> None:
        """has: models of each fake. lists: what each says of them, if not the truth."""
        told = lists if lists is not None else list(has)
        for models, listed in zip(has, told, strict=True):
            self.fakes.append(await self._more_vllms(self._answers(models), listed))
        urls = tuple(self.url(number) for number in range(len(has)))
        sections["serving"] = {"upstreams": urls}
        sections["proxy"] = {"health_interval_s": 60.0, **sections.get("proxy", {})}
        self.running = await self._start_proxy(**sections)
        self.running.proxy._relay._context.monotonic = lambda: self.now
        for number in range(len(has)):
            await self.up(number, 1)

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.fakes[number].port}"

    async def up(self, number: int, value: float) -> None:
        """Wait until the watch has said so of a fake."""
        await self.running.metric_reaches(value, "sidecar_replica_up", replica=self.url(number))

    def _answers(self, models: list[str]) -> Callable[[Any], list[bytes]]:
        wire = self._wire
        body = wire.recording("chat.asked").body

        def script(seen: Any) -> list[bytes]:
            model = json.loads(seen.body)["model"]
            if model not in models:
                return [wire.whole_reply(GONE, "404 Not Found")]
            return [wire.whole_reply(body.replace(BASE.encode(), model.encode(), 1))]

        return script

    def route(self, **changes: Any) -> None:
        self.running.proxy.routing.table = RoutingTable(model=BASE, generation=1, **changes)

    async def ask(self, session: str, path: str = "/v1/chat/completions") -> Any:
        """Status line, headers, body."""
        item = self._wire.recording("chat.plain")
        sent = self._wire.post(item.request, path=path, headers=f"x-sidecar-session: {session}\r\n")
        return self._wire.split(await self.running.send(sent))

    def counts(self) -> list[int]:
        return [len(fake.requests) for fake in self.fakes]

    async def who_answers(self, session: str) -> int:
        before = self.counts()
        line, _, _ = await self.ask(session)
        assert line == "HTTP/1.1 200 OK"
        after = self.counts()
        [number] = [n for n in range(len(before)) if after[n] != before[n]]
        return number

    async def sessions_of(self, number: int, count: int) -> list[str]:
        """Sessions whose home this fake is."""
        found: list[str] = []
        for canary in range(200):
            if await self.who_answers(f"s{canary}") == number:
                found.append(f"s{canary}")
            if len(found) == count:
                return found
        raise AssertionError(f"fake {number} gets no sessions")

    def failovers(self) -> float:
        value: float = self.running.metric("sidecar_upstream_failovers_total")
        return value


@pytest.fixture
def fleet(wire: Wire, more_vllms: MoreVllms, start_proxy: StartProxy) -> Fleet:
    return Fleet(wire, more_vllms, start_proxy)


async def test_a_replica_that_refuses_connections_is_replaced_unseen_and_soon_left_alone(
    fleet: Fleet,
) -> None:
    await fleet.start([BASE], [BASE])
    sessions = await fleet.sessions_of(0, 5)
    await fleet.fakes[0].stop()

    answers = [await fleet.ask(session) for session in sessions]

    assert [line for line, _, _ in answers] == ["HTTP/1.1 200 OK"] * 5
    # Three in a row eject it for 2 s: the fourth and fifth do not even try.
    assert fleet.failovers() == 3
    ejected = fleet.running.metric("sidecar_replica_ejections_total", replica=fleet.url(0))
    assert ejected == 1
    assert fleet.running.metric("sidecar_exchanges_total", outcome="upstream_error") == 0

    fleet.now += 1.9
    await fleet.ask(sessions[0])
    assert fleet.failovers() == 3
    await fleet.fakes[0].start(fleet.fakes[0].port)
    fleet.now += 0.2
    assert [await fleet.who_answers(session) for session in sessions] == [0] * 5


async def test_when_all_refuse_the_client_is_told_once_each_was_tried(fleet: Fleet) -> None:
    await fleet.start([BASE], [BASE], [BASE])
    for fake in fleet.fakes:
        await fake.stop()

    line, _, body = await fleet.ask("s")

    assert line == "HTTP/1.1 502 Bad Gateway"
    assert b"Check that vLLM is running" in body
    assert fleet.failovers() == 2
    assert fleet.running.metric("sidecar_requests_in_flight") == 0


async def test_a_replica_that_is_started_again_serves_before_its_ejection_ends(
    fleet: Fleet,
) -> None:
    """The clock of ejections stands still here: the watch has seen it away and come back."""
    await fleet.start([BASE], [BASE], proxy={"health_interval_s": 0.05})
    sessions = await fleet.sessions_of(0, 3)
    await fleet.fakes[0].stop()
    for _ in range(3):  # until it is ejected, or the watch is quicker
        for session in sessions:
            assert (await fleet.ask(session))[0] == "HTTP/1.1 200 OK"
    await fleet.up(0, 0)

    await fleet.fakes[0].start(fleet.fakes[0].port)
    async with asyncio.timeout(60):
        while await fleet.who_answers(sessions[0]) != 0:
            await asyncio.sleep(0.02)

    assert fleet.running.metric("sidecar_exchanges_total", outcome="upstream_error") == 0


async def test_an_adapter_lost_on_one_replica_is_answered_by_the_other_that_has_it(
    fleet: Fleet,
) -> None:
    await fleet.start([BASE], [BASE, CANARY], lists=[[BASE, CANARY], [BASE, CANARY]])
    [session] = await fleet.sessions_of(0, 1)
    count = len(await fleet.running.captured(sum(fleet.counts())))
    before = fleet.counts()
    fleet.route(canary=CANARY, canary_weight_bp=10_000)

    line, headers, _ = await fleet.ask(session)

    assert (line, headers["x-sidecar-adapter"]) == ("HTTP/1.1 200 OK", CANARY)
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [1, 1]
    assert fleet.running.metric("sidecar_adapter_missing_total", adapter=CANARY) == 1
    exchange = (await fleet.running.captured(count + 1))[-1]
    assert (exchange.adapter, exchange.arm, exchange.fallback_from) == (CANARY, "canary", "")
    assert (exchange.replica, exchange.untrainable_reason) == (fleet.url(1), None)


@pytest.mark.parametrize(
    ("has", "adapter", "arm", "missing"),
    [
        ([BASE, CHAMPION], CHAMPION, "champion", [CANARY]),
        ([BASE], "base", "champion", [CANARY, CHAMPION]),
    ],
)
async def test_an_adapter_that_nobody_has_is_answered_for_and_the_reply_says_by_whom(
    has: list[str], adapter: str, arm: str, missing: list[str], fleet: Fleet
) -> None:
    await fleet.start(has, has)
    fleet.route(champion=CHAMPION, canary=CANARY, canary_weight_bp=10_000)

    line, headers, body = await fleet.ask("s")

    assert (line, headers["x-sidecar-adapter"]) == ("HTTP/1.1 200 OK", adapter)
    assert json.loads(body)["model"] == (BASE if adapter == "base" else adapter)
    assert sum(fleet.counts()) == len(missing) + 1
    for name in missing:
        assert fleet.running.metric("sidecar_adapter_missing_total", adapter=name) == 1
    exchange = (await fleet.running.captured(1))[0]
    assert (exchange.adapter, exchange.arm, exchange.fallback_from) == (adapter, arm, CANARY)
    assert exchange.untrainable_reason is None


async def test_an_adapter_lost_on_one_replica_and_the_other_one_dead_is_answered_for(
    fleet: Fleet,
) -> None:
    """The one that has the adapter cannot be reached; the one that can has another."""
    await fleet.start(
        [BASE, CHAMPION], [BASE, CHAMPION, CANARY], lists=[[BASE, CHAMPION, CANARY]] * 2
    )
    [session] = await fleet.sessions_of(0, 1)
    count = len(await fleet.running.captured(sum(fleet.counts())))
    fleet.route(champion=CHAMPION, canary=CANARY, canary_weight_bp=10_000)
    await fleet.fakes[1].stop()

    line, headers, _ = await fleet.ask(session)

    assert (line, headers["x-sidecar-adapter"]) == ("HTTP/1.1 200 OK", CHAMPION)
    exchange = (await fleet.running.captured(count + 1))[-1]
    assert (exchange.adapter, exchange.fallback_from) == (CHAMPION, CANARY)
    assert exchange.replica == fleet.url(0)
    replicas = fleet.running.proxy._relay._context.replicas.all
    assert [replica.in_flight for replica in replicas] == [0, 0]


async def test_in_flight_of_every_replica_is_zero_when_all_has_ended(
    fleet: Fleet, wire: Wire
) -> None:
    """Also after failovers, fallbacks, refusals and lost clients: replicas are chosen by it."""
    await fleet.start([BASE, CHAMPION], [BASE], lists=[[BASE, CHAMPION], [BASE, CANARY]])
    fleet.route(champion=CHAMPION, canary=CANARY, canary_weight_bp=5_000)
    for number in range(10):
        await fleet.ask(f"s{number}")
    for fake in fleet.fakes:
        fake.script = lambda _: [asyncio.Event()]
    item = wire.recording("chat.plain")
    for number in range(6):
        _, writer = await asyncio.open_connection("127.0.0.1", fleet.running.port)
        writer.write(wire.post(item.request, headers=f"x-sidecar-session: t{number}\r\n"))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.close()
    await fleet.fakes[1].stop()
    await fleet.fakes[0].stop()
    for number in range(4):
        assert (await fleet.ask(f"s{number}"))[0] == "HTTP/1.1 502 Bad Gateway"

    replicas = fleet.running.proxy._relay._context.replicas.all
    async with asyncio.timeout(60):
        while [replica.in_flight for replica in replicas] != [0, 0]:
            await asyncio.sleep(0.01)
    assert fleet.running.metric("sidecar_requests_in_flight") == 0


async def test_replicas_come_and_go_and_no_request_meets_one_that_is_not_ready(
    fleet: Fleet,
) -> None:
    """One that comes is asked for what it has, from its first poll on; one that goes ends what it
    has in flight and leaves the metrics."""
    await fleet.start([BASE, CHAMPION], proxy={"health_interval_s": 0.05})
    fleet.route(champion=CHAMPION)
    watch = fleet.running.proxy._watch
    fleet.fakes.append(await fleet._more_vllms(fleet._answers([BASE]), [BASE]))
    first, second = fleet.url(0), fleet.url(1)
    fleet.fakes[1].healthy = False

    await watch.become([first, second])
    assert {await fleet.who_answers(f"s{number}") for number in range(16)} == {0}

    fleet.fakes[1].healthy = True
    await fleet.up(1, 1)
    # It does not have the champion yet.
    assert {await fleet.who_answers(f"s{number}") for number in range(16)} == {0}
    fleet.fakes[1].script, fleet.fakes[1].models = (
        fleet._answers([BASE, CHAMPION]),
        [BASE, CHAMPION],
    )
    async with asyncio.timeout(60):
        while {await fleet.who_answers(f"s{number}") for number in range(16)} != {0, 1}:
            await asyncio.sleep(0.02)

    [session] = await fleet.sessions_of(0, 1)
    held, answer, before = asyncio.Event(), fleet.fakes[0].script, fleet.counts()[0]
    fleet.fakes[0].script = lambda seen: [held, *answer(seen)]
    asked = asyncio.create_task(fleet.ask(session))
    async with asyncio.timeout(60):
        while fleet.counts()[0] == before:
            await asyncio.sleep(0.005)
    await watch.become([second])
    assert await fleet.who_answers(session) == 1
    held.set()
    line, headers, _ = await asked
    assert (line, headers["x-sidecar-adapter"]) == ("HTTP/1.1 200 OK", CHAMPION)
    registry = fleet.running.proxy.metrics.registry
    assert registry.get_sample_value("sidecar_replica_up", {"replica": first}) is None
    assert registry.get_sample_value("sidecar_replica_up", {"replica": second}) == 1
    assert fleet.running.metric("sidecar_exchanges_total", outcome="upstream_error") == 0
