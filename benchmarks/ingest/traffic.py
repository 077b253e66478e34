"""Exchanges as an agent's conversations leave them, 4 kB each once encoded.

64 conversations of four turns go on at once; each request repeats its conversation. Texts are words
of a tokenizer's vocabulary, so the ids of an answer decode to its text, as ingest checks.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sidecar.records import Choice, Exchange, Sampling, Timings

MODEL = "smollm2-135m"
WEIGHTS = Path(__file__).resolve().parents[2] / ".models" / MODEL
AT_ONCE = 64
TURNS = 4
SYSTEM_WORDS, QUESTION_WORDS, ANSWER_WORDS = 60, 25, 50
WORD = re.compile(" [a-z]+")
BEGAN = 1_700_000_000.0


@dataclass(slots=True)
class Conversation:
    number: int
    rng: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    turn: int = 0

    def say(self, role: str, words: int) -> tuple[str, tuple[int, ...]]:
        """Add a message. Returns: its text and its token ids."""
        chosen = self.rng.choices(vocabulary(), k=words)
        text = "".join(word for word, _ in chosen)
        ids = tuple(token for _, token in chosen)
        self.messages.append({"role": role, "content": text})
        self.tokens += ids
        return text, ids


@cache
def vocabulary() -> tuple[tuple[str, int], ...]:
    """Words with a space before them, and their ids; made up where the model is not there."""
    path = WEIGHTS / "tokenizer.json"
    if not path.is_file():
        return tuple((f" word{number}", number) for number in range(1_000, 21_000))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    words = (
        (word.replace("\u0120", " "), number) for word, number in tokenizer.get_vocab().items()
    )
    return tuple(sorted(one for one in words if WORD.fullmatch(one[0])))


def exchanges(*, seed: int = 1, prefix: str = "") -> Iterator[Exchange]:
    """Yield exchanges without end; the same for the same seed."""
    rng = random.Random(seed)
    running = [_begin(rng, number) for number in range(AT_ONCE)]
    for count in range(2**62):
        at = rng.randrange(AT_ONCE)
        yield _turn(running[at], f"{prefix}ex_{count}", BEGAN + count * 0.005)
        if running[at].turn == TURNS:
            running[at] = _begin(rng, AT_ONCE + count)


def long_exchanges(tokens: int, *, prefix: str = "long") -> Iterator[Exchange]:
    """Yield exchanges whose prompts have this many tokens."""
    rng = random.Random(2)
    for count in range(2**62):
        conversation = _begin(rng, count)
        conversation.say("user", tokens)
        yield _turn(conversation, f"{prefix}_{count}", BEGAN + count)


def _begin(rng: random.Random, number: int) -> Conversation:
    conversation = Conversation(number, random.Random(rng.getrandbits(64)))
    conversation.say("system", SYSTEM_WORDS)
    return conversation


def _turn(conversation: Conversation, exchange_id: str, at: float) -> Exchange:
    conversation.say("user", QUESTION_WORDS)
    request = {
        "model": MODEL,
        "messages": list(conversation.messages),
        "temperature": 1.0,
        "max_tokens": 256,
    }
    prompt = tuple(conversation.tokens)
    text, ids = conversation.say("assistant", ANSWER_WORDS)
    conversation.turn += 1
    return Exchange(
        exchange_id=exchange_id,
        surface="chat",
        public_model=MODEL,
        adapter="base",
        arm="champion",
        propensity=1.0,
        replica="http://127.0.0.1:8000",
        session_key=f"m:{conversation.number:032x}",
        request=json.dumps(request).encode(),
        choices=(
            Choice(
                index=0,
                message=json.dumps({"role": "assistant", "content": text}).encode(),
                finish_reason="length",
                token_ids=ids,
                logprobs=tuple(-conversation.rng.random() for _ in ids),
            ),
        ),
        prompt_token_ids=prompt,
        sampling=Sampling(temperature=1.0, max_tokens=256),
        stream=False,
        status=200,
        outcome="ok",
        timings=Timings(started_at=at, queue_s=0.001, first_byte_s=0.2, total_s=0.9),
        completion_tokens=len(ids),
        trace_id="",
        turn_id=f"{exchange_id:>032}",
        request_bytes=2_000,
        reply_bytes=2_000,
    )
