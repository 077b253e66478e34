"""A proxy's recorder under a steady load, in a process of its own.

`python -m benchmarks.ingest.feeder BUS RATE SECONDS LOG PREFIX` offers replies to the real
recorder, which writes them to the real bus at its flush interval. Each exchange id is written to
the log with the time of its reply. With MOST as a last argument, it pauses while more records than
that wait on the bus. After SIGTERM it writes what it has offered, and ends.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

from benchmarks.ingest.traffic import MODEL, exchanges
from sidecar.capture.outbox import Outbox, OutboxReader, outbox_path
from sidecar.capture.recorder import LIMITS, Capture
from sidecar.metrics.proxy import Metrics
from sidecar.records import Assignment, Exchange, RawCapture

ROUTE = Assignment(adapter="base", arm="champion", propensity=1.0, upstream_model=MODEL)


LOOK_S = 0.2
"""Between two looks at how many records wait."""


def main(
    url: str, rate: float, seconds: float, log: Path, prefix: str, most: float = float("inf")
) -> None:
    outbox = Outbox(outbox_path(url, log.parent), max_rows=1_000_000)
    capture = Capture(LIMITS, outbox, Metrics(), None)
    capture.start()
    source = exchanges(prefix=prefix)
    reader = OutboxReader(outbox_path(url, log.parent))
    looked = 0.0
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    began = time.monotonic()
    with log.open("a") as written:
        number = 0
        while (now := time.monotonic() - began) < seconds and not ending.is_set():
            while number < now * rate:
                exchange = next(source)
                written.write(f"{exchange.exchange_id} {time.time()}\n")
                capture.offer(_raw(exchange))
                number += 1
            written.flush()
            time.sleep(0.002)
            if most < float("inf") and now - looked > LOOK_S:
                paused = time.monotonic()
                while reader.count() > most and not ending.is_set():
                    time.sleep(LOOK_S)
                began += time.monotonic() - paused
                looked = time.monotonic() - began
    if not capture.stop(60.0):
        sys.exit("the recorder did not write all it was offered")


def _raw(exchange: Exchange) -> RawCapture:
    """The exchange as the relay hands it to the recorder: nothing of the reply is parsed."""
    (choice,) = exchange.choices
    ids = choice.token_ids
    reply = {
        "model": exchange.public_model,
        "prompt_token_ids": exchange.prompt_token_ids,
        "choices": [
            {
                "index": 0,
                "message": json.loads(choice.message),
                "finish_reason": choice.finish_reason,
                "token_ids": ids,
                "logprobs": {"content": [{"token": "", "logprob": one} for one in choice.logprobs]},
            }
        ],
        "usage": {"completion_tokens": len(ids)},
    }
    return RawCapture(
        exchange_id=exchange.exchange_id,
        public_model=exchange.public_model,
        route=ROUTE,
        replica=exchange.replica,
        session_key=exchange.session_key,
        user="",
        request=exchange.request,
        reply=(json.dumps(reply).encode(),),
        streamed=False,
        status=200,
        outcome="ok",
        timings=exchange.timings,
    )


if __name__ == "__main__":
    words = sys.argv[1:]
    limits = map(float, words[5:])
    main(words[0], float(words[1]), float(words[2]), Path(words[3]), words[4], *limits)
