"""Checkers: each runs one verifier over the answers of a group, within its limits of time.

`ProcessChecker` runs it in a process that is killed when an answer takes too long: neither a
regular expression nor a stranger's code can be interrupted otherwise. `ingest.verifiers.hook` asks
a service over HTTP.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from ingest.records import Answer
from ingest.verifiers.frames import (
    AnswerSent,
    Found,
    FrameError,
    Loaded,
    NotLoaded,
    Reply,
    Spec,
    Task,
    encode_frame,
    read_reply,
)
from ingest.verifiers.records import Failure, FailureReason, Result, read_result, shown
from sidecar.hiding import is_secret_name
from sidecar.processes.children import own_environment, own_python
from sidecar.processes.parent_death import guarded_command

LOAD_S = 30.0
"""Longest time to start a process and to import a verifier's package; PyTorch takes seconds."""
AGAIN_S = 60.0
"""A verifier that could not be loaded is tried again so long after."""
OWN_PREFIX = "SIDECAR_"


class NotLoadedError(Exception):
    """The verifier cannot be used at all; the message says why."""


class Checker(Protocol):
    """Runs one verifier."""

    async def version(self) -> str:
        """Return the version of the verifier. Raises: NotLoadedError."""

    async def check(self, request: bytes, answers: Sequence[Answer], project: str) -> list[Result]:
        """Check answers to one request. Returns: [G] a result for each; it raises nothing.

        request: the body, JSON. One answer that fails costs no other one its result.
        """


class Processes:
    """At most `count` processes for verifiers, started when they are needed."""

    def __init__(self, count: int, memory_bytes: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._idle: deque[_Child] = deque()
        self._memory_bytes = memory_bytes
        self._closed = False

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[_Child]:
        """Lend a process. One that was left in the middle of a task is killed."""
        async with self._free:
            child = self._idle.pop() if self._idle else _Child(self._memory_bytes)
            try:
                yield child
            finally:
                if child.busy or self._closed:
                    await child.kill()
                self._idle.append(child)

    async def aclose(self) -> None:
        """End all processes."""
        self._closed = True
        while self._idle:
            await self._idle.pop().kill()


class ProcessChecker:
    """Runs a built-in verifier, or code of an installed package, in one of the processes."""

    def __init__(self, spec: Spec, processes: Processes, *, timeout_s: float) -> None:
        self._spec = spec
        self._processes = processes
        self._timeout_s = timeout_s
        self._version = ""
        self._refused: NotLoadedError | None = None
        self._again_at = 0.0

    async def version(self) -> str:
        """See `Checker.version`. It is loaded once; after a failure no sooner than `AGAIN_S`."""
        now = asyncio.get_running_loop().time()
        if self._refused is not None and now < self._again_at:
            raise self._refused
        if not self._version:
            try:
                async with self._processes.lend() as child:
                    self._version = await child.begin(Task(spec=self._spec))
                    child.busy = False
            except NotLoadedError as error:
                self._refused, self._again_at = error, now + AGAIN_S
                raise
        return self._version

    async def check(self, request: bytes, answers: Sequence[Answer], project: str) -> list[Result]:
        """See `Checker.check`."""
        results: list[Result] = []
        async with self._processes.lend() as child:
            while len(results) < len(answers):
                rest = answers[len(results) :]
                task = Task(
                    spec=self._spec,
                    request=request,
                    project=project,
                    answers=tuple(map(_sent, rest)),
                )
                try:
                    await child.begin(task)
                except (NotLoadedError, FrameError) as error:
                    failure = Failure(reason=_why_not_begun(error), why=shown(str(error)))
                    return [*results, *([failure] * len(rest))]
                results += await self._results(child, len(rest))
        return results

    async def _results(self, child: _Child, count: int) -> list[Result]:
        """Read results up to the first failure that ends the process."""
        results: list[Result] = []
        while len(results) < count:
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await child.reply()
            except TimeoutError:
                await child.kill()
                why = f"it took over {self._timeout_s:g} s and was killed"
                return [*results, Failure(reason="timeout", why=why)]
            except FrameError as error:
                await child.kill()
                return [*results, Failure(reason="crashed", why=shown(str(error)))]
            if not isinstance(reply, Found):
                await child.kill()
                return [*results, Failure(reason="crashed", why="it spoke out of turn")]
            results.append(_result(reply))
        child.busy = False
        return results


class _Child:
    """One process; started at its first task, and again after it was killed."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._process: asyncio.subprocess.Process | None = None
        self.busy = False
        """A task was sent whose replies are not all read."""

    async def begin(self, task: Task) -> str:
        """Send a task, and wait until its verifier is loaded. Returns: the verifier's version.

        Raises: NotLoadedError; FrameError when the task is too long.
        """
        frame = await asyncio.to_thread(encode_frame, task)
        process = await self._started()
        self.busy = True
        try:
            async with asyncio.timeout(LOAD_S):
                assert process.stdin is not None
                process.stdin.write(frame)
                await process.stdin.drain()
                reply = await self.reply()
        except TimeoutError:
            await self.kill()
            raise NotLoadedError(f"it was not loaded in {LOAD_S:g} s") from None
        except (FrameError, OSError) as error:
            await self.kill()
            raise NotLoadedError(f"its process ended: {error}") from error
        if isinstance(reply, Loaded):
            return shown(reply.version)
        await self.kill()  # what it has imported half stays in no process
        why = reply.why if isinstance(reply, NotLoaded) else "it spoke out of turn"
        raise NotLoadedError(shown(why))

    async def reply(self) -> Reply:
        """Read the next reply. Raises: FrameError."""
        assert self._process is not None
        assert self._process.stdout is not None
        return await read_reply(self._process.stdout)

    async def kill(self) -> None:
        """End the process and all that it started in its process group."""
        self.busy = False
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):  # it has ended, and its group is empty
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.kill()
        self._process = await asyncio.create_subprocess_exec(
            *guarded_command(),
            *own_python("ingest.verifiers.child", str(self._memory_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=clean_environment(),
            start_new_session=True,  # so that its own children are killed with it
        )
        return self._process


def clean_environment() -> dict[str, str]:
    """Return the environment without the sidecar's settings and without what looks like a key."""
    shown_names = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(OWN_PREFIX) and not is_secret_name(name)
    }
    return own_environment(shown_names)


def _why_not_begun(error: Exception) -> FailureReason:
    return "not_loaded" if isinstance(error, NotLoadedError) else "too_large"


def _sent(answer: Answer) -> AnswerSent:
    return AnswerSent(
        message=answer.message,
        finish_reason=answer.finish_reason,
        tokens=len(answer.token_ids) or None,
    )


def _result(found: Found) -> Result:
    if found.failed is not None:
        return Failure(reason=found.failed, why=shown(found.why))
    return read_result(found.score, found.why)
