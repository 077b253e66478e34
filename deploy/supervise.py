"""`sidecar up`: start every process of one machine, wait until it answers, restart it, stop it.

Only one `sidecar up` works with a `state_dir` at a time. Each child writes to its own log under
`state_dir/logs` (`deploy.supervise`). A child that dies is started again after a back-off and
the log says so; a child that dies again and again and was never ready ends `sidecar up` with its
last line. "ready" is about the processes started here, which report it themselves
(`sidecar.processes`), not about whoever answers at their ports. Signals go only to
processes started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import httpx
import structlog

from deploy.errors import StartError, error_line
from deploy.supervisor_rules import (
    ASKED_TO_END,
    ENGINE,
    GIVE_UP_DEATHS,
    RESTARTS,
    ProcessSpec,
    describe_exit,
    is_hopeless,
    plan,
)
from sidecar.backoff import STEADY_S, Waits
from sidecar.errors import StateLockError, StoreError
from sidecar.parent_death import guarded_command
from sidecar.processes import (
    VARIABLE as READY_VARIABLE,
    holder,
    only_one,
    own_environment,
    read_report,
)
from sidecar.settings import Settings
from sidecar.upstreams import Upstreams
from sidecar.workers.worker import BALANCER_S, bind_listeners, cannot_listen

# One process under `sidecar up`: start it, read its reports, notice its end, restart it.

log = structlog.get_logger()

LAST_BYTES = 2_000
"""How much of the end of a log is searched for its last line."""


class Child:
    """One supervised process and its log file."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self._waits = Waits(RESTARTS)
        self.restart_at = 0.0
        self.worked = False
        """True once it was ready, or ran for `STEADY_S`: it is then always started again."""
        self.address: str | None = None
        """The address that it reported; "" if it listens nowhere. None: it is not ready."""
        self.died: str | None = None
        """How it ended the last time; None while it runs."""
        self._said: list[str] = []
        self._lives_s: list[float] = []
        """Seconds of each life."""
        self._log_file: IO[bytes] | None = None
        self._log_start = 0
        self._ready_pipe: int | None = None

    @property
    def is_failing(self) -> bool:
        """True if it does not run now, or died and was never ready."""
        return self.died is not None or (bool(self._lives_s) and not self.worked)

    @property
    def is_hopeless(self) -> bool:
        return not self.worked and is_hopeless(self._lives_s)

    def start(self, now: float) -> None:
        """Raises: OSError when the log cannot be written or no process can be started."""
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_file = self.log_path.open("ab")
        self._log_start = self._log_file.tell()
        env, told_by = self._environment(), list[int]()
        if self.spec.tells_ready:
            self._ready_pipe, theirs = os.pipe()
            os.set_blocking(self._ready_pipe, False)
            env[READY_VARIABLE] = str(theirs)
            told_by.append(theirs)
        self.started_at, self.address = now, None
        try:
            self.process = subprocess.Popen(
                (*guarded_command(), *self.spec.command),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=told_by,
            )
        except OSError:
            self._close()
            raise
        finally:
            for descriptor in told_by:
                os.close(descriptor)
        self.died = None
        log.info("process_started", name=self.spec.name, pid=self.process.pid)

    def _environment(self) -> dict[str, str]:
        """The child's environment. The operator's vLLM gets ours unchanged."""
        inherited = dict(os.environ) if not self.spec.tells_ready else own_environment(os.environ)
        return {**inherited, **self.spec.env}

    def check(self, now: float) -> None:
        """Read whether it is ready, notice its end, plan a restart, and carry it out when due."""
        if self.process is None:
            if now >= self.restart_at:
                self._start_again(now)
            return
        self._read_report()
        code = self.process.poll()
        if code is not None:
            self._note_end(now, describe_exit(code), asked=code in ASKED_TO_END)

    def _start_again(self, now: float) -> None:
        try:
            self.start(now)
        except OSError as error:  # out of memory or processes, a full disk
            self._note_end(now, f"could not be started: {error.strerror}", asked=False)

    def _read_report(self) -> None:
        if self._ready_pipe is None:
            return
        address, said = read_report(self._ready_pipe)
        if address is not None:
            self.address, self.worked = address, True
        self._said += [_printable(line) for line in said]

    def take_said(self) -> list[str]:
        """Return the lines for the terminal that it reported since the last call."""
        said, self._said = self._said, []
        return said

    def _note_end(self, now: float, how: str, *, asked: bool) -> None:
        """Plan the restart. asked: somebody told it to end, and it did; that is no error."""
        lived_s = now - self.started_at
        self.worked = self.worked or lived_s >= STEADY_S
        self._lives_s.append(lived_s)
        wait_s = self._waits.restart_s(lived_s)
        self.restart_at = now + wait_s
        last_line = self.last_line()
        self.died = f"{how}: {last_line}" if last_line else how
        if asked and self.worked:
            log.info("process_ended", name=self.spec.name, how=how, restart_in_s=wait_s)
        else:
            log.error(
                "process_died",
                name=self.spec.name,
                how=how,
                restart_in_s=wait_s,
                log=str(self.log_path),
                last_line=last_line,
            )
        self.process = self.address = None
        self._close()

    def last_line(self) -> str:
        """The last line that this life of the child wrote to its log; "" if it wrote none."""
        try:
            with self.log_path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - LAST_BYTES))
                tail = file.read(LAST_BYTES)
        except OSError:
            return ""
        lines = tail.decode("utf-8", "replace").strip().splitlines()
        return _printable(lines[-1])[:300] if lines else ""

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self._signal(number)

    def join(self, deadline: float) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("process_killed", name=self.spec.name, why="it did not end in time")
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._close()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, number)  # its own group: start_new_session
        except ProcessLookupError:
            log.debug("process_already_gone", name=self.spec.name)

    def _close(self) -> None:
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None
        if self._ready_pipe is not None:
            os.close(self._ready_pipe)
            self._ready_pipe = None


