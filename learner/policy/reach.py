"""How long an input can be trained on here, for `learner.pack_tokens = "auto"`.

The weights of the base and the adapter with its moments are taken from the memory that a run may
take; a share of the rest holds one pack, with its layers computed twice where the settings allow
it. The estimate of a pack is that of `learner.policy.sizes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.base_weights import BaseSize
from learner.policy.architecture import positions
from learner.policy.attention.segments import takes_grouped_heads
from learner.policy.known import known_base
from learner.policy.logprobs import wants_autocast
from learner.policy.room import room_of
from learner.policy.sizes import (
    BF16_BYTES,
    FP32_BYTES,
    KEPT_BF16_BYTES,
    MIXED_BYTES,
    MOMENTS,
    SHARE,
    Sizes,
    longest_pack,
)
from sidecar.settings import Learner


def longest_input(
    base: BaseSize,
    model: Sizes,
    budget: int,
    *,
    rank: int,
    cuda: bool,
    autocast: bool,
    checkpointing: bool,
    answers: int,
) -> int:
    """Return the tokens of the longest pack; 0 where the weights leave no room. Pure.

    budget: bytes that a run may take. autocast: matrix products in bf16. answers: of a group.
    """
    halves = autocast and cuda
    weights = int(base.numbers * (BF16_BYTES if halves else FP32_BYTES))
    adapter = rank * base.widths * 4 * (1 + MOMENTS)
    return longest_pack(
        model,
        int(SHARE * (budget - weights - adapter)),
        number_bytes=KEPT_BF16_BYTES if halves else MIXED_BYTES if autocast else FP32_BYTES,
        cuda=cuda,
        checkpointing=checkpointing,
        answers=answers,
    )


@dataclass(frozen=True, slots=True)
class Reach:
    """Longest inputs, in tokens."""

    holds: int
    """What the memory holds now."""
    safe: int
    """What it still holds when a quarter less is free."""

    def told(self, before: int) -> int:
        """Return what is told to ingest and used; before: the last time, 0: never.

        It stays while it is held and no less than half of what is safe: a run that was killed goes
        on with the inputs that it had (`learner.origin.fingerprint`).
        """
        return before if before <= self.holds and self.safe <= 2 * before else self.safe


def reach(
    base_model_path: str, settings: Learner, device: torch.device, *, answers: int
) -> Reach | None:
    """Measure the memory, and return the longest inputs; None where too little is known.

    answers: of a group (`groups.size`).
    Masks of all pairs of tokens, and their scores, are counted for models that are known to need
    them by their config. Where a form turns out to be none for a device only once a model is loaded
    (`learner.policy.attention.check`), what does not fit is left out (`out_of_memory`).
    """
    autocast = wants_autocast(settings.precision, device)
    # In fp32 a card takes the form `paths`, which copies keys for each query of a group.
    base = known_base(base_model_path, grouped=autocast and takes_grouped_heads())
    room = room_of(device, settings.memory_fraction)
    if base is None or room is None:
        return None
    found = longest_input(
        base.weights,
        base.sizes,
        room.budget,
        rank=settings.rank,
        cuda=device.type == "cuda",
        autocast=autocast,
        checkpointing=settings.checkpointing != "off",
        answers=answers,
    )
    most = positions(base.config) or found
    return Reach(holds=min(found, most), safe=min(found * 3 // 4, most))
