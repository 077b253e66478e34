"""`make demo-tasks`: the same agent learns from the same traffic twice, by single answers and by
whole tasks.

Its tasks (`demo.refunds`) are such that the polite first line dooms the third step. Everything is
real but the judge, which reads single answers by a stated rule and likes courtesy
(`demo.stand_in_rule`). Two arms, one after the other, each from the base:

- next action: groups of answers to one prompt, scored by the judge.
- whole tasks: groups of attempts at one task, rewarded by the outcome that the agent reports.

A candidate has to pass its gate, on held-out sessions: by the judge in the first arm, in the second
by tasks that the agent, as a runner, attempts with candidate and champion. Those that pass are
promoted by hand: the ramp is what `make demo` shows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import matplotlib
import uvicorn
from openai import AsyncOpenAI

from demo.exam import Interval, bootstrap
from demo.ports import free_port
from demo.refunds import EXAM, TRAFFIC, Attempt, Case
from demo.rounds import RoundWatcher
from demo.stack import MODEL, ROOT, Stack
from ingest.tasks.runner import RunnerModel, Scenario, runner_app
from sidecar.records import BASE
from sidecar.routing.table import upstream_model
from sidecar.settings.kinds import ask_loopback_directly

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # the backend must be chosen first

DEMO = ROOT / ".demo"
ROUNDS = 1
MAX_TOKENS = 12
SIZE = 4
"""Attempts in a group."""
AT_ONCE = 4
"""Tasks that are attempted at once, `SIZE` times each."""
EXAM_ATTEMPTS = 6
"""Attempts at each task of an exam."""
MOST_BATCHES = 20
"""Batches without a run after which the demo gives up."""

COMMON: Mapping[str, Mapping[str, Any]] = {
    "learner": {"max_age_versions": 1, "learning_rate": 8e-4, "max_groups": 24},
    "canary": {
        "steps": [100],
        "turn_wait_s": 0.0,
        "promote_on": "quick",
        "gate_prompts": 4,
        "gate_answers": 2,
        "gate_min_prompts": 1,
        "margin": 0.1,
        "max_tokens": MAX_TOKENS,
    },
    "watch": {"hold": False},  # it would hold a champion whose lines are cut short
}
ARMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # About as many answers in a run: 24 groups of 6, or 14 groups of 4 tasks of 3 steps.
    "next_action": {
        "groups": {"size": 6, "settle_s": 1.0, "concurrency": 18, "max_slowdown": 0.0},
        "learner": {"min_groups": 24, "groups_per_step": 4},
    },
    "whole_tasks": {
        "groups": {"rate": 0.0, "settle_s": 1.0, "max_slowdown": 0.0},
        "learner": {"min_groups": 14, "groups_per_step": 3},
        "tasks": {"learn": "outcome", "key": "header", "size": SIZE},
        "rehearsals": {"tokens_per_day": 6_000},
    },
}
HELD_OUT_RATE = 0.08
"""Of the sessions. The gate wants four; a task whose attempt is held out has a group less."""
STARTED = time.monotonic()


def say(line: str) -> None:
    print(f"  [{time.monotonic() - STARTED:4.0f}s] {line}", flush=True)


async def play(attempt: Attempt, client: AsyncOpenAI, **request: Any) -> None:
    """Play an attempt to its end. request: further fields of each request."""
    while not attempt.over:
        messages: Any = list(attempt.messages)
        reply = await client.chat.completions.create(
            messages=messages, max_tokens=MAX_TOKENS, temperature=1.0, **request
        )
        attempt.take(reply.choices[0].message.content or "")


async def rollout(model: RunnerModel, scenario: Scenario) -> bool:
    """The same agent as a runner: attempt a recorded task."""
    attempt = Attempt(messages=[dict(one) for one in scenario.messages])
    await play(attempt, model.openai_client(), model=model.name)
    return attempt.success


@contextmanager
def runner() -> Iterator[str]:
    """Serve `rollout` in a thread. Yields: its URL."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(runner_app(rollout), host="127.0.0.1", port=port, log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10.0)


