"""Several proxy processes behind one port: real processes, killed, ended, replaced under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.access.keys import make_key
from sidecar.metrics.families import MetricTable, mark_dead, private_region, signs_of_life
from sidecar.store.database import Database
from sidecar.store.models import ApiKeyRow
from sidecar.workers.parent import CHECK_INTERVAL_S, HUNG_AFTER_S, Silence, takers
from support.fake_vllm import FakeVllm
from support.proxy_kit import Wire

pytestmark = pytest.mark.timeout(300)
WAIT_S = 60.0
"""For what takes a second on a machine that is not busy."""
CHAT = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi"}]}'
REFUSED = "HTTP/1.1 429 Too Many Requests"
UNAVAILABLE = "HTTP/1.1 503 Service Unavailable"
STREAM = CHAT[:-1] + b',"stream":true}'
IMPATIENT_S = 3.0
"""After this long without a sign of life a worker is taken for hung, where a test says so."""
IMPATIENT_PARENT = """
import asyncio, sys
from pathlib import Path
from sidecar.logs import configure_logging
from sidecar.settings import load_settings, with_workers
from sidecar.workers.parent import Workers

config, workers, hung_after_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
settings = with_workers(load_settings(config), workers)
configure_logging(settings.telemetry, "proxy")
sys.exit(asyncio.run(Workers(settings, config, hung_after_s=hung_after_s).run()))
"""


async def until(holds: Callable[[], Any], what: str) -> Any:
    """Wait for a condition, and return what made it true."""
    for _ in range(int(WAIT_S / 0.02)):
        if found := holds():
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited {WAIT_S} s in vain: {what}")


@dataclass
class Service:
    """A parent and its workers."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0

    def events(self, name: str) -> list[dict[str, Any]]:
        return [item for item in self.logged() if item.get("event") == name]

    def logged(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def workers(self) -> dict[int, int]:
        """Process id -> slot, of the children that live."""
        pid = self.process.pid
        found = {}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"--worker" in words:
                found[int(child)] = json.loads(words[words.index(b"--worker") + 1])["slot"]
        return found

    async def serving(self, count: int) -> None:
        """Wait until this many workers, over all time, have become ready."""
        await until(lambda: len(self.events("proxy_ready")) >= count, f"{count} workers ready")

    async def metrics(self) -> dict[str, float]:
        _, text = await exchange(self.port, b"", "GET", "/metrics")
        return {
            sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }

    def worker_of(self, client_port: int) -> int:
        """The process that holds the connection from this port of a client."""
        inode = ""
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            ports = [int(address.split(":")[1], 16) for address in words[1:3]]
            if ports == [self.port, client_port]:
                inode = f"socket:[{words[9]}]"
        for pid in self.workers():
            for held in Path(f"/proc/{pid}/fd").iterdir():
                if held.is_symlink() and os.readlink(held) == inode:
                    return pid
        raise AssertionError(f"no worker holds the connection from port {client_port}")


async def exchange(
    port: int,
    body: bytes,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    key: str = "none",
) -> tuple[str, bytes]:
    """One request on a connection of its own: status line, and what came after the head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nx-api-key: {key}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        received = await reader.read()
    finally:
        writer.close()
    head, _, rest = received.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), rest


@dataclass
class Load:
    """Clients that ask one after the other, each request on a connection of its own."""

    port: int
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    _over: bool = False
    _clients: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self, clients: int, *, kept: int = 0) -> None:
        """kept: how many more there are that keep their connections for as long as they may."""
        asking = [self._ask() for _ in range(clients)] + [self._ask_on() for _ in range(kept)]
        self._clients = [asyncio.create_task(one) for one in asking]

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._clients)

    async def more(self, count: int) -> None:
        """Wait until this many more were answered."""
        wanted = self.answered + count
        await until(lambda: self.answered >= wanted, f"{count} more answers")

    async def _ask(self) -> None:
        while not self._over:
            try:
                status, body = await exchange(self.port, CHAT)
            except OSError as error:
                self.failed.append(repr(error))
                continue
            if status == "HTTP/1.1 200 OK" and body:
                self.answered += 1
            else:
                self.failed.append(f"{status!r} {body!r}")

    async def _ask_on(self) -> None:
        """As a client with a pool: a connection that is seen to be closed is not used again."""
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(CHAT) + CHAT
        )
        while not self._over:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            while not self._over and not reader.at_eof():
                try:
                    writer.write(request)
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0]))
                except (OSError, asyncio.IncompleteReadError) as error:
                    self.failed.append(repr(error))
                    break
                self.answered += 1
                if b"connection: close" in head:
                    break
            writer.close()


@dataclass
class OpenStream:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def port(self) -> int:
        port: int = self.writer.get_extra_info("sockname")[1]
        return port

    async def rest(self) -> bytes:
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""
        finally:
            self.writer.close()


async def open_stream(port: int) -> OpenStream:
    """A stream that has sent its first event and waits for the fake."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(STREAM) + STREAM
    )
    await reader.readuntil(b"first")
    return OpenStream(reader, writer)


