"""Takes the strict vLLM and the strict client for the tests of this folder."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.proxy_kit import Target, Wire
from support.strict_peers import Connect, Dial, StrictVllm, Tools


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
async def fake_vllm(wire: Wire) -> AsyncIterator[StrictVllm]:
    """Takes the place of the lenient fake; fails the test when the relay wrote what a strict
    server would not read as the relay meant it."""
    fake = StrictVllm(script=lambda _: [wire.whole_reply(b"{}")])
    await fake.start()
    yield fake
    await fake.stop()
    assert fake.violations == []


@pytest.fixture
async def dial() -> AsyncIterator[Connect]:
    """Connect to a running proxy."""
    made: list[Dial] = []

    async def connect(running: Target, limit: int = 2**16) -> Dial:
        made.append(Dial(*await asyncio.open_connection("127.0.0.1", running.port, limit=limit)))
        return made[-1]

    yield connect
    for one in made:
        one.hang_up()


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """What other tests imported need not be searched after each test here: with torch in the
    process that takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
async def nothing_unhandled() -> AsyncIterator[None]:
    """Whatever a peer sends, no exception may reach the event loop."""
    loop = asyncio.get_running_loop()
    raised: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: raised.append(context))
    yield
    gc.collect()  # a task whose exception nobody fetched says so when it goes
    await asyncio.sleep(0)
    assert [context for context in raised if not _is_of_a_tests_stream(context)] == []


def _is_of_a_tests_stream(context: dict[str, Any]) -> bool:
    """A test's own `StreamWriter` that waited to drain when its connection was reset: asyncio then
    leaves a future behind that nobody reads. The relay has no futures, only tasks."""
    future = context.get("future")
    lost = isinstance(context.get("exception"), ConnectionError)
    return lost and future is not None and not isinstance(future, asyncio.Task)
