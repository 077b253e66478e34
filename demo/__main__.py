"""`make demo`: watch a small agent get better from its own traffic, then roll it all back.

Everything is real except the judge, which is a stand-in unless `SIDECAR_JUDGE__MODEL` names one:
vLLM serves SmolLM2-135M, customers talk to it through the proxy, the learner trains LoRA adapters
from what was captured, and control decides which of them may serve.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.agent import SupportAgent
from demo.exam import ExamAnswer, bootstrap, grade, sit_exam
from demo.questions import load_questions
from demo.report import HeldOut, compare, plot_rounds, table, write_result
from demo.rollback import live_rollback
from demo.rounds import Round, RoundWatcher
from demo.stack import MODEL, ROOT, Stack
from demo.traffic import Traffic
from ingest.ruler.judge import LiteLlmJudge
from ingest.vllm.sampler import VllmSampler
from sidecar.records import BASE
from sidecar.routing.table import upstream_model
from sidecar.settings import load_settings
from sidecar.settings.kinds import ask_loopback_directly

DEMO = ROOT / ".demo"
ROUNDS = 4
ROUND_ANSWERS = 1
FINAL_ANSWERS = 4
LINEAGE_LINES, LINEAGE_WIDTH = 30, 150
WAVE, PAUSE_S = 8, 5.0
EXAM_LIMIT_S = 900.0
"""Time for one answer of the exam. A machine with other work must not end the demo."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # A week of production in a quarter of an hour: small runs, short steps, every session grouped.
    "groups": {
        "size": 6,
        "held_out_rate": 0.2,
        "settle_s": 2.0,
        "concurrency": 18,
        # Its users are a script, and candidates need not keep out of their way.
        "max_slowdown": 0.0,
    },
    "learner": {
        "min_groups": 16,
        "max_groups": 16,
        "max_age_versions": 1,
        "groups_per_step": 4,
        "learning_rate": 7e-4,
    },
    "canary": {
        "steps": [4000, 8000],
        "step_min_s": 4.0,
        "turn_wait_s": 0.0,
        "step_min_exchanges": 4,
        "step_min_sessions": 2,
        # A proof takes hundreds of judged groups, and this has minutes: a mean over eight prompts
        # decides, which states no level (docs/canary.md).
        "promote_on": "quick",
        "step_max_s": 120.0,
        "gate_prompts": 8,
        "gate_answers": 2,
        "gate_min_prompts": 4,
        "margin": 0.06,
        "max_tokens": 96,
    },
}


def say(line: str) -> None:
    print(f"  [{time.monotonic() - STARTED:4.0f}s] {line}", flush=True)


STARTED = time.monotonic()


async def run(stack: Stack, rounds_wanted: int) -> None:
    questions = load_questions()
    os.environ.update(stack.environment())
    settings = load_settings(stack.config)
    sampler = VllmSampler(stack.addresses.engine_url, None, timeout_s=EXAM_LIMIT_S)
    agent = SupportAgent(
        base_url=f"{stack.addresses.proxy_url}/v1", model=MODEL, system=questions.system
    )
    traffic = Traffic(agent=agent, conversations=questions.traffic, wave=WAVE, pause_s=PAUSE_S)
    stop = asyncio.Event()
    sheets: dict[str, list[ExamAnswer]] = {}

    async def exam(name: str, answers: int) -> list[ExamAnswer]:
        return await sit_exam(
            sampler, questions, upstream_model=upstream_model(MODEL, name), answers=answers
        )

    async def examine(name: str) -> None:
        sheets[name] = await exam(name, ROUND_ANSWERS)

    say("customers start to come; the agent's only change is its base_url")
    sending = asyncio.create_task(traffic.run(stop))
    await examine(BASE)
    watcher = RoundWatcher(stack.addresses.admin_url, say)
    rounds: list[Round] = []
    while len(rounds) < rounds_wanted:
        done = await watcher.next_round(last=len(rounds) + 1 == rounds_wanted)
        rounds.append(done)
        say(f"round {len(rounds)} of {rounds_wanted}: {done.describe()}")
        if done.champion not in sheets and len(rounds) < rounds_wanted:
            await examine(done.champion)
    stop.set()
    await sending
    say(
        f"traffic: {traffic.sent} requests, {traffic.failed} failed, "
        f"{traffic.leaked} replies with fields the agent did not ask for"
    )
    champion = rounds[-1].champion
    say("final exam: base and champion answer the held-out questions in the same blind groups")

    async def whole(name: str) -> list[ExamAnswer]:
        known = sheets.get(name, [])
        return known + await exam(name, FINAL_ANSWERS - (ROUND_ANSWERS if known else 0))

    names = list(dict.fromkeys((BASE, champion)))
    final = dict(zip(names, await asyncio.gather(*map(whole, names)), strict=True))
    sheets.setdefault(champion, final[champion])
    judge = LiteLlmJudge(settings.judge)
    rubric = settings.judge.rubric
    held_out = compare(
        await grade(judge, questions, final, rubric=rubric, seed=1),
        final,
        base=BASE,
        champion=champion,
    )
    by_round = await grade(judge, questions, sheets, rubric=rubric, seed=2)
    _plot(DEMO / "score_by_round.png", by_round, rounds, stack.judge_label)
    say("rolling back while traffic is running")
    rolled = await live_rollback(stack, say)
    await agent.close()
    await sampler.aclose()
    _show_lineage(stack, champion)
    _finish(stack, held_out, champion, rounds, rolled)


