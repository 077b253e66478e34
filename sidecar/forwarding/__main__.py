"""The forwarding process, `python -m sidecar.forwarding`: from the outbox to Kafka.

The proxy starts one and starts it again when it ends. Outside the proxy's process, because the
library is Python: its checksums and compression would take turns with the relay.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.processes import ends_in_one_line

if TYPE_CHECKING:
    from sidecar.forwarding.process import Forwarder, Tally
    from sidecar.settings import Settings

PROCESS = "forward"
POLL_S = 0.1
"""Pause when the outbox is empty."""
LOCK_S = 1.0
"""Pause between attempts to take the lock, which the forwarder of a proxy that ends may hold."""
DRAIN_S = 5.0
"""At the end, how long to forward what is still in the outbox. The rest stays in it."""


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns: 0 after a signal, 2 when the settings are wrong."""
    with ends_in_one_line("sidecar forward"):
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sidecar.forwarding", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="default ./sidecar.toml")
    arguments = parser.parse_args(argv)

    from sidecar.errors import SettingsError
    from sidecar.settings import load_settings

    try:
        settings = load_settings(arguments.config)
        return _run(settings)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _run(settings: Settings) -> int:
    import structlog

    from sidecar.capture.outbox import OutboxReader, outbox_path
    from sidecar.errors import SettingsError
    from sidecar.forwarding.process import Forwarder, Reporter, Tally
    from sidecar.forwarding.sender import DEAD_LETTERS_DAYS, FILE, DeadLetters, KafkaSender
    from sidecar.logs import configure_logging
    from sidecar.settings import KafkaUrl, open_keyring, read_bus_url

    place, kafka = read_bus_url(settings.bus.url), settings.kafka
    if not isinstance(place, KafkaUrl):
        raise SettingsError("bus.url names no Kafka, so there is nothing to forward to")
    configure_logging(settings.telemetry, PROCESS)
    stopping = threading.Event()
    stop_by = [float("inf")]

    def stop(_number: int, _frame: object) -> None:
        stop_by[0] = min(stop_by[0], time.monotonic() + DRAIN_S)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    path, tally = outbox_path(settings.bus.url, settings.state_dir), Tally()
    counted = OutboxReader(path)  # of the reporter's thread
    reporter = Reporter(tally, counted.count, sys.stdout.buffer)
    reporter.start()
    forwarder = Forwarder(
        OutboxReader(path),
        lambda: KafkaSender(place, kafka, lambda: time.monotonic() >= stop_by[0]),
        DeadLetters(
            settings.state_dir / FILE,
            max_age_s=DEAD_LETTERS_DAYS * 86_400.0,
        ),
        tally,
        partition_by=kafka.partition_by,
        keyring=open_keyring(settings.store),
    )
    log = structlog.get_logger()
    log.info("forwarding", to=str(place), outbox=str(path))
    _alone(settings, forwarder, tally, stopping, stop_by)
    forwarder.close()
    reporter.stop()
    log.info("forwarding_stopped")
    return 0


def _alone(
    settings: Settings,
    forwarder: Forwarder,
    tally: Tally,
    stopping: threading.Event,
    stop_by: list[float],
) -> None:
    """Forward once this process is the only one with this `state_dir`, until it is stopped."""
    import structlog

    from sidecar.errors import StateLockError
    from sidecar.processes import only_one

    while not stopping.is_set():
        try:
            with only_one(settings.state_dir, PROCESS):
                forward_until(forwarder, tally, stopping)
                _drain(forwarder, tally, stop_by[0])
                return
        except StateLockError as error:
            structlog.get_logger().warning("forwarding_waits_for_lock", why=str(error))
            stopping.wait(LOCK_S)


def forward_until(forwarder: Forwarder, tally: Tally, stopping: threading.Event) -> None:
    """Forward until `stopping` is set. Errors are counted and logged, and tried again."""
    import structlog

    from sidecar.backoff import Backoff
    from sidecar.errors import ForwardingError, OutboxError

    log = structlog.get_logger()
    pauses = Backoff(first_s=0.5, last_s=5.0)
    failures = 0
    while not stopping.is_set():
        forwarder.expire(time.time())
        try:
            gone = forwarder.step()
        except (ForwardingError, OutboxError) as error:
            failures += 1
            pause_s = pauses.wait_s(failures)
            tally.failed(error.reason)
            log.warning("forwarding_waits", reason=error.reason, error=str(error), pause_s=pause_s)
            stopping.wait(pause_s)
            continue
        if gone or not failures:
            tally.worked()
            if failures:
                log.warning("forwarding_goes_on", failures=failures)
            failures = 0
        if not gone:
            stopping.wait(POLL_S)


def _drain(forwarder: Forwarder, tally: Tally, stop_by: float) -> None:
    import structlog

    from sidecar.errors import ForwardingError, OutboxError

    try:
        while time.monotonic() < stop_by and forwarder.step():
            continue
    except (ForwardingError, OutboxError) as error:
        tally.failed(error.reason)
        structlog.get_logger().warning("records_stay_in_outbox", why=str(error))


if __name__ == "__main__":
    sys.exit(main())
