"""Processes that capture under load until they are killed, and say what they did: one for each
line of standard input, forked from this one, which has everything imported. See
`test_capture_killed.py`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from sidecar.capture.outbox import Outbox
from sidecar.capture.recorder import Capture, Limits
from sidecar.metrics.proxy import Metrics
from sidecar.records import Assignment, RawCapture, Timings

ROUTE = Assignment(adapter="base", arm="champion", propensity=1.0, upstream_model="m")
REPLY = json.dumps(
    {
        "model": "m",
        "prompt_token_ids": [1] * 200,
        "choices": [
            {
                "message": {"role": "assistant", "content": "ok" * 50},
                "token_ids": [7] * 50,
                "logprobs": {"content": [{"token": "ok", "logprob": -0.5}] * 50},
            }
        ],
        "usage": {"completion_tokens": 50},
    }
).encode()


said = -1


def say(line: str) -> None:
    os.write(said, line.encode() + b"\n")  # in the file before the next step


class SayingCapture(Capture):
    """A capture that says when it flushed."""

    def _flush(self) -> None:
        began = time.monotonic()
        super()._flush()
        say(f"flush {began} {time.monotonic()}")


def capture_until_killed(path: Path, flush_interval_s: float) -> None:
    limits = Limits(flush_interval_s=flush_interval_s, max_pending=1_000_000)
    outbox = Outbox(path, max_rows=1_000_000)
    capture = SayingCapture(limits, outbox, Metrics(), None)
    capture.start()
    os.write(1, b"%d\n" % os.getpid())
    number = 0
    while True:
        name = f"ex_{number}"
        capture.offer(
            RawCapture(
                exchange_id=name,
                public_model="m",
                route=ROUTE,
                replica="http://vllm",
                session_key="h:s",
                user="",
                request=b'{"temperature":0.5}',
                reply=(REPLY,),
                streamed=False,
                status=200,
                outcome="ok",
                timings=Timings(started_at=1_000.0),
            )
        )
        say(f"offer {name} {time.monotonic()}")
        number += 1
        time.sleep(0.0005)


def main() -> None:
    global said
    for line in sys.stdin:
        path, flush_interval_s, log = line.split("\t")
        child = os.fork()
        if child == 0:
            said = os.open(log.rstrip("\n"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            capture_until_killed(Path(path), float(flush_interval_s))
        _, status = os.waitpid(child, 0)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
