"""What one look through a long prompt costs: the measure of `prompt1m` and `opening1m`.

A proxy that routes by what is in the body must look through it once. The cheapest way to do that
from Python is a msgspec Struct with few fields, which skips the rest; `bytes.find` of a byte that
is not there (memchr) is the floor, and finds nothing. Both are measured as a proxy has to do them:
on its core, with the load at work on the other, on bytes that were copied before those of the other
connections were.
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
OPENING = BY_NAME["opening1m"]
"""A conversation is known by what it opens with, and here that is all of it."""
LOOKS = 100
IN_TURN = 4
"""Prompts that are looked at in turn, as they come over so many connections: one after the other
through the cache, and not one that stays in it."""
Scans = dict[str, float]
"""CPU microseconds per MB (10^6 bytes) of a prompt, by way of looking."""


class _Routing(msgspec.Struct):
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def scan_us_per_mb() -> Scans:
    """What a look costs; the median of some."""
    content = body(LARGE, 0)
    decoder = msgspec.json.Decoder(_Routing)
    ways: dict[str, Callable[[bytes], object]] = {
        "msgspec peek": decoder.decode,
        "memchr": lambda prompt: prompt.find(b"\x00"),
    }
    return {name: _median_us(look, content) / (len(content) / 1e6) for name, look in ways.items()}


def middle_look(scans: Sequence[Scans]) -> Scans:
    """The median over the rounds, of each way."""
    return {way: median(one[way] for one in scans) for way in scans[0]}


def growth_us_per_mb(samples: Samples, contender: str, large_one: Scenario = LARGE) -> Number:
    """How much a MB of prompt adds to the CPU of a request."""
    small = samples.middle(contender, SMALL.name, cpu_per_request)
    large = samples.middle(contender, large_one.name, cpu_per_request)
    if small is None or large is None:
        return None
    return (large - small) / ((large_one.prompt_bytes - SMALL.prompt_bytes) / 1e6)


def scan_rows(samples: Samples, contenders: tuple[str, ...], scans: Scans) -> list[Row]:
    """CPU per MB of prompt: the contenders', and what one look costs."""
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
    """Over what nginx pays for moving the bytes, the sidecar pays for one look at most.

    With capture on the prompt comes back as token ids, which nginx is not sent: its figure is in
    the rows, and is not a target.
    """
    found = []
    for large, which in ((LARGE, ""), (OPENING, " in one message")):
        ours, nginx = (growth_us_per_mb(samples, name, large) for name in (OFF, NGINX))
        value = None if ours is None or nginx is None else (ours - nginx) / scans["msgspec peek"]
        why = "" if value is not None else "not measured"
        what = f"CPU per MB of prompt{which}, {OFF} over {NGINX}, in looks (msgspec peek)"
        found.append(at_most(what, value, 1.0, why))
    return found


def _median_us(look: Callable[[bytes], object], content: bytes) -> float:
    times = []
    came: deque[bytes] = deque(maxlen=IN_TURN)
    for _ in range(LOOKS):
        came.append(bytes(bytearray(content)))
        began = time.thread_time_ns()
        look(came[0])
        times.append(time.thread_time_ns() - began)
    return median(times) / 1000
