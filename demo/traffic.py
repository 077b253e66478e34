"""Customers that keep coming: the live traffic of the demo and of its rollback."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI, OpenAIError

from demo.agent import SupportAgent
from demo.questions import Conversation


@dataclass(kw_only=True)
class Traffic:
    """Serves the conversations again and again, each time for a new customer, in waves."""

    agent: SupportAgent
    conversations: Sequence[Conversation]
    wave: int
    """Customers who come together."""
    pause_s: float
    """Seconds between the end of one wave and the start of the next."""
    sent: int = 0
    failed: int = 0
    leaked: int = 0
    """Replies with a field that the agent had not asked for."""
    adapters: Counter[str] = field(default_factory=Counter)

    async def run(self, stop: asyncio.Event) -> None:
        """Send wave after wave until told to stop; the last one is served to its end."""
        customers = enumerate(itertools.cycle(self.conversations))
        while not stop.is_set():
            wave = itertools.islice(customers, self.wave)
            await asyncio.gather(*(self._serve(c, f"customer-{n}") for n, c in wave))
            await _wait(stop, self.pause_s)

    async def _serve(self, conversation: Conversation, customer: str) -> None:
        self.sent += len(conversation.turns)
        try:
            replies = await self.agent.serve(conversation, customer=customer)
        except OpenAIError as error:
            self.failed += 1
            print(f"  a customer was not served: {error}", flush=True)
            return
        for reply in replies:
            self.adapters[reply.adapter] += 1
            self.leaked += reply.leaked_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstByte:
    """When a streamed reply began, and which adapter gave it."""

    at: float
    """Monotonic seconds."""
    adapter: str


@dataclass(kw_only=True)
class Watchers:
    """Short streamed requests without a pause, to see to the millisecond who answers."""

    base_url: str
    model: str
    workers: int = 4
    begun: list[FirstByte] = field(default_factory=list)
    failed: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        client = AsyncOpenAI(
            base_url=self.base_url, api_key="not-needed", timeout=60.0, max_retries=0
        )
        try:
            await asyncio.gather(*(self._worker(client, n, stop) for n in range(self.workers)))
        finally:
            await client.close()

    async def _worker(self, client: AsyncOpenAI, number: int, stop: asyncio.Event) -> None:
        for count in itertools.count():
            if stop.is_set():
                return
            try:
                raw = await client.chat.completions.with_raw_response.create(
                    model=self.model,
                    messages=[{"role": "user", "content": "Do you have rain jackets?"}],
                    max_tokens=8,
                    stream=True,
                    user=f"watcher-{number}-{count}",
                )
                adapter = raw.headers.get("x-sidecar-adapter", "")
                self.begun.append(FirstByte(at=time.monotonic(), adapter=adapter))
                async for _ in raw.parse():
                    continue
            except OpenAIError as error:
                self.failed += 1
                print(f"  a request failed during the rollback: {error}", flush=True)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