StartService = Callable[..., Awaitable[Service]]


@pytest.fixture
async def start(fake_vllm: FakeVllm, state_dir: Path) -> AsyncIterator[StartService]:
    started: list[Service] = []

    async def begin(
        workers: int,
        port: int = 0,
        wait: bool = True,
        hung_after_s: float | None = None,
        access: str = "open",
        **proxy: Any,
    ) -> Service:
        config = state_dir / "sidecar.toml"
        options = "".join(f", {key} = {value}" for key, value in proxy.items())
        config.write_text(
            f'state_dir = "{state_dir}"\n'
            f'serving = {{upstreams = ["http://127.0.0.1:{fake_vllm.port}"]}}\n'
            f"proxy = {{port = {port}{options}}}\n"
            f'bus = {{url = "sqlite:///{state_dir}/outbox.db"}}\n'
            f'store = {{url = "sqlite:///{state_dir}/store.db"}}\n'
            f'access = {{mode = "{access}"}}\n'
            "telemetry = {log_json = true}\n"
        )
        log = state_dir / f"log{len(started)}"
        words = ["-m", "sidecar", "--config", str(config), "--workers", str(workers)]
        if hung_after_s is not None:
            words = ["-c", IMPATIENT_PARENT, str(config), str(workers), str(hung_after_s)]
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, *words], stderr=file)
        service = Service(process, log)
        started.append(service)
        if wait:
            await service.serving(workers)
            service.port = service.events("proxy_ready")[0]["port"]
        return service

    yield begin
    for service in started:
        if service.process.poll() is None:
            for pid in service.workers():
                os.kill(pid, signal.SIGCONT)  # one that a test stopped would notice nothing
            service.process.kill()  # and its children notice
        service.process.wait()


@pytest.fixture
def held(fake_vllm: FakeVllm, wire: Wire) -> asyncio.Event:
    """vLLM answers at once; streams stop after the first event until this is set."""
    go_on = asyncio.Event()

    def script(seen: Any) -> list[Any]:
        if b'"stream":true' not in seen.body:
            return [wire.whole_reply(b'{"choices":[]}')]
        rest = wire.chunk(b"data: last\n\ndata: [DONE]\n\n")
        return [wire.STREAM_HEAD, wire.chunk(b"data: first\n\n"), go_on, rest, wire.LAST_CHUNK]

    fake_vllm.script = script
    return go_on


async def streams_on_every_worker(service: Service) -> dict[int, list[OpenStream]]:
    """Open streams until each worker has at least two of them."""
    found: dict[int, list[OpenStream]] = {pid: [] for pid in service.workers()}
    while min(map(len, found.values())) < 2:
        stream = await open_stream(service.port)
        found[service.worker_of(stream.port)].append(stream)
    return found


