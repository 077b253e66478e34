"""Proxy processes behind one port: start them, keep them alive, end them together.

One worker has a parent too, for a reload. The parent relays nothing. It holds every worker's
listener (SO_REUSEPORT, one port), so that the kernel does not reset connections that wait for a
worker which ends or dies: while a listener has no worker of its own, another worker accepts its
connections too. It holds the memory in which workers count metrics and limits, so no count dies
with a worker.

TERM or INT: all workers drain and end. After TERM a load balancer is told first: probes get 503 for
`proxy.shutdown_delay_s`, and all else is answered as before. INT or a second signal ends that. HUP:
each worker is replaced by a new one, one after the other; the old one drains. A worker that ends
unasked is counted and restarted with back-off; one whose event loop is blocked while it serves is
killed first. A worker that starts or drains may block: it may wait for a disk, and accepts no
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from sidecar.access.limits import LimitsFile, TableLimiter, counted, limits_path
from sidecar.backoff import Backoff, Waits
from sidecar.capture.outbox import DurableCounts
from sidecar.forwarding.process import forwarding_process
from sidecar.metrics.families import (
    MetricTable,
    map_regions,
    mark_dead,
    read_region,
    shared_memory,
    signs_of_life,
)
from sidecar.metrics.hot import MetricSet
from sidecar.metrics.proxy import ForwardingMetrics, limits_lost, limits_unchecked, worker_restarts
from sidecar.processes import WATCHED_S, own_environment, own_python, tell_ready
from sidecar.settings import Settings
from sidecar.settings.kinds import base_url
from sidecar.workers.worker import (
    BALANCER_S,
    DRAINING,
    LEAVE,
    LEAVING,
    PARENT_REGION,
    PROBED,
    READY,
    TAKE,
    Handover,
    bind_listeners,
    close_all,
)

# A worker process as its parent sees it, and the rules by which the parent decides.

RESTARTS = Backoff(first_s=0.1, last_s=10.0)
CHECK_INTERVAL_S = 1.0
"""Pause between two checks for signs of life, in seconds. A worker gives four signs a second."""
HUNG_AFTER_S = 30.0
"""A worker without a sign of life for so long is killed. That cuts the replies it was sending, so
the parent must be certain: the longest blocking work of a loop (reading 64 MiB of answers and
writing one) took 0.5 s, and takes many times longer on a machine that swaps. 30 s is also
gunicorn's default, and what Kubernetes' liveness probe amounts to (3 failures, 10 s apart)."""


class Child:
    """One worker: its process, and what is known of its state."""

    def __init__(self, handover: Handover, process: asyncio.subprocess.Process) -> None:
        self.handover = handover
        self.process = process
        self.started = time.monotonic()
        self.ready = asyncio.Event()
        self.left = asyncio.Event()
        """The worker accepts no more connections: it drains or has ended."""
        self.ended = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None
        self.silence = Silence()
        self.hung = False
        """The parent killed the worker because it gave no sign of life."""

    @property
    def serves(self) -> bool:
        return self.ready.is_set() and not self.left.is_set()

    @property
    def end_reason(self) -> str:
        code = self.process.returncode if self.ended.is_set() else 0
        return "hung" if self.hung else "ended" if not code else "killed" if code < 0 else "failed"

    def tell(self, *words: str | int) -> None:
        if self.writer is not None and not self.ended.is_set():
            self.writer.write(f"{' '.join(map(str, words))}\n".encode())

    def terminate(self) -> None:
        if not self.ended.is_set():
            self.process.terminate()

    def end_hung(self) -> None:
        """Kill the worker. A blocked event loop handles no other signal."""
        self.hung = True
        self.left.set()
        if self.process.returncode is None:
            self.process.kill()


class Silence:
    """Measures how long a worker has given no sign of life. It counts checks instead of reading a
    clock: while the parent does not run either (a frozen container, a sleeping laptop), no check
    happens and no worker becomes silent. Pure."""

    def __init__(self) -> None:
        self._signs = 0
        self._silent_checks = 0

    def check(self, signs: int) -> float:
        """Compare with the last check, at least `CHECK_INTERVAL_S` ago. signs: signs of life since
        the worker started. Returns: the least number of seconds since the last new sign."""
        self._silent_checks = self._silent_checks + 1 if signs == self._signs else 0
        self._signs = signs
        return self._silent_checks * CHECK_INTERVAL_S


def takers(serving: Sequence[bool]) -> list[int | None]:
    """Choose the worker that accepts each listener's connections: its own if that one serves, else
    the first that does. None: no worker serves, and the connections wait. Pure."""
    substitute = serving.index(True) if True in serving else None
    return [own if serves else substitute for own, serves in enumerate(serving)]


async def ready(child: Child) -> bool:
    """Wait until the worker serves. Returns: False when it ended instead."""
    await first_of(child.ready, child.ended)
    return child.ready.is_set()


async def first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


log = structlog.get_logger()
STOP_LIMIT_S = 15.0
"""Time after the drain to write captures. A worker that takes longer is killed."""


class Workers:
    """`run` it once."""

    def __init__(
        self, settings: Settings, config: Path | None, *, hung_after_s: float = HUNG_AFTER_S
    ) -> None:
        """Raises: OSError when the port is taken."""
        proxy = settings.proxy
        self._config = config
        self._hung_after_s = hung_after_s
        self._drain_s = proxy.drain_timeout_s
        self._shutdown_delay_s = proxy.shutdown_delay_s
        self._probed_at = float("-inf")
        """When a load balancer was last known to probe, on the monotonic clock."""
        self._listeners = bind_listeners(proxy.host, proxy.port, proxy.workers)
        self._host, self.port = proxy.host, self._listeners[0][0].getsockname()[1]
        # Twice as many slots as workers: while one drains, its successor serves.
        slots = range(1, 2 * proxy.workers + 1)
        self._lines = tuple(line.name for line in settings.lines)
        self._memory = shared_memory(1 + len(slots) + len(self._lines))
        self._regions = map_regions(self._memory)
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in slots:
            self._slots.put_nowait(slot)
        own = MetricTable(self._regions[PARENT_REGION])
        counts = MetricSet(CollectorRegistry(), own)
        self._restarts = worker_restarts(counts)
        self._forwarder = forwarding_process(settings, config, ForwardingMetrics(counts))
        self._counts = DurableCounts(
            settings.store.url,
            # The last regions are the breakers'.
            lambda: [read_region(region) for region in self._regions[: -len(self._lines)]],
        )
        self._own = own
        self._limits: int | None = None
        self._limits_file: LimitsFile | None = None
        # A worker alone counts in its own memory, which takes a third of the time.
        if settings.access.mode == "keys" and proxy.workers > 1:
            self._limits = shared_memory(1)
            lost = counted(limits_lost(counts), "limits_lost")
            unchecked = counted(limits_unchecked(counts), "limits_unchecked")
            table = TableLimiter(self._limits, unchecked=unchecked, lost=lost)
            self._limits_file = LimitsFile(limits_path(settings), table, lost=lost)
        self._serving: list[Child | None] = [None] * proxy.workers
        """By position, which is also the listener's number."""
        self._takers: list[Child | None] = [None] * proxy.workers
        """By listener: the worker that accepts its connections now."""
        self._wanted = [asyncio.Event() for _ in self._serving]
        """By position: the serving worker is to be replaced."""
        self._replaced = [asyncio.Event() for _ in self._serving]
        """By position: the replacement serves."""
        self._children: set[Child] = set()
        self._lives: set[asyncio.Task[None]] = set()
        """Tasks that start workers and kill hung ones; cancelled at the end."""
        self._watches: set[asyncio.Task[None]] = set()
        """Tasks that each follow one worker until it ends."""
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        """Nobody is to be told before the end."""
        self._exit_code = 0

    async def run(self) -> int:
        """Serve until a signal. Returns the exit code: 0; that of the first worker when it could
        not start; 1 when a worker had to be killed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(
            signal.SIGHUP, lambda: self._begin(self._replace_all(), self._lives)
        )
        if self._limits_file is not None:
            self._limits_file.start()
        if self._forwarder is not None:
            self._own.open()  # workers show its gauges
            self._forwarder.start()
        self._counts.start()
        self._begin(self._start_all(), self._lives)
        self._begin(self._end_hung(), self._lives)
        await self._stopping.wait()
        await self._stop()
        return self._exit_code

    # -- the workers' lives

    async def _start_all(self) -> None:
        # The first one alone: an error in the settings is then reported once, and ends them all.
        first = await self._spawn(0)
        if not await ready(first):
            self._exit_code = first.process.returncode or 1
            self._end()
            return
        self._begin(self._keep(0, first), self._lives)
        for position in range(1, len(self._serving)):
            self._begin(self._keep(position, await self._surely(position)), self._lives)
        log.info("workers_started", host=self._host, port=self.port, count=len(self._serving))
        tell_ready(base_url(self._host, self.port))

    async def _keep(self, position: int, child: Child) -> None:
        """Have a worker at this position for as long as the process runs."""
        waits = Waits(RESTARTS)
        wanted = self._wanted[position]
        while True:
            if await ready(child):
                before, self._serving[position] = self._serving[position], child
                self._assign()
                if before is not None:
                    before.terminate()
                wanted.clear()
                self._replaced[position].set()
                await first_of(child.left, wanted)
                if not child.left.is_set():
                    child = await self._surely(position)
                    continue
                self._serving[position] = None
            reason = child.end_reason
            self._restarts.inc((reason,))
            wait_s = waits.restart_s(time.monotonic() - child.started)
            if reason == "ended":  # a person told it to: a worker drains or returns 0 only then
                log.info("worker_ended", slot=child.handover.slot, reason=reason, again_in_s=0.0)
            else:
                slot = child.handover.slot
                log.warning("worker_ended", slot=slot, reason=reason, again_in_s=wait_s)
                await asyncio.sleep(wait_s)
            child = await self._surely(position)

    async def _end_hung(self) -> None:
        """Kill workers whose event loop is blocked; `_keep` starts others in their place."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for child in [one for one in self._children if one.serves]:
                silent_s = child.silence.check(signs_of_life(self._regions[child.handover.slot]))
                if silent_s >= self._hung_after_s:
                    slot, pid = child.handover.slot, child.process.pid
                    log.error("worker_hung", slot=slot, pid=pid, silent_s=silent_s)
                    child.end_hung()
                    self._assign()

    async def _replace_all(self) -> None:
        log.info("workers_replaced_one_by_one", count=len(self._serving))
        for position, wanted in enumerate(self._wanted):
            self._replaced[position].clear()
            wanted.set()
            await self._replaced[position].wait()

    async def _surely(self, position: int) -> Child:
        """Start a worker; retry while the machine has no room for another process."""
        waits = Waits(RESTARTS)
        while True:
            try:
                return await self._spawn(position)
            except OSError as error:
                wait_s = waits.next_s()
                log.error("worker_not_started", why=str(error), again_in_s=wait_s)
                await asyncio.sleep(wait_s)

    async def _spawn(self, position: int) -> Child:
        slot = await self._slots.get()
        ours, theirs = socket.socketpair()
        handover = Handover(
            port=self.port,
            slot=slot,
            listener=position,
            listeners=tuple(tuple(one.fileno() for one in item) for item in self._listeners),
            control=theirs.fileno(),
            metrics=self._memory,
            lines=self._lines,
            limits=self._limits,
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *own_python("sidecar", "--worker", handover.encode()),
                *(("--config", str(self._config)) if self._config is not None else ()),
                env=own_environment(os.environ),
                pass_fds=handover.descriptors(),
                # Ctrl-C in a terminal is for the parent, who passes it on in order.
                process_group=0,
            )
        except OSError:
            ours.close()
            self._slots.put_nowait(slot)
            raise
        finally:
            theirs.close()
        child = Child(handover, process)
        self._children.add(child)
        self._begin(self._listen_to(child, ours), self._watches)
        self._begin(self._await_end(child), self._watches)
        return child

    async def _listen_to(self, child: Child, line: socket.socket) -> None:
        reader, child.writer = await asyncio.open_connection(sock=line)
        try:
            while word := (await reader.readline()).decode().strip():
                if word == READY:
                    child.ready.set()
                elif word == PROBED:
                    self._probed_at = time.monotonic()
                elif word == DRAINING:
                    child.left.set()
                    self._assign()
        except ConnectionError as error:  # killed with words of ours unread
            log.debug("worker_line_cut", slot=child.handover.slot, why=str(error))
        finally:
            child.writer.close()

    async def _await_end(self, child: Child) -> None:
        await child.process.wait()
        mark_dead(self._regions[child.handover.slot])
        self._children.discard(child)
        child.left.set()
        child.ended.set()
        self._assign()
        self._slots.put_nowait(child.handover.slot)

    # -- the listeners

    def _assign(self) -> None:
        """Give each listener to its own worker, or to another one while that is away."""
        serving = [one if one is not None and one.serves else None for one in self._serving]
        for listener, position in enumerate(takers([one is not None for one in serving])):
            before = self._takers[listener]
            after = serving[position] if position is not None else None
            if after is before:
                continue
            self._takers[listener] = after
            # A worker accepts from its own listener without being told, and stops when it drains.
            if after is not None and position != listener:
                after.tell(TAKE, listener)
            if before is not None and before.handover.listener != listener:
                before.tell(LEAVE, listener)

    # -- the end

    def _end(self, number: int = signal.SIGINT) -> None:
        if number != signal.SIGTERM or self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def _tell_balancers(self) -> None:
        """Answer probes with 503, and everything else as before, for long enough."""
        watched = time.monotonic() - self._probed_at < WATCHED_S
        delay_s = self._shutdown_delay_s
        if delay_s is None:
            delay_s = BALANCER_S if watched else 0.0
        if not delay_s or self._hurry.is_set() or not any(one.serves for one in self._children):
            return
        log.info("leaving", drains_in_s=delay_s)
        for child in self._children:
            child.tell(LEAVING)
        with contextlib.suppress(TimeoutError):  # the delay is over
            await asyncio.wait_for(self._hurry.wait(), delay_s)

    async def _stop(self) -> None:
        for task in self._lives:
            task.cancel()
        await self._tell_balancers()
        for child in list(self._children):
            child.terminate()
        close_all(self._listeners)
        ends = [asyncio.create_task(child.ended.wait()) for child in self._children]
        if ends:
            _, late = await asyncio.wait(ends, timeout=self._drain_s + STOP_LIMIT_S)
            for end in late:
                end.cancel()
        for child in list(self._children):
            log.error("worker_killed", slot=child.handover.slot, why="it did not end in time")
            self._exit_code = 1
            child.process.kill()
            await child.process.wait()
        if self._limits_file is not None:
            await self._limits_file.stop()
        if (
            self._forwarder is not None
        ):  # after the workers, so that it forwards their last captures
            await self._forwarder.stop()
        await asyncio.to_thread(self._counts.stop)
        if not self._exit_code:  # else what went wrong is to be the last line of the log
            log.info("workers_stopped")

    def _begin(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """A defect in a task must not leave workers unwatched: log it and end them all."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("workers_failed", exc_info=error)
            self._exit_code = 1
            self._end()
