"""`python -m benchmarks.relay.drain BUS_URL`: read the bus as ingest does, and keep nothing.

So that the outbox is as full as one with a reader that keeps up, and its writer meets that reader.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from ingest.errors import BusError
from ingest.intake.bus import open_bus

PAUSE_S = 0.1
BATCH = 1_000


def main(url: str) -> int:
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    bus = open_bus(url)
    while not stopping:
        try:
            envelopes = bus.read(BATCH)
            if envelopes:
                bus.commit(envelopes[-1].position)
        except BusError as error:  # the writer holds it, or has not made it yet
            print(f"drain: {error}", file=sys.stderr)
            envelopes = []
        if len(envelopes) < BATCH:
            time.sleep(PAUSE_S)
    bus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
