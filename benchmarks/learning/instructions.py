"""The task `instructions`: a topic and two instructions whose obedience code can check. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.learning.tasks import Message, Prompt, Task

TRAIN_TOPICS: Final = (
    "a bicycle", "the moon", "bread", "a library", "rain", "a train station", "coffee", "a garden",
    "the sea", "a clock", "a dog", "winter", "a market", "music", "a mountain", "a school",
    "fire", "a river", "an airport", "sleep", "a kitchen", "the sun", "a bridge", "books",
    "a doctor", "cheese", "a farm", "paper", "a city", "the wind", "a boat", "tea",
)  # fmt: skip
EXAM_TOPICS: Final = (
    "a lighthouse", "snow", "a bakery", "the forest", "a phone", "summer", "a cat", "a museum",
    "an island", "salt", "a teacher", "a road", "milk", "a window", "the desert", "a violin",
)  # fmt: skip
KEYWORDS: Final = ("people", "today", "quiet", "useful", "morning", "friend")
LEAST_WORDS: Final = 4
"""A shorter answer is worth nothing: else one word obeys most instructions."""
MOST_WORDS: Final = 15
ZERO_WORDS: Final = 60

Check = Callable[[str], float]
"""Text -> how far it obeys, 0..1."""


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", text)


def short(text: str) -> float:
    """1 up to `MOST_WORDS`, down to 0 at `ZERO_WORDS`."""
    over = len(words_of(text)) - MOST_WORDS
    return max(0.0, 1.0 - max(0, over) / (ZERO_WORDS - MOST_WORDS))


def exclaims(text: str) -> float:
    return float(text.rstrip().endswith("!"))


def lower(text: str) -> float:
    """Share of the letters that are in lower case; all of them are needed for 1."""
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter.islower() for letter in letters) / len(letters) if letters else 0.0


def one_sentence(text: str) -> float:
    ends = len(re.findall(r"[.!?]+(?=\s|$)", text.strip()))
    return 1.0 / ends if ends and re.search(r"[.!?]$", text.strip()) else 0.0


def keyword(text: str, *, word: str) -> float:
    return float(word in (found.lower() for found in words_of(text)))


def begins(text: str) -> float:
    return float(text.lstrip().lower().startswith("well"))


def instructions() -> Task:
    """32 topics to learn from and 16 others for the exam, each with drawn pairs of instructions."""
    rng = random.Random(5)
    return Task(
        name="instructions",
        train=tuple(_prompt(topic, rng) for topic in TRAIN_TOPICS for _ in range(2)),
        exam=tuple(_prompt(topic, rng) for topic in EXAM_TOPICS for _ in range(2)),
        max_tokens=48,
        passes_means="both instructions obeyed in full",
    )


def _prompt(topic: str, rng: random.Random) -> Prompt:
    word = rng.choice(KEYWORDS)
    kinds: list[tuple[str, Check]] = [
        (f"Use at most {MOST_WORDS} words.", short),
        ("End with an exclamation mark.", exclaims),
        ("Write in lower case letters only.", lower),
        ("Write exactly one sentence.", one_sentence),
        (f'Use the word "{word}".', partial(keyword, word=word)),
        ('Begin with the word "Well".', begins),
    ]
    first, second = rng.sample(kinds, 2)
    checks = (first[1], second[1])

    def reward(message: Message) -> float:
        text = str(message.get("content") or "")
        if len(words_of(text)) < LEAST_WORDS:
            return 0.0
        return sum(check(text) for check in checks) / len(checks)

    told = f"Describe {topic}. {first[0]} {second[0]}"
    return Prompt(
        id=told,
        chat={"messages": [{"role": "user", "content": told}]},
        reward=reward,
        passes=lambda message: reward(message) == 1.0,
    )
