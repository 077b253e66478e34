"""A strict vLLM and a strict client: a second reading of every byte that the relay writes.

The relay parses with llhttp and writes its own heads; here h11 and a grammar read them again. What
the two do not agree on is a smuggled request, so every test of tests/sidecar/hardening fails on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
import termios
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import h11

from support.fake_vllm import ScriptedServer, Step

REQUEST_LINE = re.compile(rb"[A-Z]+ /[!-~]* HTTP/1\.1")
FIELD_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+: ?[\t -~\x80-\xff]*")
"""RFC 9110 section 5: a token, and a value without a control byte but the tab."""
STATUS_LINE = re.compile(rb"HTTP/1\.1 [1-5][0-9]{2} [\t -~\x80-\xff]*")
LARGEST_HEAD = 256 * 1024
WATCH = b"learning-sidecar-watch"
OWN_QUESTIONS = (b"/health", b"/v1/models")
"""The watch over the replicas and the application ask them, beside the relay."""
UNAUTHORIZED = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\n{}"
Headers = tuple[tuple[bytes, bytes], ...]


def first(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def strict_head(head: bytes, first_line: re.Pattern[bytes]) -> None:
    """Raises AssertionError when a head is not of the grammar's letter."""
    line, *fields = head.split(b"\r\n")
    assert first_line.fullmatch(line), line
    for item in fields:
        assert FIELD_LINE.fullmatch(item), item


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, as a strict server reads it."""

    method: bytes
    target: bytes
    headers: Headers
    """Names in lower case."""
    body: bytes
    connection: int

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)


@dataclass
class StrictVllm(ScriptedServer[Seen]):
    """Plays a script, and reads what comes by the letter of RFC 9112."""

    violations: list[str] = field(default_factory=list)
    open_connections: int = 0
    read_bytes: int = 0
    reading: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: reads nothing."""
    piecewise: bool = False
    """Every step is its own read for the relay; all are bytes."""
    early_reply: bytes = b""
    """Sent as soon as a head is there, before the body is read."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, port: int = 0) -> None:
        self.reading.set()
        await super().start(port)

    async def stop(self) -> None:
        await super().stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.writers.append(writer)
        self.open_connections += 1
        try:
            # The server stops, and with it the wait of a script.
            with contextlib.suppress(asyncio.CancelledError):
                await self._converse(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.client_left.set()
        finally:
            self.open_connections -= 1
            self.writers.remove(writer)
            self._tasks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        while (seen := await self._read(reader, writer, number)) is not None:
            if seen.target == b"/health":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            if seen.header(b"user-agent") == WATCH:
                writer.write(UNAUTHORIZED)
                continue
            if number == 0:
                number = self.connections = self.connections + 1
            self.requests.append(Seen(seen.method, seen.target, seen.headers, seen.body, number))
            if not self.early_reply:
                await self._play(self.script(self.requests[-1]), reader, writer)

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> Seen | None:
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=LARGEST_HEAD)
        raw, head_checked = b"", False
        request: h11.Request | None = None
        body: list[bytes] = []
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                self.violations.append(f"{error}: {raw[:400]!r}")
                raise ConnectionAbortedError from error
            if event is h11.NEED_DATA:
                await self.reading.wait()
                data = await reader.read(65_536)
                self.read_bytes += len(data)
                if not data and request is None and not raw:
                    return None
                if not data:
                    raise ConnectionResetError
                raw = raw + data if request is None else raw
                parser.receive_data(data)
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
            if request is not None and not head_checked:
                head_checked = True
                if request.target in OWN_QUESTIONS:
                    continue
                self._check_head(raw.partition(b"\r\n\r\n")[0], request)
                writer.write(self.early_reply)
        assert request is not None
        if parser.trailing_data[0]:
            self.violations.append(f"bytes behind the request: {parser.trailing_data[0][:200]!r}")
        headers = tuple((bytes(name), bytes(value)) for name, value in request.headers)
        return Seen(bytes(request.method), bytes(request.target), headers, b"".join(body), number)

    def _check_head(self, head: bytes, request: h11.Request) -> None:
        try:
            strict_head(head, REQUEST_LINE)
        except AssertionError as error:
            self.violations.append(f"not of the grammar: {error}")
        names = [bytes(name) for name, _ in request.headers]
        for once in (b"host", b"content-length"):
            if names.count(once) > 1:
                self.violations.append(f"{once!r} came twice")
        for never in (b"transfer-encoding", b"connection", b"upgrade", b"expect"):
            if never in names:
                self.violations.append(f"{never!r} was passed on")

    async def _play(
        self, steps: Sequence[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.piecewise:
            with other_end(writer) as sock:
                for piece in steps:
                    assert isinstance(piece, bytes)
                    writer.write(piece)
                    await taken(sock)
            return
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
                self.written_bytes += len(step)
            elif isinstance(step, asyncio.Event):
                await self._wait(step, reader)
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif step == "half-close":
                writer.write_eof()
            else:
                if step == "reset":
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    writer.transport.abort()
                raise ConnectionAbortedError(step)


Ends = tuple[tuple[str, int], tuple[str, int]]
"""Addresses of a connected socket: its own and its peer's, as (host, port)."""


