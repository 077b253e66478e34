"""Play candidates on one running product: import each, wait for its end, and count who met it.

The product is `sidecar up` with the real vLLM; users come all the time. Between sidecar and vLLM
stands the relay that lets the hanging candidate hang.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.sabotage.adapters import HANGING
from benchmarks.sabotage.stalling import Stalling, stalling
from benchmarks.sabotage.visitors import MAX_TOKENS, Visit, Visitors
from demo.ports import free_port
from demo.stack import ROOT, Addresses, Stack
from deploy.cli.replay import FOLDER_NAME
from learner.adapter_folder import folder_digest

ENDED = ("promoted", "rolled_back", "inconclusive")
LONGEST_S = 900.0
"""For one candidate; then the benchmark fails."""
WARM_UP_S = 300.0
"""vLLM compiles its kernels with the first request."""
RECORDED = 120
"""Users' requests before the first replay; half of them are held out."""
PROMPTS = 40
"""Of a replay."""
SETTLE_S = 3.0
"""Ingest stores the last replies of a candidate within this."""
BASIC: Mapping[str, Mapping[str, Any]] = {
    "groups": {
        "rate": 0.0,  # nothing is trained here
        "held_out_rate": 0.5,
        "settle_s": 0.5,
        "max_slowdown": 0.0,
    },
    "learner": {"schedule": "manual", "pack_tokens": 2048},
}
PROVEN: Mapping[str, Any] = {
    "steps": [2_000, 5_000],
    "step_min_s": 10.0,
    "turn_wait_s": 0.0,
    "gate_prompts": 20,
    "gate_min_prompts": 20,
    "gate_answers": 1,
    "groups_per_hour": 3_600,
    "max_tokens": 64,
}
"""The default rule and levels, in less time."""
OPEN_GATE: Mapping[str, Any] = {
    **PROVEN,
    "promote_on": "quick",
    "gate_prompts": 1,
    "gate_min_prompts": 1,
    "margin": 0.99,
    "groups_per_hour": 0,
}
"""The gate lets everything pass and nobody judges: only users' sessions speak."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """The end of one candidate."""

    case: str
    adapter: str
    state: str
    reason: str
    decided_s: float
    """From its registration to the decision."""
    ramp_s: float
    """From its first traffic to the decision; 0: it had none."""
    began_at: float
    ended_at: float
    groups: int
    """Judged groups that the decision rests on."""
    replay: str = ""
    """What `sidecar replay` said of its folder before; empty: it was not asked."""
    replay_prompts: int = 0


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Users who met a candidate."""

    sessions: int
    failed: int
    """Requests that the user got no whole answer to."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one product went through."""

    played: Sequence[Played]
    exposed: Mapping[str, Exposed]
    """By case."""
    visits: Sequence[Visit]
    failed_elsewhere: int
    """Requests without a whole answer that no candidate was to answer."""


