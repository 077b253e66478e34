"""The ingest process, `python -m ingest`: stores exchanges from the bus and selects groups."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from sidecar.errors import SettingsError, StateLockError, StoreError
from sidecar.logs import configure_logging
from sidecar.processes.readiness import tell_ready
from sidecar.processes.state_lock import only_one
from sidecar.settings import Settings, load_settings
from sidecar.tracing.telemetry import configure_tracing

if TYPE_CHECKING:
    from ingest.intake.loop import Intake

PROCESS = "ingest"

log = structlog.get_logger()


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns: 0 after a signal, 1 when another ingest runs or the store cannot be opened, 2 when the
        settings are wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m ingest", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="default ./sidecar.toml")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings(arguments.config)
        with only_one(settings.state_dir, PROCESS):
            return _start(settings)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (StateLockError, StoreError) as error:
        sys.stderr.write(f"sidecar ingest: {error}\n")
        return 1


def _start(settings: Settings) -> int:
    from ingest.intake.bus import open_bus
    from ingest.intake.loop import Intake
    from sidecar.store.database import Database

    bus = open_bus(settings.bus.url)
    configure_logging(settings.telemetry, PROCESS)
    tracing = configure_tracing(settings.telemetry, PROCESS)
    database = Database(settings.store.url)
    try:
        asyncio.run(_run(Intake(bus, database, settings)))
    finally:
        database.close()
        bus.close()
        tracing.shutdown()
    return 0


async def _run(intake: Intake) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info("ingest_started")
    tell_ready()
    await intake.run(stop)
    log.info("ingest_stopped")


if __name__ == "__main__":
    sys.exit(main())
