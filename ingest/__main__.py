"""The ingest process, `python -m ingest`: stores exchanges from the bus and selects groups."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.processes import ends_in_one_line, raise_open_files

if TYPE_CHECKING:
    from ingest.intake.loop import Intake
    from sidecar.settings import Settings

PROCESS = "ingest"


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns: 0 after a signal, 1 when another ingest runs or the store cannot be opened, 2 when the
        settings are wrong.
    """
    with ends_in_one_line("sidecar ingest"):
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ingest", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="default ./sidecar.toml")
    arguments = parser.parse_args(argv)

    from sidecar.errors import SettingsError, StateLockError, StoreError
    from sidecar.processes import only_one
    from sidecar.settings import load_settings

    raise_open_files()
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
    from ingest.garbage_collection import collect_rarely
    from ingest.intake.bus import open_bus
    from ingest.intake.loop import Intake
    from sidecar.logs import configure_logging
    from sidecar.settings import open_keyring
    from sidecar.store.database import Database
    from sidecar.tracing.telemetry import configure_tracing

    configure_logging(settings.telemetry, PROCESS)
    bus = open_bus(settings.bus.url, settings.kafka)
    tracing = configure_tracing(settings.telemetry, PROCESS)
    database = Database(settings.store.url, open_keyring(settings.store))
    try:
        intake = Intake(bus, database, settings)
        collect_rarely()
        asyncio.run(_run(intake))
    finally:
        database.close()
        bus.close()
        tracing.shutdown()
    return 0


async def _run(intake: Intake) -> None:
    import structlog

    from sidecar.processes import tell_ready

    log = structlog.get_logger()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info("ingest_ready")
    tell_ready()
    await intake.run(stop)
    log.info("ingest_stopped")


if __name__ == "__main__":
    sys.exit(main())