def own_sockets() -> list[tuple[Ends, socket.socket]]:
    """Duplicates of all connected TCP sockets of this process: the relay's, the fake's, ours.

    The addresses are read once: a connection may end at any moment.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        ends = _ends(sock)
        if ends is None:
            sock.close()
        else:
            found.append((ends, sock))
    return found


def _ends(sock: socket.socket) -> Ends | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return sock.getsockname()[:2], sock.getpeername()[:2]
    except OSError:  # not connected
        return None


def other_end(writer: asyncio.StreamWriter) -> socket.socket:
    """The socket that the relay holds of this connection. Raises LookupError."""
    here, there = (writer.get_extra_info(name)[:2] for name in ("sockname", "peername"))
    found = None
    for ends, sock in own_sockets():
        if found is None and ends == (there, here):
            found = sock
        else:
            sock.close()
    if found is None:
        raise LookupError("the relay holds no such connection")
    return found


def in_kernel(receiver: socket.socket, sender: socket.socket) -> int:
    """Bytes that the sender has written and the receiver has not read."""
    unread, unsent = bytearray(4), bytearray(4)
    fcntl.ioctl(receiver.fileno(), termios.FIONREAD, unread)
    fcntl.ioctl(sender.fileno(), termios.TIOCOUTQ, unsent)
    return int.from_bytes(unread, "little") + int.from_bytes(unsent, "little")


async def taken(sock: socket.socket) -> None:
    """Wait until this end has read all that was sent to it, so that what is sent next begins a read
    of its own. Asks the kernel: a sleep would be slower and would prove nothing."""
    waiting = bytearray(4)
    while True:
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, waiting)
        if waiting == b"\0\0\0\0":
            return
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply, as a strict client reads it."""

    status: int
    headers: Headers
    body: bytes
    interim: tuple[int, ...] = ()

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)


REQUEST = b'{"model":"smollm2-135m","messages":[]}'


def post(body: bytes = REQUEST, *fields: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    lines = (b"POST %b HTTP/1.1" % path, b"Host: x", *fields, b"Content-Length: %d" % len(body))
    return b"\r\n".join((*lines, b"", body))


class Dial:
    """One connection of a client: writes raw bytes, reads strictly."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._rest = b""
        self._at_end = False

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def say_apart(self, *pieces: bytes) -> None:
        """Each piece is one read of the relay."""
        with other_end(self.writer) as sock:
            for piece in pieces:
                self.writer.write(piece)
                await self.writer.drain()
                await taken(sock)

    async def hear(self, method: bytes = b"POST", within_s: float = 60.0) -> Reply:
        """The next reply. Raises: AssertionError when the relay closed without one; AssertionError
        or h11.RemoteProtocolError when what came is not one whole reply of the grammar."""
        reply = await self.hear_or_end(method, within_s)
        assert reply is not None, "the relay closed without a reply"
        return reply

    async def hear_or_end(self, method: bytes = b"POST", within_s: float = 60.0) -> Reply | None:
        """The next reply; None when the relay closed without one. Raises as `hear` does for a
        reply that is not whole or not of the grammar."""
        async with asyncio.timeout(within_s):
            return await self._hear(method)

    async def _hear(self, method: bytes) -> Reply | None:
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=LARGEST_HEAD)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        raw = self._rest
        if raw:
            parser.receive_data(raw)
        head: h11.Response | None = None
        interim: list[int] = []
        body: list[bytes] = []
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                assert not (self._at_end and raw), f"the relay closed within a reply: {raw!r}"
                data = await self._read()
                if not data and not raw:
                    return None
                raw += data if head is None else b""
                parser.receive_data(data)
            elif isinstance(event, h11.InformationalResponse):
                interim.append(event.status_code)
                raw = raw.partition(b"\r\n\r\n")[2]
            elif isinstance(event, h11.Response):
                head = event
                strict_head(raw.partition(b"\r\n\r\n")[0], STATUS_LINE)
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            else:
                break
        assert head is not None
        self._rest = parser.trailing_data[0]
        headers = tuple((bytes(name), bytes(value)) for name, value in head.headers)
        return Reply(head.status_code, headers, b"".join(body), tuple(interim))

    async def _read(self) -> bytes:
        try:
            data = await self.reader.read(65_536)
        except ConnectionError:
            data = b""
        self._at_end = not data
        return data

    async def closed(self, within_s: float = 60.0) -> bool:
        """Wait for the relay's end of the connection. False: it sent more bytes first."""
        async with asyncio.timeout(within_s):
            return not self._rest and (self._at_end or not await self._read())

    def pause_reading(self) -> None:
        """Take no more bytes from the kernel, so that the relay cannot write for ever."""
        # A cast: uvloop's transports have these methods without the base class of asyncio.
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def hang_up(self) -> None:
        self.writer.transport.abort()


@dataclass
class Tools:
    """The functions that the tests of tests/sidecar/hardening share."""

    own_sockets = staticmethod(own_sockets)
    other_end = staticmethod(other_end)
    in_kernel = staticmethod(in_kernel)
    BrokenReply = h11.RemoteProtocolError


Connect = Callable[..., Awaitable[Dial]]
"""Connects to a running proxy."""
