"""What the benchmark computes: groups by size, prompt, answers and turns. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from learner.records import TrainableRow, TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One group, or with turns the turns of `group` conversations, each a row of its own."""

    axis: str
    """What it varies: `answers`, `prompt` or `turns`; `issue` and `target` stand alone."""
    group: int
    """Answers, or conversations."""
    prompt: int
    """Tokens, as the next two."""
    answer: int
    turns: int = 1
    """Each an answer and as many tokens of the user's or a tool's."""
    trl: bool = True
    """False: TRL's padded batch is too large for this machine."""
    art: bool = True
    """False: ART's mask of all pairs is."""
    once: bool = False
    """True: it is not repeated, because its rows take minutes."""

    @property
    def padded_tokens(self) -> int:
        """Tokens of TRL's batch."""
        longest = self.answer if self.turns == 1 else self.turns * 2 * self.answer
        return self.group * self.turns * (self.prompt + longest)


ON_CPU = (
    Cell(axis="answers", group=2, prompt=512, answer=128),
    Cell(axis="answers", group=4, prompt=512, answer=128),
    Cell(axis="answers", group=8, prompt=512, answer=128),
    Cell(axis="answers", group=16, prompt=512, answer=128),
    Cell(axis="prompt", group=8, prompt=256, answer=64),
    Cell(axis="prompt", group=8, prompt=1_024, answer=64),
    Cell(axis="prompt", group=8, prompt=2_048, answer=64),
    Cell(axis="prompt", group=8, prompt=8_192, answer=64, trl=False, once=True),
    Cell(axis="turns", group=2, prompt=128, answer=24),
    Cell(axis="turns", group=2, prompt=128, answer=24, turns=8),
    Cell(axis="turns", group=2, prompt=128, answer=24, turns=32, trl=False),
    Cell(axis="outweigh", group=8, prompt=256, answer=500),
    Cell(axis="target", group=8, prompt=3_000, answer=500),
    Cell(axis="prompt", group=8, prompt=16_384, answer=64, trl=False, art=False, once=True),
)
ON_CUDA = tuple(replace(cell, once=False) for cell in ON_CPU)
SMALL = (
    Cell(axis="answers", group=2, prompt=24, answer=8),
    Cell(axis="turns", group=2, prompt=16, answer=4, turns=2),
    Cell(axis="target", group=3, prompt=32, answer=8),
)
"""For a test of the whole path."""


def drawn(cell: Cell, vocabulary: int) -> TrainingGroup:
    """Draw the group of a cell. Answers have one length, so that TRL pads nothing in vain."""
    chance = random.Random(cell.prompt * 1_000 + cell.group)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(chance.randrange(vocabulary) for _ in range(number))

    rows: list[TrainableRow] = []
    for place in range(cell.group):
        history: tuple[int, ...] = ()
        for _ in range(cell.turns):
            tokens = (*history, *ids(cell.answer))
            kept = (False,) * len(history) + (True,) * cell.answer
            rows.append(
                TrainableRow(
                    token_ids=tokens,
                    logprobs=(-5.0,) * len(tokens),
                    advantage=0.5 if place % 2 else -0.5,
                    temperature=1.0,
                    trainable=True,
                    kept=kept if history else (),
                )
            )
            history = (*tokens, *ids(cell.answer))
    return TrainingGroup(
        group_id="drawn",
        adapter="base",
        prompt_token_ids=ids(cell.prompt),
        rows=tuple(rows),
        scores=tuple(0.5 + row.advantage / 2 for row in rows),
    )
