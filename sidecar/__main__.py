"""`python -m sidecar`: the parent of the proxy's workers, of which there is one at least."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import errno
import gc
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.processes import ends_in_one_line, raise_open_files

if TYPE_CHECKING:
    from sidecar.proxy import Proxy
    from sidecar.settings import Settings

GC_THRESHOLDS = (50_000, 20, 50)
"""Thresholds of Python's garbage collector. Requests leave no reference cycles, so it may run
rarely."""
SWITCH_INTERVAL_S = 0.0005
"""Longest time that the recorder's thread holds the interpreter lock; Python's default is 5 ms."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in glibc's malloc.h."""
KEPT_FREE_BYTES = 32 * 2**20
"""Freed memory that the C library may keep, in bytes. A prompt of 1 MB then reuses the memory of
the previous one. Fresh memory takes 256 page faults, which cost more than nginx's whole request."""
LARGEST_KEPT_BYTES = 4 * 2**20
"""Largest block that is kept, in bytes. Longer bodies are rare and are returned to the kernel."""


def main(argv: list[str] | None = None) -> int:
    """Run the proxy. Returns: 0 after a stop by signal, 1 when it cannot start, 2 for bad use."""
    with ends_in_one_line("sidecar proxy"):
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="sidecar proxy", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="the settings file (TOML)")
    parser.add_argument("--workers", type=int, default=None, help="processes that share the port")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)  # see workers/worker.py
    parser.add_argument("--version", action="store_true", help="print the version")
    arguments = parser.parse_args(argv)
    if arguments.version:
        from sidecar.processes import installed_version

        print(f"sidecar {installed_version()}")  # noqa: T201 - what was asked for
        return 0

    from sidecar.errors import SettingsError
    from sidecar.logs import configure_logging
    from sidecar.settings import load_settings, with_workers

    raise_open_files()
    try:
        settings = load_settings(arguments.config)
        if arguments.workers is not None:
            settings = with_workers(settings, arguments.workers)
        configure_logging(settings.telemetry, "proxy")
        if arguments.worker is not None:
            return _run_worker(settings, arguments.worker)
        _log_if_interpreted()
        return _run_workers(settings, arguments.config)
    except SettingsError as error:
        print(f"sidecar proxy: {error}", file=sys.stderr)  # noqa: T201 - to the person who typed it
        return 2
    except OSError as error:
        why = str(error)
        if error.errno == errno.EADDRINUSE:
            from sidecar.workers.worker import cannot_listen

            why = cannot_listen("proxy", settings.proxy.host, settings.proxy.port, error)
        print(f"sidecar proxy: {why}", file=sys.stderr)  # noqa: T201 - to the person who typed it
        return 1


def _log_if_interpreted() -> None:
    """Log once that this install has no compiled relay."""
    from importlib.util import find_spec

    import structlog

    found = find_spec("sidecar.relay.flight")
    if found is not None and found.origin is not None and found.origin.endswith(".py"):
        structlog.get_logger().info(
            "relay_interpreted",
            cost="about twice the CPU per request",
            hint="install with pip where a C compiler is found; an editable install has none",
        )


def _run_workers(settings: Settings, config: Path | None) -> int:
    # Imports little: the parent relays nothing.
    from sidecar.workers.parent import Workers

    return asyncio.run(Workers(settings, config).run())


def _run_worker(settings: Settings, worker: str) -> int:
    import structlog
    import uvloop

    from sidecar.proxy import Proxy
    from sidecar.tracing.spans import GivenIds
    from sidecar.tracing.telemetry import configure_tracing
    from sidecar.workers.worker import decode_handover

    handover = decode_handover(worker)
    structlog.contextvars.bind_contextvars(worker=handover.slot)
    tracing = configure_tracing(settings.telemetry, "proxy", GivenIds())
    proxy = Proxy(settings, tracing, handover=handover)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(proxy))
    tracing.shutdown()
    return 0


async def _serve(proxy: Proxy) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    await proxy.start(parent_gone=stopping.set)
    _tune_garbage_collection()
    await stopping.wait()
    await proxy.stop()


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory. Other C libraries stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


def _tune_garbage_collection() -> None:
    """Exclude the objects of start-up from garbage collection, and collect less often.

    Measured: with 32 requests in flight the default threshold of 700 is reached at every batch,
    which takes 15% of the relay's time. A full collection over 84,000 objects stops the relay for
    36 ms, or 0.7 us after freezing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


if __name__ == "__main__":
    sys.exit(main())
