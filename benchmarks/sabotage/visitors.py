"""Users of the running product: one after the other comes with a question, and says who answered.

Each is a user of its own, and a session of one request. What is kept of it is what a user sees: an
answer or an error, how long it took, and the adapter in the reply's header.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from demo.questions import Conversation, load_questions
from demo.stack import MODEL

MAX_TOKENS = 64
"""The longest answer that a user asks for."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One user's request."""

    session: str
    began_at: float
    """Unix seconds."""
    took_s: float
    adapter: str
    """From the reply's header; empty: no reply came."""
    error: str
    """Empty: it was answered to the end."""


@dataclass(kw_only=True)
class Visitors:
    """So many at a time, until told to stop."""

    base_url: str
    at_once: int = 6
    patience_s: float = 30.0
    """After so long without a whole answer a user leaves."""
    max_tokens: int = MAX_TOKENS
    visits: list[Visit] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        """Send until told to stop; whoever is being answered then is answered to the end."""
        questions = load_questions()
        plain = [one for one in questions.traffic if one.looked_up is None and not one.tools]
        numbers = itertools.count()
        async with httpx.AsyncClient(
            base_url=self.base_url, timeout=self.patience_s, trust_env=False
        ) as client:
            await asyncio.gather(
                *(
                    self._come(client, questions.system, plain, numbers, stop)
                    for _ in range(self.at_once)
                )
            )

    async def warm_up(self) -> None:
        """Ask once each, as users whom nobody counts: the first batch of a vLLM on a busy machine
        took over 30 s, also after a first request alone. Raises: RuntimeError without an answer."""
        asked = Conversation(id="", turns=("Are you open?",))
        async with httpx.AsyncClient(base_url=self.base_url, trust_env=False) as client:
            await asyncio.gather(
                *(
                    self._visit(client, "Answer shortly.", asked, f"warm-up-{number}")
                    for number in range(self.at_once)
                )
            )
        errors = {one.error for one in self.visits if one.error}
        self.visits.clear()
        if errors:
            raise RuntimeError(f"the first requests were not answered: {', '.join(errors)}")

    async def _come(
        self,
        client: httpx.AsyncClient,
        system: str,
        asked: Sequence[Conversation],
        numbers: itertools.count[int],
        stop: asyncio.Event,
    ) -> None:
        while not stop.is_set():
            number = next(numbers)
            await self._visit(client, system, asked[number % len(asked)], f"user-{number}")

    async def _visit(
        self, client: httpx.AsyncClient, system: str, asked: Conversation, session: str
    ) -> None:
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": asked.turns[0]},
        ]
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stream": asked.stream,
            # The base answers its prompts alike at 0, and the gate asks at 1.
            "temperature": 1.0,
        }
        began_at, error, adapter = time.time(), "", ""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.patience_s):
                async with client.stream(
                    "POST",
                    "/v1/chat/completions",
                    json=body,
                    headers={"x-sidecar-session": session, "x-sidecar-user": session},
                    timeout=self.patience_s,
                ) as reply:
                    adapter = reply.headers.get("x-sidecar-adapter", "")
                    text = await reply.aread()
                    if reply.status_code != 200:
                        error = f"{reply.status_code} {text[:200]!r}"
                    elif asked.stream and b"[DONE]" not in text:
                        error = "the stream has no end"
        except (httpx.HTTPError, TimeoutError) as cause:
            error = type(cause).__name__
        took_s = time.monotonic() - began
        self.visits.append(Visit(session, began_at, took_s, adapter, error))
