"""The part `ttft`: what users of the real vLLM notice of the sampling of candidates.

vLLM's CPU build with the shipped model, the proxy and ingest run all the time; users ask in blocks.
In the blocks of the arm `on` the scoring process runs too and samples candidates for the users'
requests, every one of which is chosen, so it samples whenever it may. Further arms do so with other
settings. Arms alternate, forwards and backwards (off on on off ...).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ruler.server import ROOT, Json, running
from benchmarks.ruler.users.load import Asked, users
from benchmarks.ruler.users.waits import percentile, ratio
from demo.ports import free_port
from demo.questions import load_questions
from demo.stack import MODEL, Addresses, configuration, to_toml
from sidecar.parent_death import guarded_command
from sidecar.processes import own_python

START_S = 420.0
STOP_S = 60.0
WARM_UP_S = 5.0
"""Start of each block that does not count."""
SLICE_S = 5.0
OFF, ON = "off", "on"
Sections = Mapping[str, Mapping[str, Any]]  # Any: a setting's value
Changes = Sections
"""Settings: section -> key -> value."""
P50, P99 = 0.50, 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How users ask."""

    blocks: int
    """How many blocks each arm has."""
    block_s: float
    rate: float
    """Requests a second."""
    max_tokens: int
    also: Mapping[str, Changes]
    """Further arms with sampling on: name -> settings that differ."""


def measure(folder: Path, plan: Plan) -> list[Json]:
    """Measure all arms. Returns: a row for each, `off` first, compared with that one."""
    with ExitStack() as stack:
        judge = stack.enter_context(running(folder, {}))
        addresses = Addresses(engine=free_port(), proxy=free_port(), admin=free_port(), judge=None)
        sections = _sections(folder, addresses, judge.url)
        config = _written(folder / "sidecar.toml", sections)
        engine = sections["engine"]
        stack.enter_context(_process("engine", engine["command"], folder, engine["env"]))
        _wait(f"{addresses.engine_url}/health", folder / "engine.log")
        for name, module in (("proxy", "sidecar"), ("ingest", "ingest")):
            stack.enter_context(_module(name, module, config))
        _wait(f"{addresses.proxy_url}/readyz", folder / "proxy.log")
        arms: dict[str, Path | None] = {OFF: None, ON: config}
        for number, (name, changes) in enumerate(plan.also.items()):
            merged = {
                section: {**values, **changes.get(section, {})}
                for section, values in {**{name: {} for name in changes}, **sections}.items()
            }
            arms[name] = _written(folder / f"arm-{number}.toml", merged)
        return _rows(folder, arms, addresses, plan)


def _written(path: Path, sections: Sections) -> Path:
    path.write_text(to_toml(path.parent, sections))
    return path


def _sections(folder: Path, addresses: Addresses, judge_url: str) -> dict[str, dict[str, Any]]:
    sections = configuration(folder, addresses, {})
    sections["engine"]["command"] += ["--scheduling-policy", "priority"]
    # No learner takes groups away here, and no block may run out of groups.
    sections["groups"] = {
        "held_out_rate": 0.0,
        "settle_s": 0.0,
        "max_groups_per_session": 1_000_000,
    }
    sections["learner"]["max_groups"] = 1_000_000
    sections["judge"] = {
        "model": "openai/plain--ttft",
        "api_base": judge_url,
        "api_key": "none-is-asked",
    }
    return sections


