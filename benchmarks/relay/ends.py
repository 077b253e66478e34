"""Build and run the two ends of the wire: the fake upstream and the load generator.

They are C, because both must fit on one core beside a proxy that may take 20 microseconds of
another for a request: the load and the upstream together must cost less than that, or they are
what is measured. Measured: together about 18 microseconds of CPU a request without a proxy, and
nginx fills its core before they fill theirs (the column `ends_core` of the result). wrk cannot read
events, and a Python client costs more than what it would measure.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.relay.histogram import Histogram
from benchmarks.relay.process_tree import share_priority

SOURCES = Path(__file__).with_name("ends")
OPTIONS = ("-O2", "-Wall", "-Wextra", "-Werror")
GRACE_S = 20.0
"""The load generator ends by its own clock; this much later it hangs, and is ended."""


class BuildError(Exception):
    """The ends cannot be built; the message says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two programs."""

    upstream: Path
    load: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What the load generator saw in its window."""

    seconds: float
    requests: int
    """Whole replies of status 200."""
    events: int
    refused: int
    """Whole replies of another status."""
    broken: int
    """Connections that ended before the reply did."""
    replies_ever: int
    """Whole replies of any status, the warm-up's too."""
    fewest_events: int
    most_events: int
    """Most events of a stream that ended in the window; `fewest_events` is the least number."""
    latency: Histogram
    first_byte: Histogram


def build(folder: Path) -> Ends:
    """Compile what changed since the last time. Raises: BuildError."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise BuildError(
            "no C compiler on PATH for the load generator; install one "
            "(Debian: apt-get install gcc libc6-dev) and run this again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    stamp = hashlib.sha256(text + " ".join(OPTIONS).encode()).hexdigest()[:12]
    built = {}
    for name in ("upstream", "load"):
        program = folder / f"{name}-{stamp}"
        if not program.exists():
            command = [compiler, *OPTIONS, "-o", str(program), str(SOURCES / f"{name}.c")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
        built[name] = program
    return Ends(upstream=built["upstream"], load=built["load"])


def parse_report(text: str) -> LoadReport:
    """Read the load generator's line of JSON."""
    values = json.loads(text)
    return LoadReport(**{name: values[name] for name in LoadReport.__dataclass_fields__})


def run_load(
    command: list[str], *, limit_s: float, at_begin: Callable[[], None], at_end: Callable[[], None]
) -> LoadReport:
    """Run the load generator; the two calls are made as its window opens and closes.

    Raises: RuntimeError when it fails or does not end in time.
    """
    calls = {"begin": at_begin, "end": at_end}
    last = ""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as load:
        share_priority(load.pid)
        assert load.stdout is not None
        assert load.stderr is not None
        watchdog = threading.Timer(limit_s + GRACE_S, load.kill)
        watchdog.start()
        try:
            for line in load.stdout:
                word = line.strip()
                if word in calls:
                    calls[word]()
                else:
                    last = word
            errors = load.stderr.read()
        finally:  # Ctrl-C too: it must not outlive us
            watchdog.cancel()
            load.kill()
    if not last.startswith("{"):
        raise RuntimeError(f"the load generator failed ({load.returncode}): {errors.strip()}")
    return parse_report(last)
