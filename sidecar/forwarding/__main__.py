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

from sidecar.processes import ends_in_one_line

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

    try:
        return _run(arguments.config)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _run(config: Path | None) -> int:
    import structlog

    from sidecar.capture.outbox import OutboxReader, outbox_path
    from sidecar.errors import SettingsError
    from sidecar.forwarding.process import PROCESS, Forwarder, Reporter, Tally, forward_alone
    from sidecar.forwarding.sender import DEAD_LETTERS_DAYS, FILE, DeadLetters, KafkaSender
    from sidecar.logs import configure_logging
    from sidecar.settings import KafkaUrl, load_settings, open_keyring, read_bus_url

    settings = load_settings(config)
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
        DeadLetters(settings.state_dir / FILE, max_age_s=DEAD_LETTERS_DAYS * 86_400.0),
        tally,
        partition_by=kafka.partition_by,
        keyring=open_keyring(settings.store),
    )
    log = structlog.get_logger()
    log.info("forwarding", to=str(place), outbox=str(path))
    forward_alone(settings.state_dir, forwarder, tally, stopping, stop_by)
    forwarder.close()
    reporter.stop()
    log.info("forwarding_stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
