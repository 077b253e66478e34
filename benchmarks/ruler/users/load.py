"""Users who ask at random times, whether or not the earlier ones have their answers (open loop)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

PATIENCE_S = 120.0
DONE = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    at: float
    """Seconds after the load began at which the user asked."""
    first_s: float | None
    """From then until the first piece of the answer; None: there was none."""
    error: str = ""


async def users(
    base_url: str,
    model: str,
    system: str,
    questions: Sequence[str],
    *,
    rate: float,
    seconds: float,
    max_tokens: int,
    rng: random.Random,
) -> list[Asked]:
    """Send streamed chat requests at random times, `rate` a second on average.

    A wait counts from when the user asked, also when the sender was late.
    """
    began = time.monotonic()
    tasks: list[asyncio.Task[Asked]] = []
    at = rng.expovariate(rate)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=PATIENCE_S, trust_env=False, limits=httpx.Limits()
    ) as client:
        while at < seconds:
            await asyncio.sleep(began + at - time.monotonic())
            order = f"{rng.choice(questions)} My order is R-{rng.randrange(10**8)}."
            body = {
                "model": model,
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": order},
                ],
                "max_tokens": max_tokens,
                "temperature": 1.0,
                "stream": True,
            }
            tasks.append(asyncio.create_task(_ask(client, body, began + at, at)))
            at += rng.expovariate(rate)
        return list(await asyncio.gather(*tasks))


async def _ask(
    client: httpx.AsyncClient, body: dict[str, object], asked: float, at: float
) -> Asked:
    first = None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                return Asked(at=at, first_s=None, error=f"status {reply.status_code}")
            async for line in reply.aiter_lines():
                if first is None and _says_something(line):
                    first = time.monotonic() - asked
    except httpx.HTTPError as error:
        return Asked(at=at, first_s=None, error=type(error).__name__)
    return Asked(at=at, first_s=first, error="" if first is not None else "no answer")


def _says_something(line: str) -> bool:
    """Tell whether an event holds a piece of the answer, or its end."""
    data = line.removeprefix("data: ")
    if data in (line, DONE):
        return False
    choices = json.loads(data).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content") or choices[0].get("finish_reason"))
