"""Checkers: each runs one verifier over the answers of a group, within its limits of time.

`ProcessChecker` runs it in a process that is killed when an answer takes too long: neither a
regular expression nor a stranger's code can be interrupted otherwise. `ingest.verifiers.hook` asks
a service over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, BinaryIO, Protocol

import msgspec

from ingest.records import Answer
from ingest.verifiers.built_in import ODD, NotJsonError, read_json
from ingest.verifiers.records import Failure, FailureReason, Result, read_result, shown
from sidecar.hiding import is_secret_name
from sidecar.parent_death import guarded_command
from sidecar.processes import own_environment, own_python

# Does a JSON text fit a schema that a stranger wrote, by bounded work in this process.

MOST_BYTES = 64 * 2**10
"""Longest text and schema that are looked at."""
MOST_KEYWORDS = 2_000
"""Keywords of a schema that are applied to one text: some tenths of a second where each is a
reference, and far less in a usual schema."""
_NOT_APPLIED = frozenset({"pattern", "patternProperties", "uniqueItems"})
"""Keywords whose work the two limits do not bound."""
_ON_PATTERNS = frozenset({"additionalProperties", "unevaluatedProperties"})
"""Keywords that apply the patterns of `patternProperties`."""


class _TooMuchError(Exception):
    """The limit of keywords is reached."""


def fits(text: str, schema: Any) -> bool:  # Any: JSON
    """Return False when a text is no JSON, or does not fit a schema."""
    if len(text) > MOST_BYTES:
        return True
    try:
        value = read_json(text)
    except NotJsonError:
        return False
    try:
        written = json.dumps(schema, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return True
    if len(written) > MOST_BYTES:
        return True
    check = _checker(written)
    return check is None or check(value)


@lru_cache(maxsize=256)
def _checker(written: str) -> Callable[[Any], bool] | None:
    """Return a check by a schema, as JSON; None when it cannot be used."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import extend, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema, left = json.loads(written), [0]
    try:
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
        with_patterns = '"patternProperties"' in written
        counted = {
            name: _nothing
            if name in _NOT_APPLIED or (with_patterns and name in _ON_PATTERNS)
            else _counting(keyword, left)
            for name, keyword in kind.VALIDATORS.items()
        }
        # A registry of our own: the library's default fetches what `$ref` names over the network.
        validator = extend(kind, counted)(schema, registry=Registry())
    except (SchemaError, *ODD):
        return None

    def check(value: Any) -> bool:
        left[0] = MOST_KEYWORDS
        try:
            return bool(validator.is_valid(value))
        except (_TooMuchError, Unresolvable, *ODD):
            return True

    return check


def _nothing(*_: Any) -> Iterator[Any]:
    return iter(())


def _counting(keyword: Any, left: list[int]) -> Callable[..., Iterator[Any]]:
    def apply(*given: Any) -> Iterator[Any]:
        left[0] -= 1
        if left[0] < 0:
            raise _TooMuchError
        yield from keyword(*given) or ()

    return apply


# The protocol between the scoring process and a process in which verifiers run.

MAX_TASK_BYTES = 64 * 2**20
"""Longest task, in bytes: the request of a group and its answers."""
MAX_REPLY_BYTES = 64 * 2**10
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other side sent an invalid frame, or closed."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier is made of."""

    name: str
    kind: str
    params: bytes
    """JSON object: keyword arguments."""
    entry_point: str = ""
    digest: str = ""
    """SHA-256 hex of kind, entry point and parameters."""


class AnswerSent(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a task."""

    message: bytes
    finish_reason: str | None
    tokens: int | None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """parent -> child. Answers to one request, for one verifier; none: it is only loaded."""

    spec: Spec
    request: bytes = b"{}"
    project: str = "default"
    answers: tuple[AnswerSent, ...] = ()


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """child -> parent. The verifier is ready."""

    version: str


class NotLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="not_loaded"):
    """child -> parent. The verifier cannot be made."""

    why: str


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    """child -> parent. What was found of the next answer."""

    score: float | None = None
    why: str = ""
    failed: FailureReason | None = None


Reply = Loaded | NotLoaded | Checked
_encoder = msgspec.msgpack.Encoder()
_task = msgspec.msgpack.Decoder(Task)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Loaded | NotLoaded | Checked)


def encode_frame(record: Task | Reply) -> bytes:
    """Return a record with its length in front. Raises: FrameError when a task is too long."""
    body = _encoder.encode(record)
    if len(body) > MAX_TASK_BYTES:
        raise FrameError(f"{len(body)} bytes; the limit is {MAX_TASK_BYTES}")
    return _LENGTH.pack(len(body)) + body


def read_task(pipe: BinaryIO) -> Task | None:
    """Read the next task; None when the parent has closed the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    return _task.decode(body) if len(body) == length else None


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read the child's next reply. Raises: FrameError when it is none, or the child is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_REPLY_BYTES:
            raise FrameError(f"a reply of {length} bytes")
        return _reply.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise FrameError("the process ended") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(f"no reply: {error}") from error


def plain(value: Any) -> bytes:  # Any: JSON
    """Return a value as JSON whose bytes depend on the value alone."""
    return msgspec.json.encode(value, order="deterministic")


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
                    loads = not isinstance(error, NotLoadedError)
                    reason: FailureReason = "too_large" if loads else "not_loaded"
                    return [
                        *results,
                        *([Failure(reason=reason, why=shown(str(error)))] * len(rest)),
                    ]
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
            if not isinstance(reply, Checked):
                await child.kill()
                return [*results, Failure(reason="crashed", why="it spoke out of turn")]
            if reply.failed is None:
                results.append(read_result(reply.score, reply.why))
            else:
                results.append(Failure(reason=reply.failed, why=shown(reply.why)))
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


def _sent(answer: Answer) -> AnswerSent:
    return AnswerSent(
        message=answer.message,
        finish_reason=answer.finish_reason,
        tokens=len(answer.token_ids) or None,
    )