async def test_a_killed_worker_takes_with_it_only_what_it_was_answering(
    held: asyncio.Event, start: StartService
) -> None:
    service = await start(2)
    streams = await streams_on_every_worker(service)
    doomed, kept = streams
    load = Load(service.port)
    load.begin(4)
    await load.more(40)
    before = await service.metrics()

    os.kill(doomed, signal.SIGKILL)
    broken = [await stream.rest() for stream in streams[doomed]]
    await load.more(40)
    await service.serving(3)  # a new one is there
    await load.more(40)
    await load.end()
    held.set()
    finished = [await stream.rest() for stream in streams[kept]]

    assert all(b"[DONE]" not in rest for rest in broken)
    assert all(rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for rest in finished)
    # Of the load, each of the four clients had at most one request with the worker that died: it
    # failed, or it was answered and not counted yet.
    assert len(load.failed) <= 4
    uncounted = 4 - len(load.failed)
    after = await service.metrics()
    assert [name for name in before if name.endswith("_total") and after[name] < before[name]] == []
    ok = after["sidecar_exchanges_total/ok"] - len(finished)
    assert load.answered - uncounted <= ok <= load.answered + len(load.failed)
    assert after["sidecar_worker_restarts_total/killed"] == 1
    assert after["sidecar_workers_alive"] == 2
    # What the dead one had in flight is no more: this is the request for the metrics itself.
    assert after["sidecar_requests_in_flight"] == 1


async def test_a_worker_that_is_ended_fails_no_request_and_finishes_its_streams(
    held: asyncio.Event, start: StartService
) -> None:
    service = await start(2)
    streams = await streams_on_every_worker(service)
    ended, other = streams
    load = Load(service.port)
    load.begin(2, kept=2)
    await load.more(40)

    os.kill(ended, signal.SIGTERM)
    await service.serving(3)
    await load.more(40)
    assert alive(ended), "it has streams to finish"
    held.set()
    finished = [await stream.rest() for stream in (*streams[ended], *streams[other])]
    await until(lambda: not alive(ended), "the worker ends")
    await load.end()

    assert load.failed == []
    assert all(b"[DONE]" in rest for rest in finished)
    totals = await service.metrics()
    assert totals["sidecar_exchanges_total/ok"] == load.answered + len(finished)
    assert totals["sidecar_worker_restarts_total/ended"] == 1
    (event,) = service.events("worker_ended")
    assert (event["reason"], event["level"], event["again_in_s"]) == ("ended", "info", 0.0)


async def test_a_worker_that_hangs_is_replaced_and_the_port_goes_on_answering(
    held: asyncio.Event, start: StartService
) -> None:
    service = await start(2, hung_after_s=IMPATIENT_S)
    hung, other = service.workers()

    os.kill(hung, signal.SIGSTOP)
    load = Load(service.port)
    load.begin(2, kept=2)
    await service.serving(3)
    await load.more(40)
    await load.end()

    assert not alive(hung)
    assert len(service.workers()) == 2
    assert other in service.workers()
    # What came to the listener of the hung one waited, and was answered by another.
    assert load.failed == []
    (event,) = service.events("worker_hung")
    assert (event["pid"], event["silent_s"]) == (hung, IMPATIENT_S)
    (event,) = service.events("worker_ended")
    assert (event["reason"], event["level"]) == ("hung", "warning")
    totals = await service.metrics()
    assert totals["sidecar_exchanges_total/ok"] == load.answered
    assert totals["sidecar_worker_restarts_total/hung"] == 1
    assert totals["sidecar_workers_alive"] == 2


async def test_neither_a_busy_worker_nor_one_that_drains_is_taken_for_hung(
    held: asyncio.Event, start: StartService
) -> None:
    service = await start(2, hung_after_s=IMPATIENT_S)
    streams = await streams_on_every_worker(service)
    draining, busy = streams
    os.kill(draining, signal.SIGTERM)
    await service.serving(3)
    load = Load(service.port)

    os.kill(draining, signal.SIGSTOP)
    load.begin(4, kept=4)
    await asyncio.sleep(IMPATIENT_S + 2 * CHECK_INTERVAL_S)
    still = set(service.workers())
    await load.end()
    os.kill(draining, signal.SIGCONT)
    held.set()
    finished = [await stream.rest() for stream in (*streams[draining], *streams[busy])]

    assert {draining, busy} <= still
    assert load.failed == []
    assert service.events("worker_hung") == []
    assert all(b"[DONE]" in rest for rest in finished)


