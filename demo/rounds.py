"""Follow the learn-and-deploy rounds from outside, through the admin API alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

ENDED = ("promoted", "rolled_back", "inconclusive")
ROUND_TIMEOUT_S = 900.0


class RoundTimeoutError(RuntimeError):
    """No round ended in time; the message says what the admin API shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One training run and the canary of its adapter."""

    candidate: str
    state: str
    """promoted, rolled_back or inconclusive."""
    reason: str
    champion: str
    """The adapter that serves after it."""

    def describe(self) -> str:
        return f"{self.candidate} {self.state.replace('_', ' ')}: {self.reason}"


class RoundWatcher:
    """Says what happens as it happens, and hands out each round when its canary has ended."""

    def __init__(self, admin_url: str, say: Callable[[str], None]) -> None:
        self._url = f"{admin_url}/admin/v1"
        self._say = say
        self._ended: set[str] = set()
        self._seen: set[tuple[str, ...]] = set()
        self._events = 0
        """What happened so far; a control that is away is nothing."""
        self._paused = False

    async def next_round(self, *, last: bool = False) -> Round:
        """Wait for the next canary to end. last: no run of the learner begins beside it."""
        loop = asyncio.get_running_loop()
        seen, deadline = -1, 0.0
        async with httpx.AsyncClient(timeout=30.0) as client:
            while self._events != seen or loop.time() < deadline:
                if self._events != seen:  # a slow machine may take long, as long as it goes on
                    seen, deadline = self._events, loop.time() + ROUND_TIMEOUT_S
                try:
                    done = await self._look(client, last=last)
                except httpx.TransportError as error:
                    if self._first_time("away", str(int(loop.time()) // 10)):
                        self._say(f"  control is away ({error!r}); it will be back")
                    done = None
                if done is not None:
                    return done
                await asyncio.sleep(0.5)
            funnel = (await client.get(f"{self._url}/funnel")).text
        raise RoundTimeoutError(
            f"nothing happened in {ROUND_TIMEOUT_S:.0f} s; the funnel: {funnel}"
        )

    async def _look(self, client: httpx.AsyncClient, *, last: bool) -> Round | None:
        """Say what is new. Returns: a round that has ended, if one has."""
        await self._tell_runs(client)
        for canary in reversed(await self._items(client, "canaries")):
            self._tell_canary(canary)
            if last and not self._paused and canary["canary_id"] not in self._ended:
                await self.pause_learner()
                self._paused = True
            if canary["state"] in ENDED and canary["canary_id"] not in self._ended:
                done = await self._round(client, canary)
                self._ended.add(canary["canary_id"])
                return done
        return None

    async def pause_learner(self) -> None:
        """No further run: the demo has seen its rounds, and the machine has two cores."""
        async with httpx.AsyncClient(timeout=30.0) as client:
            reply = await client.post(
                f"{self._url}/learner/pause", json={"reason": "demo: enough rounds"}
            )
            reply.raise_for_status()

    async def _round(self, client: httpx.AsyncClient, canary: dict[str, Any]) -> Round:
        aliases = {item["alias"]: item["adapter"] for item in await self._items(client, "aliases")}
        return Round(
            candidate=canary["candidate"],
            state=canary["state"],
            reason=canary["reason"] or "",
            champion=aliases.get("champion", "base"),
        )

    async def _items(self, client: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
        reply = await client.get(f"{self._url}/{path}")
        reply.raise_for_status()
        return list(reply.json()["items"])

    async def _tell_runs(self, client: httpx.AsyncClient) -> None:
        for run in reversed(await self._items(client, "runs")):
            if self._first_time("run", run["run_id"], run["status"]):
                self._say(describe_run(run))

    def _tell_canary(self, canary: dict[str, Any]) -> None:
        state = canary["state"]
        step = str(canary["step"]) if state == "ramping" else ""
        if state not in ENDED and self._first_time("canary", canary["canary_id"], state, step):
            self._say(describe_canary(canary))

    def _first_time(self, *key: str) -> bool:
        if key in self._seen:
            return False
        self._seen.add(key)
        self._events += key[0] != "away"
        return True


def describe_run(run: dict[str, Any]) -> str:
    """One line of a training run."""
    if run["status"] == "running":
        return f"  learner: a run starts from {run['parent']}"
    if run["status"] != "finished":
        return f"  learner: run {run['status']}: {run['reason']}"
    steps = run["metrics"]
    reward = sum(step["reward_mean"] for step in steps) / len(steps)
    used = run["counts"].get("used", "?")
    dropped = {key: value for key, value in run["counts"].items() if key != "used" and value}
    return (
        f"  learner: {len(steps)} steps on {used} groups in "
        f"{sum(step['seconds'] for step in steps):.0f} s "
        f"(mean reward {reward:.2f}; dropped {dropped or 'none'})"
    )


def describe_canary(canary: dict[str, Any]) -> str:
    """One line of a canary's state."""
    if canary["state"] == "ramping":
        return f"  canary: {canary['candidate']} answers {canary['weight_bp'] / 100:g}% of sessions"
    words = {"loading": "is loaded and probed", "gating": "meets the champion at the gate"}
    return f"  canary: {canary['candidate']} {words.get(canary['state'], canary['state'])}"
