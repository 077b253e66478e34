"""vLLMs come and go while control runs: each gets the adapters, and is left when it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

import pytest

from deploy.engine.engines import Engines
from deploy.engine.reconcile import registered_path
from deploy.registry.leases import keep_since, read_since
from sidecar.settings import Serving, Settings
from support.adapter_endpoints import MODEL, vllm_in_thread
from support.dns_names import Names
from tests.deploy.conftest import World


@pytest.fixture
async def engines(world: World) -> AsyncIterator[Engines]:
    settings = Settings(serving=Serving(model=MODEL, upstreams=("dns+http://vllm.invalid",)))
    made = Engines(settings, world.database, acts=lambda: True, folder_of=registered_path)
    yield made
    await made.aclose()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_vllm_that_comes_gets_the_adapters_and_one_that_goes_is_left(
    world: World, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = world.register(1)
    world.promote(name)
    with ExitStack() as stack:
        one, first = stack.enter_context(vllm_in_thread())
        other, second = stack.enter_context(vllm_in_thread())
        names = Names(one)
        monkeypatch.setattr(engines, "_serving", names)
        await engines.follow()
        await until(lambda: engines.fleet.view().loaded == {name})
        assert not second.adapters

        names.urls = (one, other)
        await engines.follow()
        assert list(engines.controls) == [one, other]
        await until(lambda: set(second.adapters) == {name})
        await until(lambda: set(engines.fleet.view().replicas) == {one, other})
        keep_since(world.database, one, [name], world.clock())

        names.urls = (other,)
        await engines.follow()
        asked = len(first.seen)
        assert list(engines.controls) == list(engines.fleet.view().replicas) == [other]
        assert [loop.name for loop in engines.loops] == [f"reconcile {other}"]
        with world.database.read() as session:
            assert read_since(session, one) == {}
        before = len(second.seen)
        engines.wake()
        await until(lambda: len(second.seen) > before)
        assert len(first.seen) == asked
