"""What all processes share: starting, reports to `sidecar up`, locks, limits of files.

Only a child of this start has the pipe, so another program on the same port is never taken for it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from sidecar.errors import StateLockError

# Start the sidecar's own processes so that they never run code from the working folder.


def own_python(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs a module of the sidecar."""
    return (sys.executable, "-P", "-m", module, *arguments)


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of the sidecar."""
    safe = {**environ, "PYTHONSAFEPATH": "1"}
    # An empty entry, as in `PYTHONPATH=$PYTHONPATH:/x`, means the working folder.
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    safe.pop("PYTHONPATH", None)
    return {**safe, "PYTHONPATH": os.pathsep.join(entries)} if entries else safe


PACKAGE = "learning-sidecar"

# Packages of an extra that is not installed.

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "control": (
        "alembic", "apscheduler", "cronsim", "detect_secrets", "fsspec", "huggingface_hub",
        "jinja2", "jsonschema", "phonenumbers", "referencing", "tokenizers",
    ),
    "judge": ("litellm",),
    "learner": ("torch", "transformers", "peft", "safetensors"),
}  # fmt: skip
"""Extra of pyproject.toml -> the packages without which its processes do not work."""


def missing_packages(extra: str) -> str:
    """Say which packages of an extra are not installed, and what to do; "" when all are there.

    Imports nothing.
    """
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    return _to_install(extra, *missing) if missing else ""


def _to_install(extra: str, *packages: str) -> str:
    return (
        f"{', '.join(packages)} cannot be imported; run `pip install '{PACKAGE}[{extra}]'`, or "
        f"`pip install '.[{extra}]'` in a clone"
    )


# Ctrl-C, or a package that is not installed: one line, in place of a traceback.

INTERRUPTED = 130
"""The exit code that shells give a program which SIGINT ended: 128 + 2."""


@contextmanager
def ends_in_one_line(name: str) -> Iterator[None]:
    """Run the body of a process's `main`.

    name: the command, as the line shows it.
    Raises: SystemExit with code 130 at Ctrl-C, unless the body has set a handler of its own; with
        code 1 where a package of `EXTRAS` is not installed.
    """

    def end(_number: int = 0, _frame: FrameType | None = None) -> NoReturn:
        sys.stderr.write(f"{name}: interrupted\n")
        raise SystemExit(INTERRUPTED)

    # Only the main thread may set a handler; Python delivers the signal to no other thread.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, end) if is_main else None
    try:
        yield
    except KeyboardInterrupt:  # an event loop that ended restored Python's own handler
        end()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((one for one, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        sys.stderr.write(f"{name}: {_to_install(extra, package)}\n")
        raise SystemExit(1) from None
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)


# How many files a process may have open, and how many connections fit into that.

OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE)
MOST_FILES: Final = 2**20
"""The limit is raised no further: Linux's default of `fs.nr_open`. Some containers have a hard
limit of 10^9, and programs that we start (an operator's vLLM) may walk through all of it."""
KEPT_BACK: Final = 64
"""Files for what a process opens after its start: the connections to the store and the outbox
(three files each), logs, scrapes of the metrics."""


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one; processes started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS allows less than it says; the lower limit is obeyed
        return


def connections_that_fit(wanted: int, *, files_each: int) -> int:
    """Return how many connections the files that are not open yet have room for: at most `wanted`,
    at least one. files_each: files that one connection needs."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    free = limit - len(os.listdir("/dev/fd")) - KEPT_BACK
    return max(1, min(wanted, free // files_each))


# What load balancers and orchestrators are told of a process, and whether any asks.

WATCHED_S = 100.0
"""Two probes within so long are those of a load balancer, or of an orchestrator: they ask every 1
to 30 s by default. Whoever waits for a start asks no more once it has been told."""
TELL_S = 10.0
"""How often the parent of the workers is told, at most, that somebody asks."""


class Readiness:
    """What probes are told of this process, and whether there are any."""

    def __init__(
        self,
        watched: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """watched: called now and then while probes come."""
        self.leaving = False
        """The process ends soon, so it is not ready for new requests."""
        self._watched = watched
        self._clock = clock
        self._answered_at = self._told_at = -WATCHED_S

    def status(self, *, works: bool) -> int:
        """Return the status for a probe. works: requests can be answered."""
        if not works or self.leaving:
            return 503
        now = self._clock()
        if now - self._answered_at < WATCHED_S and now - self._told_at >= TELL_S:
            self._told_at = now
            self._watched()
        self._answered_at = now
        return 200


VARIABLE = "SIDECAR_READY_FD"
"""Environment variable with the descriptor of the pipe."""
_READY = "ready"
_SAY = "say"
MAX_SAID = 900
"""Characters of a line for the terminal: in UTF-8 it fits what a pipe takes in one piece."""
_READ_BYTES = 65_536
"""What a pipe holds."""


class Report:
    """A child's end of the pipe. Says nothing in a process that a person started."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def ready(self, address: str = "") -> None:
        """Report that this process works. address: the base URL at which it listens."""
        self._write(f"{_READY} {address}")

    def say(self, line: str) -> None:
        """Have `sidecar up` show a line on its terminal."""
        self._write(f"{_SAY} {' '.join(line.split())[:MAX_SAID]}")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, line: str) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, f"{line}\n".encode())
        except OSError as error:
            _warn("ready_not_told", error)


