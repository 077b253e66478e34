"""Measure one scan of a long prompt: the unit of the targets of `prompt1m` and `opening1m`.

A proxy that routes by the contents of the body must scan it once. The cheapest way from Python is a
msgspec Struct with few fields, which skips the rest. `bytes.find` of a byte that does not occur
(memchr) is a lower bound that finds nothing. Both are measured under a proxy's conditions: on its
core, with the load on the other core, and with the prompts of other connections read in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from benchmarks.relay.scenarios import BY_NAME, Scenario, body
from benchmarks.relay.summary import NGINX, OFF, Number, Samples, cpu_per_request
from benchmarks.results import Row, Target, at_most

SMALL, LARGE = BY_NAME["prompt1k"], BY_NAME["prompt1m"]
PREFIX = BY_NAME["opening1m"]
"""The conversation prefix, which names the session, is the whole prompt here."""
SCANS = 100
IN_TURN = 4
"""Prompts that are scanned in turn, one per connection, so that none stays in the CPU's cache."""
Scans = dict[str, float]
"""CPU microseconds per MB (10^6 bytes) of a prompt, by method."""


class _Routing(msgspec.Struct):
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def scan_us_per_mb() -> Scans:
    """Measure a scan by each method; the median of `SCANS` runs."""
    content = body(LARGE, 0)
    decoder = msgspec.json.Decoder(_Routing)
    ways: dict[str, Callable[[bytes], object]] = {
        "msgspec peek": decoder.decode,
        "memchr": lambda prompt: prompt.find(b"\x00"),
    }
    return {name: _median_us(scan, content) / (len(content) / 1e6) for name, scan in ways.items()}


def median_scans(scans: Sequence[Scans]) -> Scans:
    """Return each method's median over the rounds."""
    return {way: median(one[way] for one in scans) for way in scans[0]}


def growth_us_per_mb(samples: Samples, contender: str, large_one: Scenario = LARGE) -> Number:
    """Return the CPU that each MB of prompt adds to a request."""
    small = samples.middle(contender, SMALL.name, cpu_per_request)
    large = samples.middle(contender, large_one.name, cpu_per_request)
    if small is None or large is None:
        return None
    return (large - small) / ((large_one.prompt_bytes - SMALL.prompt_bytes) / 1e6)


def scan_rows(samples: Samples, contenders: tuple[str, ...], scans: Scans) -> list[Row]:
    """List the CPU per MB of prompt of each contender and of one scan by each method."""
    figures: list[tuple[str, Number]] = [
        *((name, growth_us_per_mb(samples, name)) for name in contenders),
        *scans.items(),
    ]
    return [
        {"scenario": "prompt growth", "contender": name, "cpu_us_per_mb": round(value, 1)}
        for name, value in figures
        if value is not None
    ]


def scan_targets(samples: Samples, scans: Scans) -> list[Target]:
    """Judge the sidecar's cost above nginx, which only moves the bytes: at most one scan.

    With capture on, the reply contains the prompt's token ids, which nginx is not sent. So that
    figure is in the rows and is no target.
    """
    found = []
    for large, which in ((LARGE, ""), (PREFIX, " in one message")):
        ours, nginx = (growth_us_per_mb(samples, name, large) for name in (OFF, NGINX))
        value = None if ours is None or nginx is None else (ours - nginx) / scans["msgspec peek"]
        why = "" if value is not None else "not measured"
        what = f"CPU per MB of prompt{which}, {OFF} over {NGINX}, in scans (msgspec peek)"
        found.append(at_most(what, value, 1.0, why))
    return found


def _median_us(scan: Callable[[bytes], object], content: bytes) -> float:
    times = []
    came: deque[bytes] = deque(maxlen=IN_TURN)
    for _ in range(SCANS):
        came.append(bytes(bytearray(content)))
        began = time.thread_time_ns()
        scan(came[0])
        times.append(time.thread_time_ns() - began)
    return median(times) / 1000
