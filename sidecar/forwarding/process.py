"""The forwarding process as the proxy sees it: start it, read its counts, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec
import structlog

from sidecar.backoff import Backoff, Waits
from sidecar.forwarding.report import Report, decode_report
from sidecar.metrics.forwarding import ForwardingMetrics
from sidecar.processes.children import own_environment, own_python
from sidecar.processes.parent_death import guarded_command
from sidecar.settings import KafkaUrl, Settings, read_bus_url

log = structlog.get_logger()
RESTARTS = Backoff(first_s=0.5, last_s=30.0)
STOP_S = 8.0
"""How long it may take to end: `__main__.DRAIN_S`, and what a batch under way takes. Killed then,
which loses nothing."""


AWAY_STOP_S = 1.0
"""The same while the brokers are away: they would not take more in a longer time."""


class ForwardingProcess:
    """`start`, then `stop`. For one event loop, which only reads a line a second."""

    def __init__(self, config: Path | None, metrics: ForwardingMetrics) -> None:
        """config: the settings file of this process; None: the default one."""
        self._config = config
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._reachable = True

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())
        self._task.add_done_callback(_note_end)

    async def stop(self) -> None:
        """Let it forward what the outbox holds, for a few seconds, and end it."""
        self._stopping = True
        task, self._task = self._task, None
        if task is None:
            return
        if self._process is None:  # it waits to be started again
            task.cancel()
        else:
            self._signal(signal.SIGTERM)
        timeout_s = STOP_S if self._reachable else AWAY_STOP_S
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            log.warning("forwarder_killed", why="it did not end in time; nothing is lost")
            self._signal(signal.SIGKILL)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _keep(self) -> None:
        waits = Waits(RESTARTS)
        while not self._stopping:
            began = time.monotonic()
            try:
                code: int | str = await self._live()
            except OSError as error:  # no memory or no process left
                code = str(error)
            if self._stopping:
                return
            self._metrics.restarts.inc()
            self._metrics.reachable.set(0.0)
            wait_s = waits.restart_s(time.monotonic() - began)
            log.error("forwarder_ended", code=code, again_in_s=wait_s)
            await asyncio.sleep(wait_s)

    async def _live(self) -> int:
        """Start the process and read its reports until it ends. Returns: its exit code."""
        config = ("--config", str(self._config)) if self._config is not None else ()
        self._process = await asyncio.create_subprocess_exec(
            *guarded_command(),  # a proxy that is killed takes it along
            *own_python("sidecar.forwarding", *config),
            env=own_environment(os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal is for the proxy, which ends it after its own last captures.
            start_new_session=True,
        )
        try:
            if self._stopping:
                self._signal(signal.SIGTERM)
            assert self._process.stdout is not None
            while line := await self._process.stdout.readline():
                self._note(line)
            return await self._process.wait()
        finally:
            self._process = None

    def _note(self, line: bytes) -> None:
        try:
            report = decode_report(line)
        except msgspec.MsgspecError as error:
            log.error("forwarder_report_unreadable", why=str(error))
            return
        self._count(report)

    def _count(self, report: Report) -> None:
        metrics = self._metrics
        metrics.forwarded.inc(report.forwarded)
        metrics.expired.inc(report.expired)
        for reason, count in report.failures.items():
            metrics.failures.labels(reason).inc(count)
        for reason, count in report.set_aside.items():
            metrics.set_aside.labels(reason).inc(count)
        if report.waiting is not None:
            metrics.waiting.set(float(report.waiting))
        self._reachable = report.reachable
        metrics.reachable.set(float(report.reachable))


def _note_end(task: asyncio.Task[None]) -> None:
    """A defect here must not stay unseen: records would wait, and nobody would know why."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("forwarder_unwatched", exc_info=error)


def forwarding_process(
    settings: Settings, config: Path | None, metrics: ForwardingMetrics
) -> ForwardingProcess | None:
    """Return the process to start; None with the embedded bus."""
    if not isinstance(read_bus_url(settings.bus.url), KafkaUrl):
        return None
    return ForwardingProcess(config, metrics)