def open_report() -> Report:
    """Return this process's end of the pipe; the first caller gets it."""
    number = os.environ.pop(VARIABLE, "")  # children of this process do not inherit the pipe
    if not number.isdigit():
        return Report(None)
    try:
        descriptor = int(number)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)  # a `sidecar up` that hangs must hold up nobody
            return Report(descriptor)
    except (OSError, OverflowError) as error:
        _warn("ready_not_told", error)
    return Report(None)


def tell_ready(address: str = "") -> None:
    """Report readiness once, and nothing more; see `Report.ready`."""
    report = open_report()
    report.ready(address)
    report.close()


def read_report(descriptor: int) -> tuple[str | None, list[str]]:
    """Read what the child reported since the last call through its non-blocking pipe.

    Returns: its address, "" when it listens nowhere, None when it did not report that it is ready;
    and the lines for the terminal.
    """
    try:
        text = os.read(descriptor, _READ_BYTES).decode("utf-8", "replace")
    except BlockingIOError:
        return None, []
    reports = [line.partition(" ") for line in text.split("\n")]
    ready = [rest for word, _, rest in reports if word == _READY]
    return (ready[0] if ready else None), [rest for word, _, rest in reports if word == _SAY]


# Allow one process of a kind for each `state_dir`, by a lock that the kernel releases with it.


@contextmanager
def only_one(state_dir: Path, name: str) -> Iterator[None]:
    """Hold the lock of `sidecar <name>`. Raises: StateLockError when another process holds it."""
    descriptor = _open(state_dir, name)
    try:
        if not _locked(descriptor, state_dir):
            raise StateLockError(
                f"`sidecar {name}` runs already ({_holder(descriptor)}) with state_dir "
                f"{state_dir.resolve()}; stop it first, or give this one a state_dir, a bus.url "
                "and a store.url of its own"
            )
        _note_holder(descriptor)
        yield
    finally:
        os.close(descriptor)


def holder(state_dir: Path, name: str) -> str | None:
    """Return who holds the lock, in words; None when it is free. Raises: StateLockError."""
    descriptor = _open(state_dir, name)
    try:
        return None if _locked(descriptor, state_dir) else _holder(descriptor)
    finally:
        os.close(descriptor)


def _open(state_dir: Path, name: str) -> int:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Never removed: another process may just have locked it.
        return os.open(state_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateLockError(
            f"state_dir {state_dir.resolve()} cannot be written ({error.strerror}); make it "
            "writable, or set another state_dir"
        ) from error


def _locked(descriptor: int, state_dir: Path) -> bool:
    """Take the lock if it is free, and return whether that worked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StateLockError(
            f"state_dir {state_dir.resolve()} cannot be locked ({error.strerror}); set a "
            "state_dir on a local disk"
        ) from error
    return True


def _holder(descriptor: int) -> str:
    pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
    return f"pid {pid}" if pid.isdigit() else "pid not known"


def _note_holder(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:  # a full disk: the lock holds without the text
        _warn("lock_holder_not_noted", error)


# The version of the installed package.


def installed_version() -> str:
    """The version that pip installed, or words that say that it installed none."""
    from importlib.metadata import PackageNotFoundError, version  # slow: 25 ms of each start

    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown (run from a folder that pip did not install)"


def _warn(event: str, error: Exception) -> None:
    import structlog  # the command line imports this module, and needs no logs

    structlog.get_logger().warning(event, why=str(error))
