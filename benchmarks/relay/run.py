"""`python -m benchmarks relay`: the whole comparison, or a part of it for whoever tunes.

All contenders run at the same time, idle but for the one that is loaded, and take turns
(A B C A B C ...), so that a slow minute of the machine hits all alike. The idle ones stay off the
core of the one that is loaded. Figures are medians over the rounds, and every target is a ratio of
figures of the same round.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results
from benchmarks.relay import contenders, memory, ours
from benchmarks.relay.contenders import Launch, Place, Start
from benchmarks.relay.ends import BuildError, Ends, build
from benchmarks.relay.interpreter import chosen
from benchmarks.relay.measure import Sample, measure
from benchmarks.relay.memory import Soak, soak_row, soak_target
from benchmarks.relay.profile import profile
from benchmarks.relay.scan import (
    LARGE,
    PREFIX,
    Scans,
    median_scans,
    scan_rows,
    scan_targets,
    scan_us_per_mb,
)
from benchmarks.relay.scenarios import BY_NAME, MODEL, SCENARIOS, Scenario
from benchmarks.relay.stage import ROOT, Cores, Running, contender, on_stage, pick_cores, upstream
from benchmarks.relay.summary import COLUMNS, DIRECT, OFF, ON, Samples, rows, targets
from benchmarks.relay.unavailable import UnavailableError
from demo.ports import free_port

BENCH = ROOT / ".bench"
STARTS: dict[str, Start] = {
    "nginx": contenders.nginx,
    "ours-off": ours.capture_off,
    "ours-on": ours.capture_on,
    "ours-pure-off": ours.pure_capture_off,
    "ours-pure-on": ours.pure_capture_on,
    "vllm-router": contenders.vllm_router,
    "rllm-gateway": contenders.rllm_gateway,
    "litellm": contenders.litellm,
}
NAMES = (DIRECT, *STARTS)
COMPILED = (
    "ours-off and ours-on run the relay compiled, as pip installs it: targets are\n"
    "judged by them. ours-pure-off and ours-pure-on run the same sources interpreted."
)
DEFAULT_SOAK_S = 20.0
SCAN_S = 1.0
DISTURBED = 0.05
"""Share of the proxy's core that others may have before it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for."""

    only: tuple[str, ...]
    scenarios: tuple[Scenario, ...]
    seconds: float
    rounds: int
    soak_s: float
    """How long memory is watched at load; 0 leaves it out."""
    profile: bool
    out: Path
    nice: int
    partial: bool
    """Not everything is measured: targets that cannot be judged do not count."""


def parse(argv: Sequence[str]) -> Options:
    """Read the command line. Exits with 2 on bad use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks relay", description=__doc__)
    parser.add_argument("--only", help=f"contenders, by comma: {', '.join(NAMES)}")
    parser.add_argument("--scenario", help=f"scenarios, by comma: {', '.join(BY_NAME)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="a window's length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--soak",
        type=float,
        help="seconds that memory is watched at load; BENCH_SOAK_S else; 0 when a part is chosen",
    )
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="where the JSON goes")
    parser.add_argument("--profile", action="store_true", help="also show where time goes")
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="priority of all that is measured; under 0 (needs root) on a machine with other work",
    )
    chosen = parser.parse_args(argv)
    only = chosen.only.split(",") if chosen.only else list(NAMES)
    names = chosen.scenario.split(",") if chosen.scenario else list(BY_NAME)
    for given, known in ((only, NAMES), (names, BY_NAME)):
        for name in given:
            if name not in known:
                parser.error(f"unknown name {name!r}; there are: {', '.join(known)}")
    partial = bool(chosen.only or chosen.scenario)
    soak_s = float(os.environ.get("BENCH_SOAK_S", 0.0 if partial else DEFAULT_SOAK_S))
    return Options(
        only=tuple(name for name in NAMES if name in only),
        scenarios=tuple(one for one in SCENARIOS if one.name in names),
        seconds=chosen.seconds,
        rounds=chosen.rounds,
        soak_s=soak_s if chosen.soak is None else chosen.soak,
        profile=chosen.profile,
        out=chosen.out,
        nice=chosen.nice,
        partial=partial,
    )


@dataclass(slots=True)
class Stage:
    """What runs, and what could not be started."""

    ends: Ends
    cores: Cores
    folder: Path
    running: dict[str, Running]
    why_missing: dict[str, str]


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    machine = results.machine()
    try:
        os.nice(options.nice)  # what is started from here on has it too
        cores = pick_cores()
        ends = build(BENCH / "ends")
    except (UnavailableError, BuildError, PermissionError) as error:
        print(f"bench relay: {error}", file=sys.stderr)
        return 1
    BENCH.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=BENCH))
    with ExitStack() as stack:
        stack.enter_context(_alone())
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stage = Stage(ends=ends, cores=cores, folder=folder, running={}, why_missing={})
        _start(stage, options.only, stack)
        machine["contenders_python"] = chosen().what
        machine["contenders"] = {
            name: one.launch.version for name, one in stage.running.items() if one.launch.version
        }
        measured, scan_rounds = _measure(stage, options)
        samples, scans = Samples(measured), median_scans(scan_rounds or [_scan(stage)])
        soaks = _soak(stage, options)
        if options.profile:
            _profile(stage, options)
    return _conclude(options, samples, soaks, scans, stage.why_missing, machine)


@contextmanager
def _alone() -> Iterator[None]:
    """Wait for another run on this machine to end: two at once measure each other."""
    with (Path(tempfile.gettempdir()) / f"sidecar-bench-{os.getuid()}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("  another benchmark runs on this machine; waiting for it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(stage: Stage, only: Sequence[str], stack: ExitStack) -> None:
    models = (MODEL, ours.CHAMPION, ours.CANARY)
    port, _ = stack.enter_context(upstream(stage.ends, stage.cores.ends, models))
    stage.running[DIRECT] = Running(name=DIRECT, port=port, pid=None, launch=Launch(command=()))
    for name in only:
        if name == DIRECT:
            continue
        print(f"  starting {name}", file=sys.stderr)
        place = Place(
            bench=BENCH,
            folder=stage.folder / name,
            port=free_port(),
            upstream_port=port,
            ends_core=stage.cores.ends,
        )
        try:
            running = stack.enter_context(contender(name, STARTS[name], place, stage.cores.ends))
        except UnavailableError as error:
            stage.why_missing[name] = str(error)
            print(f"  {name}: {error}", file=sys.stderr)
        else:
            stage.running[name] = running


def _measure(stage: Stage, options: Options) -> tuple[list[Sample], list[Scans]]:
    """Measure the contenders, and one scan in every round whose target needs it."""
    samples, scan_rounds = [], []
    for scenario in options.scenarios:
        print(f"  {scenario.name}: {scenario.what}", file=sys.stderr)
        for number in range(options.rounds):
            for name in options.only:
                if name not in stage.running:
                    continue
                samples.append(_measure_one(stage, options, name, scenario, number))
            if scenario in (LARGE, PREFIX):
                scan_rounds.append(_scan(stage))
    return samples, scan_rounds


def _measure_one(
    stage: Stage, options: Options, name: str, scenario: Scenario, number: int
) -> Sample:
    with on_stage(stage.running[name], stage.cores):
        return measure(
            stage.running[name],
            scenario,
            ends=stage.ends,
            cores=stage.cores,
            seconds=options.seconds,
            round_number=number,
            folder=stage.folder,
        )


def _scan(stage: Stage) -> Scans:
    """Measure a scan on the proxies' core, while the other core is as busy as under load."""
    scans: Scans = {}
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {stage.cores.proxy})
    try:
        measure(
            stage.running[DIRECT],
            LARGE,
            ends=stage.ends,
            cores=stage.cores,
            seconds=SCAN_S,
            round_number=0,
            folder=stage.folder,
            meanwhile=lambda: scans.update(scan_us_per_mb()),
        )
    finally:
        os.sched_setaffinity(0, mine)
    return scans


