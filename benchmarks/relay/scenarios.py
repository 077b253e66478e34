"""What is asked of every contender: the request bodies and how many at once.

A request looks as the OpenAI SDK writes it. `max_tokens` and `seed` tell the fake upstream how many
events to send and how many microseconds apart (see `ends/upstream.c`).
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

MODEL = "bench-model"
_WORDS = [
    "the",
    "relay",
    "passes",
    "what",
    "it",
    "is",
    "given",
    "and",
    "keeps",
    "a",
    "copy",
    "of",
    "what",
    "it",
    "sees",
    "while",
    "users",
    "wait",
    "for",
    "nothing",
    "but",
    "the",
    "model",
    "itself",
    "which",
    "is",
    "how",
    "a",
    "sidecar",
    "should",
    "be",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of load."""

    name: str
    what: str
    kind: Literal["reply", "stream"]
    connections: int
    prompt_bytes: int = 1_000
    message_bytes: int = 20_000
    """The prompt is messages of this length."""
    asks: dict[str, object] = field(default_factory=dict)
    """Members of the request besides model and messages."""
    conversations: int = 64
    """Different conversations that are asked in turn, so that canary and champion both answer."""
    fresh_heads: bool = False
    """Each request's head has something of its own, as with a trace's name in it."""
    warmup_s: float = 0.5
    min_seconds: float = 0.0
    """A window is never shorter: some streams must end in it."""
    spread_ms: float = 0.0
    """Connections start spread over this time."""

    @property
    def events_per_stream(self) -> int:
        """The role, one event a token, and `[DONE]`; 0 when nothing is streamed."""
        tokens = self.asks.get("max_tokens", 0)
        return int(str(tokens)) + 2 if self.kind == "stream" else 0


def _stream(tokens: int, gap_us: int, **more: object) -> dict[str, object]:
    return {"stream": True, "max_tokens": tokens, "seed": gap_us, **more}


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="small1", what="0.9 kB replies, 1 connection", kind="reply", connections=1),
    Scenario(name="small32", what="0.9 kB replies, 32 connections", kind="reply", connections=32),
    Scenario(
        name="fresh32",
        what="small32 from clients that repeat nothing: no head, no conversation comes twice",
        kind="reply",
        connections=32,
        conversations=8_192,
        fresh_heads=True,
    ),
    Scenario(
        name="sse8",
        what="8 streams of 200 events, 2 ms apart",
        kind="stream",
        connections=8,
        asks=_stream(200, 2_000),
        spread_ms=400,
    ),
    Scenario(
        name="sse100",
        what="100 streams of 200 events, 10 ms apart",
        kind="stream",
        connections=100,
        asks=_stream(200, 10_000),
        warmup_s=2.2,
        min_seconds=2.0,
        spread_ms=2_000,
    ),
    Scenario(
        name="sse2k",
        what="4 streams of 2,000 events with log-probabilities, 0.5 ms apart",
        kind="stream",
        connections=4,
        asks=_stream(2_000, 500, logprobs=True),
        warmup_s=1.1,
        min_seconds=3.0,
        spread_ms=1_000,
    ),
    Scenario(name="prompt1k", what="prompts of 1 kB", kind="reply", connections=4),
    Scenario(
        name="prompt100k",
        what="prompts of 100 kB",
        kind="reply",
        connections=4,
        prompt_bytes=100_000,
        conversations=16,
    ),
    Scenario(
        name="prompt1m",
        what="prompts of 1 MB",
        kind="reply",
        connections=4,
        prompt_bytes=1_000_000,
        conversations=4,
    ),
    Scenario(
        name="opening1m",
        what="prompts whose first message is all of 1 MB",
        kind="reply",
        connections=4,
        prompt_bytes=1_000_000,
        message_bytes=1_000_000,
        conversations=4,
    ),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def body(scenario: Scenario, conversation: int) -> bytes:
    """The JSON of one request; the same for the same arguments."""
    rng = random.Random(f"{scenario.name}/{conversation}")
    messages = [{"role": "system", "content": "You are an agent. Answer in one line."}]
    left = scenario.prompt_bytes
    while left > 0:
        role = "user" if len(messages) % 2 else "assistant"
        size = min(left, scenario.message_bytes)
        messages.append({"role": role, "content": _text(rng, size)})
        left -= size
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "Go on."})
    members = {"messages": messages, "model": MODEL, "temperature": 1.0, **scenario.asks}
    return json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()


class Launch(Protocol):
    """What a request must know of the contender."""

    @property
    def path(self) -> str: ...

    @property
    def key(self) -> str:
        """The bearer token that clients send."""
        ...


def requests(scenario: Scenario, authority: str, launch: Launch) -> list[bytes]:
    """All requests of one scenario to one contender."""
    return [
        request(
            launch.path,
            authority,
            launch.key,
            body(scenario, number),
            more=f"x-request-id: {number:032x}\r\n" if scenario.fresh_heads else "",
        )
        for number in range(scenario.conversations)
    ]


def request(path: str, authority: str, key: str, content: bytes, *, more: str = "") -> bytes:
    """The bytes of one request, with the headers that the OpenAI SDK sends.

    more: whole header lines.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {authority}\r\nAccept-Encoding: identity\r\n"
        f"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        f"User-Agent: OpenAI/Python 2.8.0\r\nX-Stainless-Lang: python\r\n"
        f"X-Stainless-Package-Version: 2.8.0\r\nX-Stainless-OS: Linux\r\n"
        f"X-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
        f"X-Stainless-Runtime-Version: 3.11.7\r\nAuthorization: Bearer {key}\r\n"
        f"X-Stainless-Async: false\r\nx-stainless-retry-count: 0\r\n"
        f"x-stainless-read-timeout: 600\r\n{more}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def write_requests(path: Path, requests: Sequence[bytes]) -> None:
    """Write the load generator's file: each request behind its length."""
    path.write_bytes(b"".join(struct.pack("<Q", len(one)) + one for one in requests))


def _text(rng: random.Random, size: int) -> str:
    """Words and lines of `size` bytes, as a prompt has them; JSON escapes the line ends."""
    words: list[str] = []
    length = 0
    while length < size:
        word = rng.choice(_WORDS)
        words.append(word + ("\n" if rng.random() < 0.08 else " "))
        length += len(word) + 1
    return "".join(words)[:size]