def _plot(
    path: Path, by_round: Mapping[str, Mapping[str, float]], rounds: list[Round], judge: str
) -> None:
    names = [BASE, *(done.champion for done in rounds)]
    labels = ["base", *(f"{n}: {short(done.champion)}" for n, done in enumerate(rounds, 1))]
    points = [bootstrap(list(by_round[name].values())) for name in names]
    plot_rounds(
        path,
        list(zip(labels, points, strict=True)),
        judge=judge,
        verdicts=["start", *(done.state for done in rounds)],
    )


def short(adapter: str) -> str:
    """`smollm2-135m--v3-0a1b2c3d4e5f` -> `v3`."""
    return adapter.split("--")[-1].split("-")[0]


def _show_lineage(stack: Stack, champion: str) -> None:
    print("\nwhere the champion comes from (`sidecar lineage`, shortened):")
    shown = subprocess.run(
        stack.command("lineage", champion), capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = [line for line in shown.stdout.splitlines() if "[dropped:" not in line]
    print("\n".join(f"  {line[:LINEAGE_WIDTH]}" for line in lines[:LINEAGE_LINES]))
    if len(lines) > LINEAGE_LINES:
        print(f"  ... {len(lines) - LINEAGE_LINES} more lines, down to the base")


def _finish(
    stack: Stack, held_out: HeldOut, champion: str, rounds: list[Round], rolled: dict[str, Any]
) -> None:
    setup_file = ROOT / ".cache" / "setup-seconds"
    setup_s = float(setup_file.read_text()) if setup_file.exists() else 0.0
    run_s = time.monotonic() - STARTED
    write_result(
        DEMO / "result.json",
        held_out=held_out,
        rounds=len(rounds),
        setup_s=setup_s,
        run_s=run_s,
        rollback=rolled,
        judge=stack.judge_label,
    )
    print()
    print(table(held_out, champion=champion, judge=stack.judge_label))
    print(
        f"\nlive rollback: {short(rolled['from'])} -> {short(rolled['to'])}, first reply by "
        f"the old one after {rolled['ms_to_first_old_reply']:.0f} ms, "
        f"{rolled['failed_requests']} failed of {rolled['requests']} requests"
    )
    print(f"wall time: set-up {setup_s:.0f} s, run {run_s:.0f} s")
    print(
        f"files: {DEMO.name}/result.json, {DEMO.name}/score_by_round.png, logs in {DEMO.name}/run"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    ask_loopback_directly(os.environ)  # all of the demo is on this machine
    # TERM must unwind like Ctrl-C does, so that everything that was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = DEMO / "run"
    shutil.rmtree(folder, ignore_errors=True)
    stack = Stack(folder=folder, overrides=SETTINGS)
    label = stack.judge_label
    print("demo: an agent learns from its own traffic")
    print(f"  judge: {label}{' (a stated rule, not an LLM)' if label == 'stand-in' else ''}")
    say("starting vLLM, the proxy, ingest, score, learn and control")
    with stack:
        say(f"ready: proxy {stack.addresses.proxy_url}/v1, admin {stack.addresses.admin_url}")
        asyncio.run(run(stack, arguments.rounds))
        print("stopping everything that was started")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
