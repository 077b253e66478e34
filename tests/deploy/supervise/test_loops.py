"""Control's loops: an error is said and survived, and ends nothing else."""

from __future__ import annotations

import asyncio

from deploy.errors import EngineError
from deploy.supervise import STORE_RETRY_S, Loop, LoopView
from sidecar.errors import StoreError


class Work:
    """Raises what it is told to, else nothing. Counts its turns."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.turns = 0
        self.done = asyncio.Event()

    async def __call__(self) -> None:
        self.turns += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.done.set()


def loop_of(work: Work) -> Loop:
    return Loop("tick", work, lambda: 0.25, clock=lambda: 0.0)


async def test_waits_double_while_the_work_fails_and_end_with_it() -> None:
    loop = loop_of(Work(*[KeyError("steps")] * 8, None, TypeError("again")))

    waits = [await loop.turn() for _ in range(8)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert loop.view == LoopView(failures=8, error="KeyError: 'steps'")

    assert await loop.turn() == 0.25
    assert loop.view == LoopView(failures=0, error=None)
    assert await loop.turn() == 0.5
    assert loop.view == LoopView(failures=1, error="TypeError: again")


async def test_a_store_that_is_away_is_asked_again_soon() -> None:
    loop = loop_of(Work(*[StoreError("locked")] * 9))

    assert [await loop.turn() for _ in range(9)] == [STORE_RETRY_S] * 9
    assert loop.view == LoopView(failures=9, error="StoreError: locked")


async def test_our_own_errors_are_told_without_their_class() -> None:
    loop = loop_of(Work(EngineError("vLLM gave no reply")))

    await loop.turn()

    assert loop.view.error == "vLLM gave no reply"


async def test_a_loop_that_failed_goes_on_when_it_is_woken() -> None:
    work, wake = Work(RecursionError("deep")), asyncio.Event()
    task = asyncio.create_task(Loop("tick", work, lambda: 60.0, wake).run())
    while not work.turns:
        await asyncio.sleep(0)
    wake.set()

    await asyncio.wait_for(work.done.wait(), 60.0)

    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