def _printable(line: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in line)


# Ask a URL for its status: how a start finds out whether a server answers yet.


def status_of(url: str) -> int | None:
    """Return the status that a GET of the URL is answered with; None when nothing answers."""
    try:
        return _client().get(url).status_code
    except httpx.HTTPError:
        return None


@cache
def _client() -> httpx.Client:
    """One client for all polls: making one reads the root certificates, 60 ms of CPU."""
    # HTTP_PROXY is for the web, not for this machine or its vLLM.
    no_reuse = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=2.0, trust_env=False, limits=no_reuse)


# Loops that run as long as the process. An error ends none of them, and none ends another.

STORE_RETRY_S = 1.0


@dataclass(slots=True)
class LoopView:
    """The health of one loop: kept in memory, shown by `/admin/v1/status`."""

    failures: int = 0
    """Turns in a row that ended with an error; 0: the loop works."""
    error: str | None = None
    """The last of these errors."""


class Loop:
    """Runs `work`, waits `every_s()` or until woken, and repeats."""

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[object]],
        every_s: Callable[[], float],
        wake: asyncio.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.view = LoopView()
        self._work = work
        self._every_s = every_s
        self._wake = wake or asyncio.Event()
        self._clock = clock
        self._waits = Waits(RESTARTS)

    async def run(self) -> None:
        """Repeat until the task is cancelled."""
        while True:
            self._wake.clear()
            pause_s = await self.turn()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def turn(self) -> float:
        """Run the work once. Returns: seconds to wait until the next turn."""
        began = self._clock()
        try:
            await self._work()
        except StoreError as error:
            log.warning("store_away", loop=self.name, reason=str(error))
            self._failed(error)
            return STORE_RETRY_S
        except Exception as error:
            self._failed(error)
            wait_s = self._waits.restart_s(self._clock() - began)
            log.error(
                "loop_failed",
                loop=self.name,
                error=self.view.error,
                failures=self.view.failures,
                retry_in_s=wait_s,
                exc_info=self.view.failures == 1,
            )
            return wait_s
        if self.view.failures:
            log.info("loop_recovered", loop=self.name, failures=self.view.failures)
        self.view = LoopView()
        self._waits.reset()
        return self._every_s()

    def _failed(self, error: Exception) -> None:
        self.view = LoopView(failures=self.view.failures + 1, error=error_line(error))


TICK_S = 0.2
STOP_TIMEOUT_S = 35.0
"""A child that still runs this long after TERM is killed."""
BEYOND_DRAIN_S = 30.0
"""What the proxy may need before and after its drain: captures 15 s, forwarding 8 s, counts 5 s,
telemetry 1 s."""
LEFTOVER_ENGINE_S = 10.0
"""How long the vLLM of a killed `sidecar up` may take to end."""
REMIND_S = 30.0
"""How often a line says what the start still waits for."""
LOCKED = ("ingest", "learn", "control")
"""Commands that hold their own lock on `state_dir`."""


