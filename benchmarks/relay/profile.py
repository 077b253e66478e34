"""`--profile`: where the sidecar's time goes under a scenario, by py-spy and by perf.

py-spy (installed by `benchmarks/relay/setup`) knows Python's functions, with the C that they call,
of the thread that holds the interpreter; perf (Linux) knows C's functions and the kernel's.
Either may be missing; then it is said, and the other is used.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.relay.ends import Ends, run_load
from benchmarks.relay.measure import request_file
from benchmarks.relay.scenarios import Scenario
from benchmarks.relay.stage import Cores, Running

RATE_HZ = 499
LINES = 30


def profile(
    running: Running,
    scenario: Scenario,
    *,
    ends: Ends,
    cores: Cores,
    seconds: float,
    folder: Path,
    bench: Path,
) -> str:
    """Load the contender twice, once under each profiler. Returns what they found, as text."""
    assert running.pid is not None
    window_s = str(int(max(seconds, scenario.min_seconds, 3.0)))
    command = [
        *("taskset", "-c", str(cores.ends), str(ends.load), str(running.port)),
        *(str(scenario.connections), str(scenario.warmup_s), str(float(window_s) + 1)),
        *(str(scenario.spread_ms), str(request_file(running, scenario, folder))),
    ]
    pid = str(running.pid)
    parts = [f"profile of {running.name} under {scenario.name}"]
    spy = bench / "peers" / "py-spy" / "bin" / "py-spy"
    stacks, perf_data = folder / "stacks.txt", folder / "perf.data"
    recorders = {
        "py-spy": [
            *(str(spy), "record", "--gil", "--function", "--subprocesses", "-f", "raw"),
            *("-r", str(RATE_HZ), "-d", window_s, "-o", str(stacks), "-p", pid),
        ],
        "perf": [
            *("perf", "record", "-q", "-F", str(RATE_HZ), "-o", str(perf_data), "-p", pid),
            *("--", "sleep", window_s),
        ],
    }
    for name, recorder in recorders.items():
        if shutil.which(recorder[0]) is None:
            parts.append(f"{name}: not there, left out")
            continue
        failed = _record(command, recorder, limit_s=float(window_s))
        if failed:
            parts.append(f"{name} failed: {failed}")
        elif name == "py-spy":
            parts.append(top(stacks.read_text().splitlines()))
        else:
            parts.append(_perf_report(perf_data))
    return "\n\n".join(parts)


def top(stacks: Iterable[str]) -> str:
    """The functions with the most time of their own and in all, of `a;b;c COUNT` lines."""
    own: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    total = 0
    for line in stacks:
        frames, _, number = line.rpartition(" ")
        count = int(number)
        names = frames.split(";")
        total += count
        own[names[-1]] += count
        for name in set(names):
            inside[name] += count
    if not total:
        return "py-spy: no samples"
    lines = [f"py-spy, {total} samples", "  own %  in all %  function"]
    for name, count in own.most_common(LINES):
        lines.append(f"  {count / total:5.1%}     {inside[name] / total:5.1%}  {name}")
    lines.append("  in all %  function")
    lines += [f"     {count / total:5.1%}  {name}" for name, count in inside.most_common(LINES)]
    return "\n".join(lines)


def _record(command: list[str], recorder: list[str], *, limit_s: float) -> str:
    """Run a recorder inside the window of a load. Returns why it failed, or nothing."""
    started: list[subprocess.Popen[str]] = []

    def begin() -> None:
        started.append(
            subprocess.Popen(recorder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )

    run_load(command, limit_s=limit_s + 2, at_begin=begin, at_end=lambda: None)
    time.sleep(0.1)
    recording = started[0]
    try:
        _, errors = recording.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        recording.kill()
        return "it did not end"
    return errors.strip()[-500:] if recording.returncode else ""


def _perf_report(data: Path) -> str:
    command = ["perf", "report", "-i", str(data), "--stdio", "--no-children", "-g", "none"]
    command += ["--percent-limit", "0.7", "--sort", "dso,symbol"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.rstrip(" -") for line in done.stdout.splitlines() if line.strip()]
    return "\n".join(["perf", *(line for line in lines if not line.startswith("#"))][: LINES + 10])
