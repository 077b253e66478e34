"""One contract for those who tell the users' load, and one for those who say if it leaves room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from ingest.errors import EngineDownError, SamplingError
from ingest.vllm.sampler import LoadProbe, Room, VllmSampler
from ingest.vllm.throttle import Throttle
from ingest.vllm.watch import ReplicaSampler
from support.fake_load import LIMITS, FakeRoom, LoadedSampler, ScriptedLoad
from support.fake_sampler import FakeSampler
from support.fake_vllm import FakeVllm, load_metrics

ANSWERS = {
    "": load_metrics(running=3),
    "unreadable": b"<html>",
    "nan": load_metrics(running=3, kv_cache=float("nan")),
}
BuildLoad = Callable[..., Awaitable[LoadProbe]]


@pytest.fixture(params=["scripted", "vllm"])
async def build(request: pytest.FixtureRequest) -> AsyncIterator[BuildLoad]:
    """Make a probe of an engine with three requests; or of one in `trouble`: "down",
    "unreadable" or "nan"."""
    close: list[Callable[[], Awaitable[None]]] = []

    async def scripted(trouble: str = "") -> LoadProbe:
        errors = {
            "down": EngineDownError("away"),
            "unreadable": SamplingError("no metrics"),
            "nan": SamplingError("nan"),
        }
        return ScriptedLoad(errors.get(trouble, 3))

    async def vllm(trouble: str = "") -> LoadProbe:
        server = FakeVllm(script=lambda _: [], metrics=ANSWERS.get(trouble))
        await server.start()
        sampler = VllmSampler(f"http://127.0.0.1:{server.port}", timeout_s=30.0)
        close.extend((sampler.aclose, server.stop))
        if trouble == "down":
            await server.stop()
        return sampler

    yield scripted if request.param == "scripted" else vllm
    for step in close:
        await step()


async def test_the_load_is_told_as_often_as_it_is_asked_for(build: BuildLoad) -> None:
    probe = await build()

    for _ in range(2):
        load = await probe.load()
        assert (load.running, load.waiting, load.kv_cache_usage) == (3, 0, 0.0)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [("down", EngineDownError), ("unreadable", SamplingError), ("nan", SamplingError)],
)
async def test_each_trouble_has_its_error(
    build: BuildLoad, trouble: str, error: type[SamplingError]
) -> None:
    with pytest.raises(SamplingError) as raised:
        await (await build(trouble)).load()

    assert type(raised.value) is error


BuildRoom = Callable[[int | Exception], Room]
"""Makes a room for the number of requests that users have in the engine, of 8 that may run."""


@pytest.fixture(params=["fake", "throttle", "replicas"])
def room_at(request: pytest.FixtureRequest) -> BuildRoom:
    def fake(users: int | Exception) -> Room:
        room = FakeRoom()
        room.open = isinstance(users, int) and users < 8
        room.error = users if isinstance(users, Exception) else None
        return room

    def throttle(users: int | Exception) -> Room:
        return Throttle(ScriptedLoad(users), LIMITS, interval_s=0.0)

    def replicas(users: int | Exception) -> Room:
        one = LoadedSampler(FakeSampler(), ScriptedLoad(users))
        return ReplicaSampler({"http://a": one}, LIMITS, interval_s=0.0)

    builders = {"fake": fake, "throttle": throttle, "replicas": replicas}
    return builders[request.param]


async def test_room_is_there_while_users_have_few_requests(room_at: BuildRoom) -> None:
    assert await room_at(0).is_open()
    assert not await room_at(9).is_open()
    with pytest.raises(SamplingError):
        await room_at(SamplingError("no metrics")).is_open()