async def test_replacing_every_worker_under_load_fails_no_request(
    held: asyncio.Event, start: StartService
) -> None:
    service = await start(2)
    old = set(service.workers())
    load = Load(service.port)
    load.begin(2, kept=2)

    service.process.send_signal(signal.SIGHUP)
    await service.serving(4)
    await until(lambda: not any(map(alive, old)), "the old workers end")
    await load.more(20)
    await load.end()

    assert load.failed == []
    totals = await service.metrics()
    assert totals["sidecar_exchanges_total/ok"] == load.answered
    assert totals["sidecar_workers_alive"] == 2
    assert "sidecar_worker_restarts_total/ended" not in totals
    assert service.events("worker_ended") == []
    assert {item["level"] for item in service.logged()}.isdisjoint({"error", "critical"})


async def test_term_lets_streams_finish_and_ends_with_0(
    held: asyncio.Event, start: StartService, state_dir: Path
) -> None:
    service = await start(2)
    streams = [item for some in (await streams_on_every_worker(service)).values() for item in some]

    service.process.send_signal(signal.SIGTERM)
    await until(lambda: not accepts(service.port), "new connections are refused")
    held.set()
    finished = [await stream.rest() for stream in streams]
    code = await asyncio.to_thread(service.process.wait, WAIT_S)

    assert all(rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for rest in finished)
    assert code == 0
    assert len(service.events("proxy_stopped")) == 2
    assert not list(state_dir.glob("*.sock"))