class Supervisor:
    """Starts, watches and stops the children of one `sidecar up`."""

    def __init__(
        self,
        settings: Settings,
        config: Path | None,
        *,
        announce: Callable[[str], None],
        specs: Sequence[ProcessSpec] | None = None,
    ) -> None:
        self._settings = settings
        self._announce = announce
        logs = settings.state_dir / "logs"
        chosen = plan(settings, config) if specs is None else specs
        self.children = [Child(spec, logs / f"{spec.name}.log") for spec in chosen]
        self.stopping = threading.Event()
        self._asked = signal.SIGTERM
        """The signal that ended `sidecar up`. The proxy waits for load balancers after TERM alone:
        Ctrl-C does not."""
        proxy = settings.proxy
        delay_s = BALANCER_S if proxy.shutdown_delay_s is None else proxy.shutdown_delay_s
        self._stop_timeout_s = max(STOP_TIMEOUT_S, delay_s + proxy.drain_timeout_s + BEYOND_DRAIN_S)

    def run(self) -> int:
        """Supervise until SIGINT or SIGTERM. SIGHUP reloads the proxy, unless it says that the
        terminal of `sidecar up` is gone. Returns: the exit code, 0.

        Raises: StateLockError when another `sidecar up` works with `state_dir`; StartError when a
        port is in use, when another vLLM answers where ours shall listen, or when a child that was
        never ready dies again and again. Every child is stopped first.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)
        signal.signal(signal.SIGHUP, self._end if os.isatty(0) else self._reload)
        with only_one(self._settings.state_dir, "up"):
            self._wait_for_leftovers()
            if not self.stopping.is_set():
                self._refuse_taken_ports()
                self._refuse_foreign_engine()
            if not self.stopping.is_set():
                self._supervise()
        return 0

    def _supervise(self) -> None:
        waiting = threading.Thread(target=self._tell_when_ready, daemon=True)
        try:
            for child in self.children:
                with _as_start_error(child):
                    child.start(time.monotonic())
            waiting.start()
            while not self.stopping.wait(TICK_S):
                now = time.monotonic()
                for child in self.children:
                    child.check(now)
                    for line in child.take_said():
                        self._announce(line)
                    if child.is_hopeless:
                        raise StartError(_given_up(child))
        finally:
            self.stop()

    def _end(self, number: int, _frame: object) -> None:
        # HUP would reload the proxy.
        self._asked = signal.SIGINT if number == signal.SIGHUP else signal.Signals(number)
        self.stopping.set()

    def _reload(self, number: int, _frame: object) -> None:
        for child in self.children:
            if child.spec.name == "proxy" and child.address is not None:  # else it reads them now
                child.terminate(signal.Signals(number))

    def stop(self) -> None:
        """Stop the children. Our own vLLM is last: the proxy needs it to drain."""
        self.stopping.set()
        self._tell("stopping")
        engine = [child for child in self.children if child.spec.name == ENGINE]
        for together in ([child for child in self.children if child not in engine], engine):
            deadline = time.monotonic() + self._stop_timeout_s
            for child in together:
                child.terminate(self._asked if child.spec.name == "proxy" else signal.SIGTERM)
            for child in together:
                child.join(deadline)
        self._tell("stopped")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._announce(line)

    # -- before the start

    def _wait_for_leftovers(self) -> None:
        """Wait for the children of an earlier `sidecar up` that was killed: they end by themselves.

        Raises: StateLockError when one of them, or a process that a person started, keeps running.
        """
        deadline = time.monotonic() + self._stop_timeout_s
        said = False
        while (left := _leftover(self._settings.state_dir)) is not None:
            if time.monotonic() >= deadline:
                raise StateLockError(
                    f"{left} works with state_dir {self._settings.state_dir.resolve()}; stop it "
                    "first: `sidecar up` starts one of its own"
                )
            if not said:
                said = True
                self._announce(f"waiting for {left} to end: it works with this state_dir")
            if self.stopping.wait(TICK_S):
                return

    def _refuse_taken_ports(self) -> None:
        """Raises: StartError, which names the port and the setting."""
        for name, listener in (("proxy", self._settings.proxy), ("admin", self._settings.admin)):
            try:
                bind_listeners(listener.host, listener.port, 0)
            except OSError as error:
                said = cannot_listen(name, listener.host, listener.port, error)
                raise StartError(said) from error

    def _refuse_foreign_engine(self) -> None:
        """Refuse a vLLM that is not ours where ours shall listen: `ready` would be said of it.

        The vLLM of an earlier `sidecar up` that was killed ends by itself, so it is waited for.
        With several upstreams it is unknown which one is ours, and none is refused.
        Raises: StartError.
        """
        upstreams = Upstreams(self._settings.serving.upstreams).now()
        if not self._settings.engine.command or len(upstreams) > 1:
            return
        deadline = time.monotonic() + LEFTOVER_ENGINE_S
        while status_of(f"{upstreams[0]}/health") is not None:
            if time.monotonic() >= deadline:
                raise StartError(
                    f"something answers at {upstreams[0]} already, where engine.command shall "
                    "listen; stop it, choose another port in engine.command and "
                    "serving.upstreams, or leave engine.command empty to use what runs there"
                )
            if self.stopping.wait(TICK_S):
                return

    # -- progress lines

    def _tell_when_ready(self) -> None:
        # Our own processes first: they need no vLLM, and a fault of theirs must not look like its
        # absence.
        told = self._wait_for_children()
        upstreams = Upstreams(self._settings.serving.upstreams)
        if told is None or not self._wait_for_engine(upstreams):
            return
        for child in self.children:
            if child.spec.name == ENGINE:
                child.worked = True
        proxy, admin = told["proxy"], told["control"]
        for url in (f"{proxy}/readyz", f"{admin}/readyz"):
            while status_of(url) != 200:
                if self.stopping.wait(TICK_S):
                    return
        self._announce(
            f"ready: set your agent's base_url to {proxy}/v1 "
            f"(model {self._settings.serving.model}); admin at {admin}"
        )

    def _wait_for_children(self) -> dict[str, str] | None:
        """Wait until each of our own processes is ready.

        Returns: their addresses by name; None when `sidecar up` is stopping.
        """
        ours = [child for child in self.children if child.spec.tells_ready]
        said_at = time.monotonic()
        while True:
            told = {child.spec.name: child.address for child in ours}
            known = {name: address for name, address in told.items() if address is not None}
            if len(known) == len(ours):
                return known
            now = time.monotonic()
            if now - said_at >= REMIND_S:
                said_at = now
                names = ", ".join(name for name, address in told.items() if address is None)
                self._announce(f"waiting for {names} to be ready; see logs/")
            if self.stopping.wait(TICK_S):
                return None

    def _wait_for_engine(self, upstreams: Upstreams) -> bool:
        """Wait until one vLLM answers, and say what to check. Returns False when stopping."""
        said_at: float | None = None
        owned = bool(self._settings.engine.command)
        while True:
            urls = upstreams.now()
            statuses = {status_of(f"{url}/v1/models") for url in urls}
            if {200, 401} & statuses:
                return True
            status = next((one for one in statuses if one is not None), None)
            now = time.monotonic()
            # While a child fails, its error must stand out: say nothing about vLLM.
            failing = any(child.is_failing for child in self.children)
            if not failing and (said_at is None or now - said_at >= REMIND_S):
                said_at = now
                self._announce(_waiting_line(" or ".join(urls), status, owned=owned))
            if self.stopping.wait(1.0):
                return False


def _leftover(state_dir: Path) -> str | None:
    """Name a running process that `sidecar up` would start too; None when there is none."""
    for name in LOCKED:
        if (who := holder(state_dir, name)) is not None:
            return f"`sidecar {name}` ({who})"
    return None


@contextlib.contextmanager
def _as_start_error(child: Child) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartError(
            f"cannot start {child.spec.name} ({error.strerror}); check that "
            f"{child.log_path.parent} is writable"
        ) from error


def _given_up(child: Child) -> str:
    return (
        f"gave up: {child.spec.name} ended {GIVE_UP_DEATHS} times before it was ready; the last "
        f"time it {child.died}; correct that, its log is {child.log_path}"
    )


def _waiting_line(url: str, status: int | None, *, owned: bool) -> str:
    if owned:
        return f"waiting for our vLLM at {url} to load its model; its log is logs/engine.log"
    seen = "nothing answers" if status is None else f"it answers with status {status}"
    return (
        f"waiting for vLLM at {url}: {seen}; check that it is running, that serving.upstreams "
        "names its address without /v1, and that no firewall is between; trying again every second"
    )
