"""The prompts of the recorded traffic, of seven kinds, and the rule that scores answers. Pure.

The kinds are what an agent's traffic holds: choosing a tool, answering from what a tool gave, small
talk, short calculations, templated steps with one right answer, near-duplicates of one prompt, and
prompts that come several times. The mix was set before anything was recorded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SEED: Final = 13
"""Seed of the prompts of the first recording: the same list in every run."""
TOOLS: Final = {
    "weather": ["Will it rain in {city} today?", "How warm is it in {city}?"],
    "calculator": ["What is {a} times {b}?", "Divide {a} by {b}."],
    "calendar": ["Am I free on {day}?", "Book a meeting with {name} on {day}."],
    "email": ["Write to {name} that I am late.", "Send {name} the report."],
}
NAMES: Final = ("Anna", "Omar", "Wei", "Lucia", "Jonas", "Priya", "Tom", "Sofia")
CITIES: Final = ("Paris", "Oslo", "Lima", "Cairo", "Delhi", "Rome", "Quito", "Seoul")
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
STATES: Final = ("shipped", "delayed", "cancelled", "delivered", "refunded")
TALK: Final = (
    "Hello, how are you?", "Tell me a short joke about {animal}s.", "Say something nice to {name}.",
    "Give me one word for a happy {animal}.", "Name a city like {city}.",
    "What should I cook on {day}?", "Write one sentence about {city}.",
    "Wish {name} a good {day}.",
)  # fmt: skip
ANIMALS: Final = ("cat", "dog", "horse", "fox", "owl", "whale", "bee", "goat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the traffic."""

    kind: str
    system: str
    user: str
    want: str
    """A regular expression of the whole answer, stripped, case-insensitive."""
    max_tokens: int = 32
    served: int = 1
    """How often users asked it; the first so many answers recorded were theirs."""


def score(prompt: Prompt, answer: str, finish_reason: str | None) -> float:
    """Score an answer by its prompt's rule: 1 when it is what was asked for and complete, else 0.

    As a verifier or a judge with this rubric does. An answer that `max_tokens` cut gets half.
    """
    if not re.fullmatch(prompt.want, answer.strip(), re.IGNORECASE | re.DOTALL):
        return 0.0
    return 1.0 if finish_reason == "stop" else 0.5


def make_prompts(seed: int = SEED) -> list[Prompt]:
    """Make the prompts, mixed."""
    rng = random.Random(seed)
    found = [
        *_tools(rng, 70), *_finals(rng, 70), *_talk(rng, 60), *_sums(rng, 70),
        *_templated(rng, 70), *_near(rng, 10, 6), *_repeated(rng, 40),
    ]  # fmt: skip
    rng.shuffle(found)
    return found


def _fill(rng: random.Random, text: str) -> str:
    return text.format(
        city=rng.choice(CITIES), name=rng.choice(NAMES), day=rng.choice(DAYS),
        animal=rng.choice(ANIMALS), a=rng.randint(12, 99), b=rng.randint(3, 12),
    )  # fmt: skip


def _tools(rng: random.Random, number: int) -> Iterator[Prompt]:
    for _ in range(number):
        tool = rng.choice(sorted(TOOLS))
        yield Prompt(
            kind="tool_choice",
            system="You choose one tool: weather, calculator, calendar or email. "
            "Reply with the tool's name only.",
            user=_fill(rng, rng.choice(TOOLS[tool])),
            want=rf"\W*{tool}\W*",
        )


def _finals(rng: random.Random, number: int) -> Iterator[Prompt]:
    for _ in range(number):
        state, order, name = rng.choice(STATES), rng.randint(1000, 9999), rng.choice(NAMES)
        yield Prompt(
            kind="final_answer",
            system="You answer customers in one short sentence, from the record only.",
            user=f"Record: order {order} of {name} was {state} on {rng.choice(DAYS)}. "
            f"Question: what happened to order {order}?",
            want=rf"[^.!?]*{state}[^.!?]*[.!?]",
            max_tokens=40,
        )


def _talk(rng: random.Random, number: int) -> Iterator[Prompt]:
    for _ in range(number):
        yield Prompt(
            kind="chat",
            system="You are a friendly assistant. Use one sentence.",
            user=_fill(rng, rng.choice(TALK)),
            want=r"[^.!?\n]{2,}[.!?]",
            max_tokens=40,
        )


def _sums(rng: random.Random, number: int) -> Iterator[Prompt]:
    for _ in range(number):
        most = rng.choice((9, 99, 999))
        left, right = rng.randint(1, most), rng.randint(1, most)
        yield Prompt(
            kind="arithmetic",
            system="Reply with the number only.",
            user=f"What is {left} + {right}?",
            want=rf"(?:.*\D)?{left + right}\W*",
            max_tokens=24,
        )


def _templated(rng: random.Random, number: int) -> Iterator[Prompt]:
    for _ in range(number):
        word = rng.choice((*NAMES, *CITIES, *DAYS, *STATES))
        user, want = rng.choice((
            (f"Repeat this word: {word}", word), ("Reply with OK.", "ok"),
            (f"Reply with YES if {word} begins with {word[0]}.", "yes"),
        ))  # fmt: skip
        yield Prompt(
            kind="templated",
            system="Follow the instruction. Write nothing else.",
            user=user,
            want=rf"\W*{want}\W*",
            max_tokens=16,
        )


def _near(rng: random.Random, bases: int, each: int) -> Iterator[Prompt]:
    for _ in range(bases):
        text = _fill(rng, rng.choice(TALK))
        for at in range(each):
            yield Prompt(
                kind="near_duplicate",
                system=f"You are a friendly assistant. Use one sentence. Ticket {1000 + at}.",
                user=text,
                want=r"[^.!?\n]{2,}[.!?]",
                max_tokens=40,
            )


def _repeated(rng: random.Random, number: int) -> Iterator[Prompt]:
    makers = (_tools, _finals, _talk, _sums, _templated)
    for at in range(number):
        (one,) = makers[at % len(makers)](rng, 1)
        yield Prompt(
            kind="repeated", system=one.system, user=one.user, want=one.want,
            max_tokens=one.max_tokens, served=rng.randint(2, 5),
        )  # fmt: skip