async def test_after_term_probes_are_refused_and_requests_served_until_the_delay_is_over(
    held: asyncio.Event, start: StartService
) -> None:
    service = await start(1, shutdown_delay_s=3600)
    kept = await open_stream(service.port)

    service.process.send_signal(signal.SIGTERM)
    for path in ("/readyz", "/health", "/ping"):
        while (await exchange(service.port, b"", "GET", path))[0] != UNAVAILABLE:
            assert service.process.poll() is None
    served = [(await exchange(service.port, CHAT))[0] for _ in range(5)]
    alive_status, _ = await exchange(service.port, b"", "GET", "/healthz")
    service.process.send_signal(signal.SIGTERM)  # a second one ends the delay
    await until(lambda: not accepts(service.port), "new connections are refused")
    held.set()

    assert served == ["HTTP/1.1 200 OK"] * 5
    assert alive_status == "HTTP/1.1 200 OK"
    assert (await kept.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert await asyncio.to_thread(service.process.wait, WAIT_S) == 0
    assert [event["drains_in_s"] for event in service.events("leaving")] == [3600]


async def test_interrupt_waits_for_no_load_balancer_and_term_only_for_one_that_probes(
    held: asyncio.Event, start: StartService
) -> None:
    interrupted = await start(1, shutdown_delay_s=3600)
    interrupted.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(interrupted.process.wait, WAIT_S) == 0

    unwatched = await start(1)
    await exchange(unwatched.port, b"", "GET", "/readyz")  # whoever waits for the start
    unwatched.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(unwatched.process.wait, WAIT_S) == 0

    watched = await start(1)
    for _ in range(2):
        await exchange(watched.port, b"", "GET", "/ping")
    watched.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(watched.process.wait, WAIT_S) == 0
    assert interrupted.events("leaving") == unwatched.events("leaving") == []
    assert [event["drains_in_s"] for event in watched.events("leaving")] == [5.0]


async def test_workers_whose_parent_was_killed_end_soon_and_free_the_port(
    held: asyncio.Event, start: StartService
) -> None:
    service = await start(2, drain_timeout_s=3600)  # a drain would never end
    stream = await open_stream(service.port)
    workers = list(service.workers())

    service.process.kill()
    await until(lambda: not any(map(alive, workers)), "the workers end")

    assert b"[DONE]" not in await stream.rest()
    with socket.create_server(("127.0.0.1", service.port)):
        pass


async def test_a_worker_that_cannot_start_the_first_time_ends_all_in_one_line(
    start: StartService,
) -> None:
    service = await start(2, wait=False, drain_timeout_s='"soon"')

    code = await asyncio.to_thread(service.process.wait, WAIT_S)

    assert code == 2
    (line,) = service.log.read_text().splitlines()
    assert "proxy.drain_timeout_s" in line


@pytest.mark.parametrize(
    ("serving", "expected"),
    [
        ([True, True, True], [0, 1, 2]),
        ([True, False, False], [0, 0, 0]),
        ([False, True, True], [1, 1, 2]),
        ([False, False], [None, None]),
    ],
)
def test_a_listener_without_its_worker_is_taken_by_the_first_that_serves(
    serving: list[bool], expected: list[int | None]
) -> None:
    assert takers(serving) == expected


def test_signs_of_life_grow_while_the_writer_serves_and_are_gone_with_it() -> None:
    region = private_region()
    seen = []

    table = MetricTable(region)
    seen.append(signs_of_life(region))
    table.open()
    seen.append(signs_of_life(region))
    for _ in range(1_000):
        table.give_sign()
    seen.append(signs_of_life(region))
    table.cells(b"counter n", 1)  # the table grows beside them
    seen.append(signs_of_life(region))
    mark_dead(region)
    seen.append(signs_of_life(region))

    assert seen == [0, 1, 1_001, 1_001, 0]


def test_silence_is_counted_from_look_to_look_and_ends_with_a_sign() -> None:
    silence = Silence()

    assert [silence.check(signs) for signs in (11, 11, 11, 12, 12)] == [0.0, 1.0, 2.0, 0.0, 1.0]


def test_a_parent_that_stood_still_itself_holds_that_against_nobody() -> None:
    silence = Silence()
    silence.check(11)

    after_an_hour = silence.check(11)  # no check in between

    assert after_an_hour == CHECK_INTERVAL_S < HUNG_AFTER_S


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def key_with_limits(state_dir: Path, **limits: int) -> str:
    """Make an API key in the store that the workers read. Returns: what a client sends."""
    fresh = make_key(os.urandom)
    plain = {"requests_per_minute": None, "tokens_per_day": None}
    row = ApiKeyRow(
        key_id=fresh.key_id, project="shop", name="", secret_hash=fresh.secret_hash,
        scopes="infer", expires_at=None, best_of_max=1, created_at=0.0, revoked_at=None,
        generation=1, **{**plain, **limits},
    )  # fmt: skip
    database = Database(f"sqlite:///{state_dir}/store.db")
    database.upgrade()
    with database.write() as session:
        session.add(row)
    database.close()
    return fresh.presented


async def test_a_keys_limit_holds_over_all_workers_a_killed_one_and_a_restart(
    fake_vllm: FakeVllm, wire: Wire, state_dir: Path, start: StartService
) -> None:
    fake_vllm.script = lambda _: [wire.recording("chat.plain").reply]
    key = key_with_limits(state_dir, tokens_per_day=1)
    service = await start(2, access="keys")

    async def statuses(count: int) -> set[str]:
        """What requests on so many connections are told, which the kernel spreads over workers."""
        return {(await exchange(service.port, CHAT, key=key))[0] for _ in range(count)}

    assert await statuses(1) == {"HTTP/1.1 200 OK"}
    for _ in range(500):  # the reply is charged a moment after its last byte is sent
        if await statuses(1) == {REFUSED}:
            break
        await asyncio.sleep(0.02)
    assert await statuses(20) == {REFUSED}
    os.kill(next(iter(service.workers())), signal.SIGKILL)
    await service.serving(3)
    assert await statuses(20) == {REFUSED}
    service.process.terminate()
    await asyncio.to_thread(service.process.wait)
    service = await start(2, access="keys")
    assert await statuses(20) == {REFUSED}
    counted = await service.metrics()
    assert [name for name in counted if name.startswith("sidecar_limits_") and counted[name]] == []