def _soak(stage: Stage, options: Options) -> list[Soak]:
    if options.soak_s <= 0:
        return []
    print(f"  memory: {options.soak_s:.0f} s of {memory.SCENARIO} each", file=sys.stderr)
    soaks = []
    for name in (OFF, ON):
        if name not in stage.running:
            continue
        with on_stage(stage.running[name], stage.cores):
            soaks.append(
                memory.soak(
                    stage.running[name],
                    ends=stage.ends,
                    cores=stage.cores,
                    seconds=options.soak_s,
                    folder=stage.folder,
                )
            )
    return soaks


def _profile(stage: Stage, options: Options) -> None:
    for name in (OFF, ON):
        if name not in stage.running:
            continue
        for scenario in options.scenarios:
            with on_stage(stage.running[name], stage.cores):
                text = profile(
                    stage.running[name],
                    scenario,
                    ends=stage.ends,
                    cores=stage.cores,
                    seconds=options.seconds,
                    folder=stage.folder,
                    bench=BENCH,
                )
            print(f"\n{text}")


def _conclude(
    options: Options,
    samples: Samples,
    soaks: Sequence[Soak],
    scans: Scans,
    why_missing: dict[str, str],
    machine: dict[str, object],
) -> int:
    kinds = [(one.name, one.kind == "stream") for one in options.scenarios]
    found = rows(samples, options.only, kinds, why_missing)
    judged = targets(samples, why_missing=why_missing)
    growths = scan_rows(samples, options.only, scans)
    judged += scan_targets(samples, scans)
    soaked = [soak_row(one) for one in soaks]
    judged += [soak_target(one) for one in soaks]
    if OFF in why_missing or ON in why_missing:
        names = [f"{name}: {why_missing[name]}" for name in (OFF, ON) if name in why_missing]
        print(f"the sidecar did not start: {'; '.join(names)}", file=sys.stderr)
        return 1
    if options.partial:
        judged = [target for target in judged if target.value is not None]
    for scenario in options.scenarios:
        print(f"\n{scenario.name}: {scenario.what}")
        print(results.table([one for one in found if one["scenario"] == scenario.name], COLUMNS))
    for title, more in (("CPU per MB of prompt", growths), ("memory at load", soaked)):
        if more:
            columns = list(dict.fromkeys(column for one in more for column in one))
            print(f"\n{title}")
            print(results.table(more, columns[1:]))
    others = samples.other_work()
    machine["other_work"] = None if others is None else round(others, 3)
    if others is not None and others > DISTURBED:
        print(f"\nother work had {others:.0%} of the proxy's core: latencies here say little,")
        print("and the ratios of CPU are the only figures to read")
    for contender_name, why in why_missing.items():
        print(f"\n{contender_name} is not in this result: {why}")
    print(f"\n{COMPILED}")
    print(results.targets_table(judged))
    name = "relay-part" if options.partial else "relay"
    path = results.write(
        name, [*found, *growths, *soaked], judged, machine=machine, folder=options.out
    )
    print(f"\nwritten to {path}")
    return results.exit_code(judged)
