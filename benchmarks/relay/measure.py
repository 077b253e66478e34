"""One measurement: one contender under one scenario for one window."""

from __future__ import annotations

import http.client
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.relay import process_tree
from benchmarks.relay.ends import Ends, LoadReport, run_load
from benchmarks.relay.scenarios import Scenario, requests, write_requests
from benchmarks.relay.stage import Cores, Running

SETTLED_SHARE = 0.05
"""After a load the next one waits until the contender uses less of a core than this."""
SETTLE_LIMIT_S = 5.0
_CAPTURES = re.compile(
    r"^sidecar_captures_(kept|lost)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one window showed."""

    contender: str
    scenario: str
    round: int
    report: LoadReport
    cpu_share: float | None
    """CPU seconds of the contender's process tree per second; None for the upstream alone."""
    proxy_core: float
    """Share of the proxy's core that was busy, with whatever else ran there."""
    ends_core: float
    rss_mb: float | None
    peak_rss_mb: float | None
    captures_kept: float | None = None
    captures_lost: float | None = None

    @property
    def cpu_us_per_request(self) -> float | None:
        """CPU microseconds of the whole process tree per reply."""
        return self._cpu_us(self.report.requests)

    @property
    def cpu_us_per_event(self) -> float | None:
        """The same per event of a stream."""
        return self._cpu_us(self.report.events)

    def _cpu_us(self, count: int) -> float | None:
        # As rates, because the two windows open and close within a millisecond, not at once.
        if self.cpu_share is None or count == 0:
            return None
        return self.cpu_share / (count / self.report.seconds) * 1e6


@dataclass(slots=True)
class _Gauge:
    """Reads the clocks as the window opens and closes."""

    pid: int | None
    cores: Cores
    readings: list[tuple[float, float, float, float]] = field(default_factory=list)

    def read(self) -> None:
        cpu = process_tree.cpu_s(self.pid) if self.pid is not None else 0.0
        proxy = process_tree.core_idle_s(self.cores.proxy)
        ends = process_tree.core_idle_s(self.cores.ends)
        self.readings.append((time.monotonic(), cpu, proxy, ends))

    def shares(self) -> tuple[float, float, float]:
        """CPU seconds per second of the process tree, of the proxy's core and of the other core."""
        first, last = self.readings
        wall = last[0] - first[0]
        tree, proxy_idle, ends_idle = ((last[i] - first[i]) / wall for i in (1, 2, 3))
        return tree, max(0.0, 1 - proxy_idle), max(0.0, 1 - ends_idle)


def measure(
    running: Running,
    scenario: Scenario,
    *,
    ends: Ends,
    cores: Cores,
    seconds: float,
    round_number: int,
    folder: Path,
    meanwhile: Callable[[], None] | None = None,
) -> Sample:
    """Load one contender for one window. Raises: RuntimeError when the load generator fails.

    meanwhile: called once as the window opens; what it does goes on beside the load.
    """
    asked = request_file(running, scenario, folder)
    seconds = max(seconds, scenario.min_seconds)
    command = [
        *("taskset", "-c", str(cores.ends), str(ends.load), str(running.port)),
        *(str(scenario.connections), str(scenario.warmup_s), str(seconds)),
        *(str(scenario.spread_ms), str(asked)),
    ]
    gauge = _Gauge(running.pid, cores)
    before = captures(running)
    if running.pid is not None:
        process_tree.reset_peak(running.pid)

    def at_begin() -> None:
        gauge.read()
        if meanwhile is not None:
            meanwhile()

    report = run_load(
        command, limit_s=scenario.warmup_s + seconds, at_begin=at_begin, at_end=gauge.read
    )
    tree, proxy, busy_ends = gauge.shares()
    rss = peak = None
    if running.pid is not None:
        rss, peak = process_tree.rss_mb(running.pid), process_tree.peak_rss_mb(running.pid)
        settle(running.pid)
    after = captures(running)
    kept = lost = None
    if before is not None and after is not None:
        kept, lost = after[0] - before[0], after[1] - before[1]
    return Sample(
        contender=running.name,
        scenario=scenario.name,
        round=round_number,
        report=report,
        cpu_share=tree if running.pid is not None else None,
        proxy_core=proxy,
        ends_core=busy_ends,
        rss_mb=rss,
        peak_rss_mb=peak,
        captures_kept=kept,
        captures_lost=lost,
    )


def request_file(running: Running, scenario: Scenario, folder: Path) -> Path:
    """The load generator's requests for this contender, written once."""
    path = folder / f"{running.name}-{scenario.name}.bin"
    if not path.exists():
        authority = f"127.0.0.1:{running.port}"
        write_requests(path, requests(scenario, authority, running.launch))
    return path


def settle(pid: int) -> None:
    """Wait until the process tree is idle: it may still write captures or clean up."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    pause = 0.15
    while time.monotonic() < deadline:
        before = process_tree.cpu_s(pid)
        time.sleep(pause)
        if process_tree.cpu_s(pid) - before < SETTLED_SHARE * pause:
            return


def captures(running: Running) -> tuple[float, float] | None:
    """(kept, lost) so far, of a contender that counts them; None, and told, without an answer."""
    if running.launch.metrics_path is None:
        return None
    try:
        text = scrape(running)
    except (OSError, http.client.HTTPException) as error:
        print(f"  {running.name}: its metrics cannot be read: {error}", file=sys.stderr)
        return None
    sums = {"kept": 0.0, "lost": 0.0}
    for name, value in _CAPTURES.findall(text):
        sums[name] += float(value)
    return sums["kept"], sums["lost"]


def scrape(running: Running) -> str:
    """The text of the contender's metrics. Raises: OSError, http.client.HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
    try:
        headers = {"authorization": f"Bearer {running.launch.key}"}
        connection.request("GET", str(running.launch.metrics_path), headers=headers)
        return connection.getresponse().read().decode()
    finally:
        connection.close()