def _rows(
    folder: Path, arms: Mapping[str, Path | None], addresses: Addresses, plan: Plan
) -> list[Json]:
    """arms: name -> configuration of the scoring process; None: it does not run."""
    questions = load_questions()
    texts = [turn for one in questions.traffic for turn in one.turns]
    rng = random.Random(7)
    slices: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    failed = dict.fromkeys(slices, 0)
    sampled = dict.fromkeys(slices, 0)

    def block(seconds: float) -> list[Asked]:
        return asyncio.run(
            users(
                addresses.proxy_url,
                MODEL,
                questions.system,
                texts,
                rate=plan.rate,
                seconds=seconds,
                max_tokens=plan.max_tokens,
                rng=rng,
            )
        )

    block(WARM_UP_S)
    forwards = list(arms)
    for number in range(plan.blocks):
        for arm in forwards if number % 2 == 0 else forwards[::-1]:
            before, config = _candidates(folder), arms[arm]
            with _quiet(addresses) if config is None else _sampling(config, folder):
                found = block(WARM_UP_S + plan.block_s)
            sampled[arm] += _candidates(folder) - before
            counted = [one for one in found if one.at >= WARM_UP_S]
            failed[arm] += sum(one.first_s is None for one in counted)
            slices[arm] += _sliced(counted)
            waits = [wait for one in slices[arm] for wait in one]
            shown = f"p50 {percentile(waits, P50):.3f} s, p99 {percentile(waits, P99):.3f} s so far"
            print(f"  block {number + 1} of {plan.blocks}, {arm}: {shown}", file=sys.stderr)
    return [
        {**_row(arm, slices[arm], failed[arm], sampled[arm]), **_over_off(arm, slices)}
        for arm in arms
    ]


def _row(arm: str, slices: Sequence[Sequence[float]], failed: int, sampled: int) -> Json:
    waits = [wait for one in slices for wait in one]
    return {
        "what": "users' TTFT",
        "sampling": arm,
        "requests": len(waits),
        "failed": failed,
        "candidates": sampled,
        "p50_s": round(percentile(waits, P50), 4),
        "p90_s": round(percentile(waits, 0.9), 4),
        "p99_s": round(percentile(waits, P99), 4),
        "max_s": round(max(waits), 4),
    }


def _over_off(arm: str, slices: Mapping[str, Sequence[Sequence[float]]]) -> Json:
    if arm == OFF:
        return {}
    row: Json = {}
    for name, share in (("p50", P50), ("p99", P99)):
        found = ratio(slices[arm], slices[OFF], share)
        row[f"{name}_over_off"] = round(found.value, 3)
        row[f"{name}_interval"] = f"[{found.low:.3f}, {found.high:.3f}]"
    return row


def _sliced(asked: Sequence[Asked]) -> list[list[float]]:
    """Put the waits of a block into slices of time."""
    slices: dict[int, list[float]] = {}
    for one in asked:
        if one.first_s is not None:
            slices.setdefault(int(one.at / SLICE_S), []).append(one.first_s)
    return list(slices.values())


@contextmanager
def _sampling(config: Path, folder: Path) -> Iterator[None]:
    """Run the scoring process, which samples; users are asked once it has begun."""
    before = _candidates(folder)
    with _module("score", "ingest.score", config):
        _until(lambda: _candidates(folder) > before, folder / "score.log")
        yield


@contextmanager
def _quiet(addresses: Addresses) -> Iterator[None]:
    """Wait until vLLM has nothing left to do of the block before."""

    def idle() -> bool:
        text = httpx.get(f"{addresses.engine_url}/metrics", timeout=30.0, trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_")]
        return all(float(line.split()[-1]) == 0 for line in lines)

    _until(idle, None)
    yield


def _candidates(folder: Path) -> int:
    """Count the sampled answers in the store."""
    with closing(sqlite3.connect(folder / "store.db", timeout=30.0)) as connection:
        rows = connection.execute("SELECT COUNT(*) FROM answer WHERE origin = 'sampled'")
        number: int = rows.fetchone()[0]
        return number


def _module(name: str, module: str, config: Path) -> AbstractContextManager[None]:
    command = own_python(module, "--config", str(config))
    return _process(name, command, config.parent, {"PYTHONPATH": str(ROOT)})


@contextmanager
def _process(
    name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]
) -> Iterator[None]:
    """Run a process that ends with this one, and end it."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*guarded_command(), *command],
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, log: Path) -> None:
    def answers() -> bool:
        try:
            return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    _until(answers, log)


def _until(condition: Callable[[], bool], log: Path | None) -> None:
    """Raises: RuntimeError with the end of the log."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            said = "" if log is None else f"; {log.name}: {log.read_text(errors='replace')[-2000:]}"
            raise RuntimeError(f"the stack did not get ready{said}")
        time.sleep(0.3)
