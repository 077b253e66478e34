"""`sidecar up`: start every process of one machine, keep them running, stop what was started.

Only one `sidecar up` works with a `state_dir` at a time. Each child writes to its own log under
`state_dir/logs` (`deploy.supervise.child`). A child that dies is started again after a back-off and
the log says so; a child that dies again and again and was never ready ends `sidecar up` with its
last line. "ready" is about the processes started here, which report it themselves
(`sidecar.processes.readiness`), not about whoever answers at their ports. Signals go only to
processes started here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deploy.errors import StartError
from deploy.supervise.child import Child
from deploy.supervise.http_status import status_of
from deploy.supervise.processes import ENGINE, GIVE_UP_DEATHS, ProcessSpec, plan
from sidecar.errors import StateLockError
from sidecar.processes.state_lock import holder, only_one
from sidecar.settings import Settings
from sidecar.workers.handover import BALANCER_S, bind_listeners, cannot_listen

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
        upstreams = self._settings.serving.upstreams
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
        if told is None or not self._wait_for_engine(self._settings.serving.upstreams):
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

    def _wait_for_engine(self, urls: Sequence[str]) -> bool:
        """Wait until one vLLM answers, and say what to check. Returns False when stopping."""
        said_at: float | None = None
        owned = bool(self._settings.engine.command)
        while not {200, 401} & (statuses := {status_of(f"{url}/v1/models") for url in urls}):
            status = next((one for one in statuses if one is not None), None)
            now = time.monotonic()
            # While a child fails, its error must stand out: say nothing about vLLM.
            failing = any(child.is_failing for child in self.children)
            if not failing and (said_at is None or now - said_at >= REMIND_S):
                said_at = now
                self._announce(_waiting_line(" or ".join(urls), status, owned=owned))
            if self.stopping.wait(1.0):
                return False
        return True


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
