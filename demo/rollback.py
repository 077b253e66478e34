"""The demo's last act: one call to the admin API gives the traffic back while it is running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx

from demo.stack import MODEL, Stack
from demo.traffic import FirstByte, Watchers

WARM_UP_REPLIES = 12
AFTER_S = 4.0
LONGEST_S = 60.0
"""A busy machine may take this long for a reply; the promise is about the request."""
REASON = "demo: show that a rollback is one call"


async def live_rollback(stack: Stack, say: Callable[[str], None]) -> dict[str, Any]:
    """Roll back to the previous champion under traffic.

    Returns: from, to, ms_to_first_old_reply (from sending the call to the first byte of the first
    reply by the old adapter), ms_to_last_new_reply, failed_requests, requests.
    """
    watchers = Watchers(base_url=f"{stack.addresses.proxy_url}/v1", model=MODEL)
    stop = asyncio.Event()
    sending = asyncio.create_task(watchers.run(stop))
    while len(watchers.begun) < WARM_UP_REPLIES and not sending.done():
        await asyncio.sleep(0.05)
    before = watchers.begun[-1].adapter
    called_at = time.monotonic()
    async with httpx.AsyncClient(timeout=30.0) as client:
        reply = await client.post(
            f"{stack.addresses.admin_url}/admin/v1/rollback",
            json={"to": "previous", "reason": REASON},
        )
    reply.raise_for_status()
    done = reply.json()
    answered_ms = (time.monotonic() - called_at) * 1e3
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and watchers.begun[-1].adapter != done["to"]:
        await asyncio.sleep(0.05)
    await asyncio.sleep(AFTER_S)
    stop.set()
    await sending
    first_old, last_new = switch_times(watchers.begun, called_at, done["from"], done["to"])
    say(f"before the call {before} answered; the call took {answered_ms:.0f} ms")
    say(f"after it {watchers.begun[-1].adapter} answers")
    return {
        "from": done["from"],
        "to": done["to"],
        "ms_to_first_old_reply": round(first_old, 1),
        "ms_to_last_new_reply": round(last_new, 1),
        "failed_requests": watchers.failed,
        "requests": len(watchers.begun) + watchers.failed,
    }


def switch_times(
    begun: list[FirstByte], called_at: float, before: str, after: str
) -> tuple[float, float]:
    """Milliseconds from the call to the first reply by `after`, and to the last by `before`."""
    old = [(reply.at - called_at) * 1e3 for reply in begun if reply.adapter == after]
    new = [(reply.at - called_at) * 1e3 for reply in begun if reply.adapter == before]
    first_old = min((ms for ms in old if ms >= 0), default=float("inf"))
    return first_old, max((ms for ms in new if ms >= 0), default=0.0)