class Agent:
    """Attempts tasks with the official client, and reports how they ended if there is a sidecar."""

    def __init__(self, base_url: str, model: str, *, reports: bool) -> None:
        self._client = AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="not-needed", timeout=300.0, max_retries=4
        )
        self._http = httpx.AsyncClient(base_url=base_url, timeout=60.0)
        self._model = model
        self._reports = reports

    async def attempt(self, case: Case, number: int) -> Attempt:
        """Play one attempt to its end."""
        attempt, session = Attempt(messages=case.messages), f"{case.name}-{number}"
        await play(
            attempt,
            self._client,
            model=self._model,
            user=f"customer-{number}",
            extra_headers={"x-sidecar-session": session, "x-sidecar-task": case.name},
        )
        if self._reports:
            told = {"session_id": session, "success": attempt.success}
            (await self._http.post("/sidecar/v1/outcomes", json=told)).raise_for_status()
        return attempt

    async def attempts(self, cases: Sequence[Case], each: int, first: int) -> list[Attempt]:
        """Play `each` attempts at these tasks, 16 at a time. first: number of the first one."""
        gate = asyncio.Semaphore(AT_ONCE * SIZE)

        async def one(case: Case, number: int) -> Attempt:
            async with gate:
                return await self.attempt(case, number)

        wanted = [case for case in cases for _ in range(each)]
        return list(
            await asyncio.gather(*(one(case, first + at) for at, case in enumerate(wanted)))
        )

    async def close(self) -> None:
        await self._client.close()
        await self._http.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What one way of learning came to."""

    by_round: tuple[float, ...]
    """Share of the traffic's tasks that ended well, before each round's training."""
    before: Interval
    after: Interval
    gain: Interval

    @classmethod
    def of(cls, by_round: Sequence[float], before: Sequence[float], after: Sequence[float]) -> Arm:
        """before, after: [tasks] success rates of base and champion in the exam."""
        differences = [new - old for old, new in zip(before, after, strict=True)]
        return cls(
            by_round=tuple(by_round),
            before=bootstrap(before),
            after=bootstrap(after),
            gain=bootstrap(differences),
        )

    def as_json(self) -> dict[str, float]:
        return {
            "before": round(self.before.mean, 4),
            "after": round(self.after.mean, 4),
            "gain": round(self.gain.mean, 4),
            "gain_low": round(self.gain.low, 4),
            "gain_high": round(self.gain.high, 4),
            "n": len(EXAM),
        }


def share(attempts: Sequence[Attempt]) -> float:
    return sum(attempt.success for attempt in attempts) / len(attempts)


async def exam(stack: Stack, adapter: str) -> list[float]:
    """Return the success rate of an adapter at each held-out task, asked of vLLM itself."""
    agent = Agent(stack.addresses.engine_url, upstream_model(MODEL, adapter), reports=False)
    played = await agent.attempts(EXAM, EXAM_ATTEMPTS, 0)
    await agent.close()
    rates = [share(played[at : at + EXAM_ATTEMPTS]) for at in range(0, len(played), EXAM_ATTEMPTS)]
    say(f"exam of {adapter}: {share(played):.0%} of {len(played)} attempts at unseen tasks succeed")
    return rates


class Operator:
    """What a person does at the admin API: looks, and promotes what passed the gate."""

    def __init__(self, admin_url: str) -> None:
        self._http = httpx.AsyncClient(base_url=f"{admin_url}/admin/v1", timeout=30.0)

    async def runs(self) -> int:
        """How many runs have begun."""
        return len((await self._get("/runs")).json()["items"])

    async def promote_ramping(self) -> None:
        """Promote each candidate that has passed its gate."""
        while True:
            for canary in (await self._get("/canaries")).json()["items"]:
                if canary["state"] == "ramping":
                    path = f"/canaries/{canary['canary_id']}"
                    etag = (await self._get(path)).headers["etag"]
                    await self._http.post(
                        f"{path}/promote",
                        json={"reason": "demo: the ramp is not shown"},
                        headers={"if-match": etag},
                    )
            await asyncio.sleep(1.0)

    async def close(self) -> None:
        await self._http.aclose()

    async def _get(self, path: str) -> httpx.Response:
        return (await self._http.get(path)).raise_for_status()


async def learn(stack: Stack, rounds: int) -> tuple[list[float], str]:
    """Let customers come, and the sidecar learn from them, for some rounds.

    Returns: (the traffic's success rate in each round, the last champion).
    """
    agent = Agent(stack.addresses.proxy_url, MODEL, reports=True)
    operator = Operator(stack.addresses.admin_url)
    watcher = RoundWatcher(stack.addresses.admin_url, say)
    promoting = asyncio.create_task(operator.promote_ramping())
    cases = itertools.cycle(TRAFFIC)
    rates, champion, sent = [], BASE, 0
    for number in range(1, rounds + 1):
        played: list[Attempt] = []
        for _ in range(MOST_BATCHES):
            played += await agent.attempts(
                list(itertools.islice(cases, AT_ONCE)), SIZE, sent + len(played)
            )
            if await _begins(operator, number):
                break
        else:
            if number == 1:
                raise SystemExit(f"demo: no run began after {len(played)} tasks: {stack.folder}")
            say(f"round {number}: {share(played):.0%} of {len(played)} tasks ended well, too few")
            say("  groups have ends that differ: there is little left to learn")
            break
        sent += len(played)
        rates.append(share(played))
        say(f"round {number} of {rounds}: {rates[-1]:.0%} of {len(played)} tasks ended well")
        champion = (await watcher.next_round()).champion
    await watcher.pause_learner()
    promoting.cancel()
    await agent.close()
    await operator.close()
    return rates, champion


async def _begins(operator: Operator, number: int) -> bool:
    """Wait some seconds for run `number` to begin: groups are drawn in the background."""
    for _ in range(16):
        if await operator.runs() >= number:
            return True
        await asyncio.sleep(0.5)
    return False


def settings_of(arm: str, runner_url: str) -> dict[str, dict[str, Any]]:
    """Return the settings of an arm: the common ones and its own."""
    merged: dict[str, dict[str, Any]] = {"groups": {"held_out_rate": HELD_OUT_RATE}}
    for section, values in (*COMMON.items(), *ARMS[arm].items()):
        merged.setdefault(section, {}).update(values)
    if "rehearsals" in merged:
        merged["rehearsals"]["runner"] = runner_url
    return merged


def table(arms: Mapping[str, Arm]) -> str:
    """What both arms came to, for a terminal."""
    lines = [f"  {'':<14}{'before':<24}{'after':<24}gain (95% bootstrap interval)"]
    for name, arm in arms.items():
        shown = [
            f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in (arm.before, arm.after)
        ]
        gain = f"{arm.gain.mean:+.2f}  ({arm.gain.low:+.2f} to {arm.gain.high:+.2f})"
        lines.append(f"  {name.replace('_', ' '):<14}{shown[0]:<24}{shown[1]:<24}{gain}")
    return "\n".join(lines)


def plot(path: Path, arms: Mapping[str, Arm]) -> None:
    """Success of the traffic by round, and of the exam before and after."""
    rounds = max(len(arm.by_round) for arm in arms.values())
    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=120)
    for (name, arm), colour in zip(arms.items(), ("#a33", "#1f6f8b"), strict=False):
        xs = range(1, len(arm.by_round) + 1)
        axes.plot(xs, arm.by_round, ":", marker=".", color=colour, alpha=0.7)
        ends = (arm.before, arm.after)
        axes.errorbar(
            (0, rounds + 1),
            [one.mean for one in ends],
            yerr=[[one.mean - one.low for one in ends], [one.high - one.mean for one in ends]],
            marker="o", capsize=4, color=colour, label=name.replace("_", " "),
        )  # fmt: skip
    names = ["exam of the base", *(f"round {at}" for at in range(1, rounds + 1))]
    axes.set_xticks(range(rounds + 2), [*names, "exam of the champion"])
    axes.set_ylabel("tasks that end well")
    axes.set_ylim(0, 1)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    axes.set_title("Refunds in three steps (bars: 95% bootstrap over held-out tasks)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


async def run(arm: str, rounds: int, before: list[float] | None) -> tuple[Arm, list[float]]:
    """Run one arm in a stack of its own. before: the base's exam, if it has sat it."""
    folder = DEMO / f"run-{arm}"
    shutil.rmtree(folder, ignore_errors=True)
    say(f"{arm.replace('_', ' ')}: starting vLLM and the sidecar")
    with runner() as url, Stack(folder=folder, overrides=settings_of(arm, url)) as stack:
        if before is None:
            before = await exam(stack, BASE)
        rates, champion = await learn(stack, rounds)
        after = await exam(stack, champion)
    return Arm.of(rates, before, after), before


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.tasks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--arm", choices=tuple(ARMS), action="append", help="default: both")
    arguments = parser.parse_args()
    ask_loopback_directly(os.environ)  # all of the demo is on this machine
    # The judge reads single answers by a stated rule; no other one is asked.
    os.environ.pop("SIDECAR_JUDGE__MODEL", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("demo: whole tasks beside next actions; the judge is a stand-in (a stated rule, no LLM)")
    arms: dict[str, Arm] = {}
    before: list[float] | None = None
    for name in arguments.arm or ARMS:
        arms[name], before = asyncio.run(run(name, arguments.rounds, before))
    run_s = time.monotonic() - STARTED
    result = {**{name: arm.as_json() for name, arm in arms.items()}, "run_s": round(run_s, 1)}
    (DEMO / "tasks.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    plot(DEMO / "tasks.png", arms)
    print(f"\nheld-out tasks: {len(EXAM)}, {EXAM_ATTEMPTS} attempts at each; share that ends well")
    print(table(arms))
    print(
        f"wall time: {run_s:.0f} s; files: .demo/tasks.json, .demo/tasks.png, logs in .demo/run-*"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
