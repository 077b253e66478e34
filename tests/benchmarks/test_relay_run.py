"""The quick mode, for a second: what the load counts and what the sidecar counts agree."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.relay import ours, run
from benchmarks.relay.contenders import Place
from benchmarks.relay.ends import Ends, build
from benchmarks.relay.measure import Sample, measure, scrape
from benchmarks.relay.scenarios import BY_NAME, MODEL, Scenario
from benchmarks.relay.stage import ROOT, Cores, Running, contender, pick_cores, upstream
from benchmarks.relay.summary import DIRECT, LITELLM, NGINX, OFF, ON, ROUTER
from demo.ports import free_port

pytestmark = pytest.mark.timeout(300)  # the first run compiles the relay
needs_machine = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("gcc", "cc", "clang"))
    or shutil.which("taskset") is None
    or len(os.sched_getaffinity(0)) < 2,
    reason="needs a C compiler, taskset and two cores",
)


def total(text: str, name: str, having: str) -> float:
    """The sum of a metric over the label sets that contain `having`."""
    lines = re.findall(rf"^{name}(\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in lines if having in labels)


def exchanges(text: str) -> float:
    return total(text, "sidecar_exchanges_total", "")


def captures(text: str) -> float:
    names = ("kept", "lost", "skipped")
    return sum(total(text, f"sidecar_captures_{name}_total", "") for name in names)


def await_balance(running: Running) -> str:
    """The metrics once all that was captured is written, or as they are after ten seconds."""
    deadline = time.monotonic() + 60
    while True:
        text = scrape(running)
        if exchanges(text) == captures(text) or time.monotonic() > deadline:
            return text
        time.sleep(0.05)


def make_place(folder: Path, port: int, upstream_port: int) -> Place:
    return Place(
        bench=folder, folder=folder / "x", port=port, upstream_port=upstream_port, ends_core=1
    )


def windows(
    running: Running, scenario: Scenario, ends: Ends, cores: Cores, folder: Path
) -> Iterator[Sample]:
    """Loads until a window sees a reply end: on a busy machine half a second may see none."""
    for number, seconds in enumerate((0.5, 2.0, 8.0, 32.0)):
        sample = measure(
            running,
            scenario,
            ends=ends,
            cores=cores,
            seconds=seconds,
            round_number=number,
            folder=folder,
        )
        yield sample
        if sample.report.requests:
            return


@needs_machine
def test_every_reply_that_the_load_got_is_counted_and_captured(tmp_path: Path) -> None:
    cores, ends = pick_cores(), build(tmp_path / "ends")
    scenario = BY_NAME["small32"]
    models = (MODEL, ours.CHAMPION, ours.CANARY)
    with upstream(ends, cores.ends, models) as (upstream_port, _):
        place = make_place(tmp_path, free_port(), upstream_port)
        with contender("ours-on", ours.capture_on, place, cores.proxy) as running:
            samples = list(windows(running, scenario, ends, cores, tmp_path))
            counted = await_balance(running)

    # The question whether it is ready counts too, and at its end each load leaves one open on each.
    fewest = sum(sample.report.replies_ever for sample in samples) + 1
    most = fewest + scenario.connections * len(samples)
    sample = samples[-1]
    assert sample.report.requests > 0
    assert (sample.report.refused, sample.report.broken) == (0, 0)
    assert sample.cpu_us_per_request is not None
    assert fewest <= exchanges(counted) <= most
    assert exchanges(counted) == captures(counted)
    assert sample.captures_kept is not None
    assert sample.captures_kept > 0
    arms = [
        total(counted, "sidecar_adapter_replies_total", f'arm="{arm}"')
        for arm in ("champion", "canary")
    ]
    assert min(arms) > 0
    assert not (tmp_path / "x").exists()  # it cleans up after itself


def test_every_peer_is_pinned_and_none_is_a_compromised_release() -> None:
    script = (ROOT / "benchmarks" / "relay" / "setup").read_text()
    (peers,) = re.findall(r'^PEERS="([^"]+)"', script, re.MULTILINE)

    requirements = [line.partition("=")[2] for line in peers.splitlines()]

    assert len(requirements) == 4
    assert all(re.fullmatch(r"[\w\[\]-]+==[\d.]+", one) for one in requirements)
    assert not {"litellm[proxy]==1.82.7", "litellm[proxy]==1.82.8"} & set(requirements)


def test_each_contender_of_the_targets_can_be_started() -> None:
    assert {NGINX, ROUTER, LITELLM, OFF, ON, DIRECT} <= set(run.NAMES)
