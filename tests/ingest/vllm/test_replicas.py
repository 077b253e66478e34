"""Candidates from several replicas: each goes to one that has room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

import pytest
from structlog.testing import capture_logs

from ingest.errors import (
    AdapterGoneError,
    EngineBusyError,
    EngineDownError,
    NoRoomError,
    SamplingError,
)
from ingest.vllm.load import EngineLoad, EngineWork, LoadLimits
from ingest.vllm.sampler import SampleRequest
from ingest.vllm.throttle import MIN_POINTS
from ingest.vllm.watch import WAIT_S, ReplicaSampler
from sidecar.upstreams import Upstreams
from support.dns_names import Names
from support.fake_load import LIMITS, LoadedSampler, ScriptedLoad
from support.fake_sampler import FakeSampler

ASK = SampleRequest(upstream_model="m", chat={}, temperature=1.0, max_tokens=4)
FULL = EngineLoad(running=0, waiting=0, kv_cache_usage=0.99)
QUEUE = EngineLoad(running=8, waiting=1, kv_cache_usage=0.0)


class World:
    """Three replicas that answer under their own names."""

    def __init__(self) -> None:
        self.samplers = {name: FakeSampler(f"by {name}") for name in "abc"}
        self.loads = {name: ScriptedLoad() for name in "abc"}
        self.engine = ReplicaSampler(
            {name: LoadedSampler(self.samplers[name], self.loads[name]) for name in "abc"},
            LIMITS,
            interval_s=0.0,
        )

    def fail(self, name: str, error: Exception) -> None:
        self.samplers[name].errors["m"] = error

    def load(self, **loads: int | EngineLoad | Exception) -> None:
        for name, load in loads.items():
            self.loads[name].users = [load]

    async def said(self) -> str:
        return (await self.engine.sample(ASK)).message.decode()

    @property
    def asked(self) -> list[int]:
        return [len(one.requests) for one in self.samplers.values()]


@pytest.fixture
def world() -> World:
    return World()


async def test_one_at_a_time_they_go_to_the_first_that_has_room(world: World) -> None:
    assert "by a" in await world.said()
    assert "by a" in await world.said()

    assert world.asked == [2, 0, 0]


async def test_many_at_once_are_spread_over_those_with_room(world: World) -> None:
    world.load(b=FULL)
    for sampler in world.samplers.values():
        sampler.hold = asyncio.Event()

    tasks = [asyncio.create_task(world.engine.sample(ASK)) for _ in range(4)]
    async with asyncio.timeout(60):
        while sum(world.asked) < 4:
            await asyncio.sleep(0)

    assert world.asked == [2, 0, 2]
    for sampler in world.samplers.values():
        assert sampler.hold is not None
        sampler.hold.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("load", [9, QUEUE, FULL, SamplingError("NaN")])
async def test_a_replica_without_room_gets_no_candidate(
    world: World, load: int | EngineLoad | Exception
) -> None:
    world.load(a=load)

    assert await world.engine.is_open()
    assert "by b" in await world.said()
    assert world.asked == [0, 1, 0]


async def test_when_users_need_every_replica_none_is_asked(world: World) -> None:
    world.load(a=9, b=QUEUE, c=FULL)

    assert not await world.engine.is_open()
    with pytest.raises(NoRoomError):
        await world.said()
    assert world.asked == [0, 0, 0]


async def test_a_load_that_no_replica_tells_is_an_error(world: World) -> None:
    world.load(a=SamplingError("no metrics"), b=EngineDownError("b"), c=EngineDownError("c"))

    with pytest.raises(SamplingError, match="no metrics"):
        await world.engine.is_open()
    with pytest.raises(NoRoomError, match="no metrics"):
        await world.said()


async def test_an_unknown_load_beside_a_full_one_is_no_room_and_no_error(world: World) -> None:
    world.load(a=SamplingError("no metrics"), b=FULL, c=FULL)

    assert not await world.engine.is_open()


async def test_a_replica_whose_load_becomes_unknown_is_named_once(world: World) -> None:
    world.load(b=SamplingError("no metrics"))

    with capture_logs() as logs:
        for _ in range(3):
            await world.engine.is_open()

    said = [line for line in logs if line["event"] == "sampling_load_unknown"]
    assert [(line["replica"], line["why"]) for line in said] == [("b", "no metrics")]


@pytest.mark.parametrize(
    "error", [EngineDownError("refused"), EngineBusyError("429"), AdapterGoneError("404")]
)
async def test_what_another_may_lack_is_asked_of_the_next(world: World, error: Exception) -> None:
    world.fail("a", error)

    assert "by b" in await world.said()
    world.samplers["a"].errors.clear()
    assert "by a" in await world.said()


async def test_a_bad_answer_is_not_asked_of_another(world: World) -> None:
    world.fail("a", SamplingError("status 500"))

    with pytest.raises(SamplingError, match="500"):
        await world.said()
    assert world.asked == [1, 0, 0]


async def test_when_all_fail_the_first_ones_error_is_raised(world: World) -> None:
    for name in "abc":
        world.fail(name, EngineDownError(name))

    with pytest.raises(EngineDownError, match=r"^a$"):
        await world.said()


def loads_of(users: Iterable[int]) -> Iterator[EngineLoad]:
    """What an engine says whose step takes 10 ms and 1 ms for each running request."""
    work = EngineWork(tokens=0, tokens_s=0, steps=0, ended=0, prefills_s=0)
    for running in users:
        work = replace(
            work,
            steps=work.steps + 50,
            tokens=work.tokens + 50 * running,
            tokens_s=work.tokens_s + 50 * running * (0.010 + 0.001 * running),
        )
        yield EngineLoad(running=running, waiting=0, kv_cache_usage=0.0, work=work)


async def test_no_more_candidates_are_in_flight_than_the_limit_on_the_slow_down_allows() -> None:
    sampler, load = FakeSampler(), ScriptedLoad()
    limits = LoadLimits(requests=48, kv_cache_usage=0.8, max_slowdown=0.2)
    engine = ReplicaSampler({"a": LoadedSampler(sampler, load)}, limits, interval_s=0.0)
    # Users come and go until it is known what a request costs; four of them stay.
    for one in loads_of([*(1 + number % 6 for number in range(MIN_POINTS + 2)), 4]):
        load.users = [one]
        await engine.is_open()
    sampler.hold = asyncio.Event()

    # 2 to 4 of the four are not ours: 20% of (10 + 2..4) ms are 2.4 to 2.8 of 1 ms.
    tasks = [asyncio.create_task(engine.sample(ASK)) for _ in range(8)]
    await asyncio.sleep(2.5 * WAIT_S)
    assert sampler.in_flight == 2

    sampler.hold.set()
    await asyncio.gather(*tasks)
    assert len(sampler.requests) == 8


async def test_replicas_that_come_are_asked_and_those_that_went_are_not(world: World) -> None:
    names = Names("a")

    def opened(url: str) -> LoadedSampler:
        return LoadedSampler(world.samplers[url], world.loads[url])

    engine = ReplicaSampler(
        {"a": opened("a")},
        LIMITS,
        interval_s=0.0,
        upstreams=cast(Upstreams, names),
        opened=opened,
    )
    said = []
    for urls in (("a",), ("b", "a"), ("c",)):
        names.urls = urls
        said.append(json.loads((await engine.sample(ASK)).message)["content"])

    assert said == ["by a", "by b", "by c"]
    await engine.aclose()
