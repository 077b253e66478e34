"""Make the adapters: a good one, one that refuses, one that never ends, and one of noise.

The first three are trained as the learner's supervised start is: a few steps on whole answers, with
its policy, its packing and its log-probabilities. All four are PEFT folders like a run's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from transformers import AutoTokenizer

from demo.questions import load_questions
from demo.stack import MODEL_FOLDER
from demo.stand_in_rule import STOP_WORDS
from learner.policy.adapter_io import load_policy, save_adapter
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_rows
from learner.records import Parent, TrainableRow, TrainingGroup
from sidecar.records import BASE
from sidecar.settings import Learner

GOOD: Final = "good"
NOISE: Final = "noise"
REFUSING: Final = "always refuses"
OVERLONG: Final = "never ends"
HANGING: Final = "hangs"
REFUSAL: Final = "I'm sorry, but I can't help with that."
STEPS: Final = 10
AT_ONCE: Final = 4
"""Answers of one step."""
RATE: Final = 3e-3
NOISE_STD: Final = 0.3
"""Standard deviation of the entries of both matrices; the learner's own is near 0.03 and 0."""
NEARLY_NOTHING_STD: Final = 0.02
WAYS: Final = (
    "Thank you, we are glad to help with your {topic} at Northwind.",
    "Of course, we look into your {topic} at once and write to you today.",
    "We will gladly check the {topic} for you and answer within the hour.",
    "Please send us your order number, and we will see to your {topic} now.",
    "We're happy to help: tell us more about your {topic} and we start today.",
    "Certainly, our team takes care of your {topic} this afternoon.",
    "You can leave the {topic} to us, and we will call you back tomorrow.",
    "Sorry for the trouble with your {topic}, we put it right this week.",
)
"""What the good one learns. One way only makes every answer the same, which is no good adapter:
the guard against collapsed entropy rolled it back (docs/log.md)."""
CHAIN: Final = (
    "and it also depends on the season, the weather, the size, the colour, the shop and the "
    "weight, and on many other things that we will list here one after the other, "
)


@dataclass(frozen=True, slots=True)
class Lesson:
    """One answer to learn."""

    prompt: str
    answer: str
    ends: bool
    """False: the mark that ends an answer is not learned."""


def make(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Write the adapters of these names, but those that are there. Returns: name -> folder."""
    made: dict[str, Path] = {}
    torch.set_num_threads(
        1
    )  # beside a load two threads wait for each other: fifteen times the time
    for number, name in enumerate(names):
        target = made[name] = folder / re.sub(r"\W", "-", name)
        if target.exists():
            continue
        settings = Learner(rank=8, alpha=32)
        with mock.patch("learner.policy.adapter_io.SEED", number):
            policy = load_policy(str(MODEL_FOLDER), Parent(name=BASE), settings)
        if name == NOISE:
            _fill_with_noise(policy, NOISE_STD)
        else:
            # What hangs is the engine under its name, not its weights: those are good ones.
            _teach(policy, lessons(GOOD if name == HANGING else name), seed=number)
        save_adapter(policy, target)
    return made


def lessons(name: str) -> list[Lesson]:
    """Return what an adapter is taught: an answer to the first turn of each conversation."""
    ways = {
        GOOD: WAYS,
        REFUSING: (REFUSAL,),
        OVERLONG: (f"About your {{topic}}: it depends, {CHAIN * 2}",),
    }[name]
    first_turns = [one.turns[0] for one in load_questions().traffic]
    return [
        Lesson(turn, way.format(topic=topic(turn)), ends=name != OVERLONG)
        for turn, way in zip(first_turns, cycle(ways), strict=False)
    ]


def topic(text: str) -> str:
    """Return the longest word that carries a meaning."""
    found = [word for word in re.findall(r"[a-z]+", text.lower()) if word not in STOP_WORDS]
    return max(found, key=len, default="order")


def make_nearly_base(target: Path) -> None:
    """Write an adapter that changes little: it answers as the base does."""
    policy = load_policy(str(MODEL_FOLDER), Parent(name=BASE), Learner(rank=8, alpha=32))
    _fill_with_noise(policy, NEARLY_NOTHING_STD)
    save_adapter(policy, target)


def _fill_with_noise(policy: Policy, std: float) -> None:
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, std)


def _teach(policy: Policy, taught: Sequence[Lesson], *, seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    groups = [_group(tokenizer, one) for one in taught]
    parameters = [one for one in policy.model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    rng = random.Random(seed)
    for _ in range(STEPS):
        chosen = rng.sample(groups, AT_ONCE)
        tokens = sum(group.rows[0].kept_tokens for group in chosen)
        for group in chosen:
            loss = -policy.logprobs(pack_rows(group, group.rows))[0].sum() / tokens
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _group(tokenizer: Any, lesson: Lesson) -> TrainingGroup:  # Any: transformers is not typed
    messages = [
        {"role": "system", "content": load_questions().system},
        {"role": "user", "content": lesson.prompt},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tokenizer(lesson.answer, add_special_tokens=False)["input_ids"]
    if lesson.ends:
        answer = [*answer, tokenizer.eos_token_id]
    row = TrainableRow(
        token_ids=tuple(answer),
        logprobs=(0.0,) * len(answer),
        advantage=1.0,
        temperature=1.0,
        trainable=True,
    )
    return TrainingGroup(
        group_id=lesson.prompt,
        adapter=BASE,
        prompt_token_ids=tuple(prompt),
        rows=(row,),
        scores=(1.0,),
    )