def play(
    folder: Path,
    candidates: Sequence[tuple[str, Path]],
    rules: Mapping[str, Any],
    *,
    patience_s: float = 30.0,
    max_tokens: int = MAX_TOKENS,
    replayed: bool = False,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Try the candidates, (case, PEFT folder), one after the other.

    replayed: each is first asked recorded prompts by `sidecar replay`. patience_s: after so long
    without a whole answer a user leaves. max_tokens: of a user's answer.
    """
    addresses = Addresses(
        engine=free_port(), proxy=free_port(), admin=free_port(), judge=free_port()
    )
    relay_port = free_port()
    serving = {"upstreams": [f"http://127.0.0.1:{relay_port}"]}
    overrides = {**BASIC, "serving": serving, "canary": rules}
    with (
        stalling(relay_port, addresses.engine) as relay,
        Stack(folder=folder, overrides=overrides, addresses=addresses) as stack,
    ):
        return asyncio.run(_play(stack, relay, candidates, patience_s, max_tokens, replayed, say))


async def _play(
    stack: Stack,
    relay: Stalling,
    candidates: Sequence[tuple[str, Path]],
    patience_s: float,
    max_tokens: int,
    replayed: bool,
    say: Callable[[str], None],
) -> Outcome:
    await Visitors(base_url=stack.addresses.proxy_url, patience_s=WARM_UP_S).warm_up()
    visitors = Visitors(
        base_url=stack.addresses.proxy_url, patience_s=patience_s, max_tokens=max_tokens
    )
    stop = asyncio.Event()
    coming = asyncio.create_task(visitors.run(stop))
    played = []
    try:
        while replayed and len(visitors.visits) < RECORDED:
            await asyncio.sleep(1.0)
        for case, path in candidates:
            found = await _replay(stack, relay, case, path) if replayed else ("", 0)
            played.append(await _try(stack, relay, case, path, found))
            one = played[-1]
            say(f"{case}: {one.state} after {one.decided_s:.0f} s: {one.reason}")
            if replayed:
                say(f"  its replay said before: {found[0]}, by {found[1]} prompts")
    finally:
        relay.stalled = None
        stop.set()
        await coming
    await asyncio.sleep(SETTLE_S)
    met = {one.case: _met(stack, one) for one in played}
    by_session = {visit.session: visit for visit in visitors.visits}
    exposed = {
        case: Exposed(
            sessions=len(sessions),
            failed=sum(bool(by_session[key].error) for key in sessions if key in by_session),
        )
        for case, sessions in met.items()
    }
    known = set().union(*met.values())
    elsewhere = [one for one in visitors.visits if one.error and one.session not in known]
    for visit in elsewhere:
        say(f"a user of no candidate was not served: {visit}")
    return Outcome(
        played=played,
        exposed=exposed,
        visits=visitors.visits,
        failed_elsewhere=len(elsewhere),
    )


async def _replay(stack: Stack, relay: Stalling, case: str, path: Path) -> tuple[str, int]:
    """Ask recorded prompts of a folder. Returns: the verdict, and how many were asked."""
    if case == HANGING:
        relay.stalled = f"{FOLDER_NAME}{folder_digest(path)[:12]}"
    words = ("replay", str(path), "--prompts", str(PROMPTS), "-o", "json")
    done = await asyncio.to_thread(
        subprocess.run,
        stack.command(*words),
        env=stack.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    relay.stalled = None
    if not done.stdout:
        raise RuntimeError(f"the replay failed: {done.stderr}")
    report = json.loads(done.stdout)
    return str(report["verdict"]), int(report["prompts"])


async def _try(
    stack: Stack, relay: Stalling, case: str, path: Path, replayed: tuple[str, int]
) -> Played:
    began_at = time.time()
    name = await asyncio.to_thread(_import, stack, path, case)
    ramped_at = 0.0
    deadline = time.monotonic() + LONGEST_S
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            found = await _canary(client, stack, name)
            if found is not None and found["state"] == "ramping" and not ramped_at:
                ramped_at = time.time()
            if found is not None and found["state"] in ENDED:
                break
            # At the gate it answers: a candidate that hangs there meets no user.
            if case == HANGING and ramped_at:
                relay.stalled = name
            await asyncio.sleep(0.1)
        else:
            raise TimeoutError(f"{case} had no end within {LONGEST_S:g} s: {found}")
        relay.stalled = None
        url = f"{stack.addresses.admin_url}/admin/v1/canaries/{found['canary_id']}/evidence"
        evidence = (await client.get(url)).json()["evidence"]
    ended_at = float(found["ended_at"])
    return Played(
        case=case,
        adapter=name,
        state=found["state"],
        reason=found["reason"] or "",
        decided_s=round(ended_at - began_at, 1),
        ramp_s=round(ended_at - ramped_at, 1) if ramped_at else 0.0,
        began_at=began_at,
        ended_at=ended_at,
        groups=evidence.get("quality", {}).get("groups", 0),
        replay=replayed[0],
        replay_prompts=replayed[1],
    )


def _import(stack: Stack, path: Path, case: str) -> str:
    done = subprocess.run(
        stack.command("adapters", "import", str(path), "--reason", case, "-o", "json"),
        env=stack.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the import failed: {done.stderr}")
    return str(json.loads(done.stdout)["adapter"])


async def _canary(client: httpx.AsyncClient, stack: Stack, name: str) -> dict[str, Any] | None:
    url = f"{stack.addresses.admin_url}/admin/v1/canaries"
    try:
        items = (await client.get(url)).json()["items"]
    except httpx.TransportError:
        return None  # control starts again
    return next((one for one in items if one["candidate"] == name), None)


def _met(stack: Stack, one: Played) -> set[str]:
    """Return the sessions that were routed to a candidate, whoever answered them."""
    with closing(sqlite3.connect(stack.folder / "store.db")) as store:
        rows = store.execute(
            "SELECT DISTINCT session_key FROM exchange WHERE arm = 'canary'"
            " AND started_at BETWEEN ? AND ?",
            (one.began_at, one.ended_at + 1.0),
        )
        # The store's key of a session that the client names.
        return {str(row[0]).removeprefix("h:") for row in rows}
