"""Whether a run fits into its share of the memory, before it takes a group or loads a weight.

The learner may stand beside vLLM on one card. It never asks vLLM for room: a run that would not fit
is refused in words, and tried again later. On a GPU torch is limited to the share, so a run that
grows fails by itself and not by taking what vLLM needs. On a CPU nothing can hold it; the estimate
of a pack (`learner.policy.memory`) stays within the share.

The estimate is of what every run needs: the weights, the adapter with its moments, and one short
pack with its layers computed twice where the settings allow it. Longer packs are estimated when
they are known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from learner.base_weights import BaseSize
from learner.errors import NoRoomError
from learner.policy.known import known_base
from learner.policy.logprobs import wants_autocast
from learner.policy.memory import CGROUP, free_bytes
from learner.policy.sizes import (
    BF16_BYTES,
    FP32_BYTES,
    KEPT_BF16_BYTES,
    MIXED_BYTES,
    MOMENTS,
    Sizes,
    pack_bytes,
)
from sidecar.settings import Learner
from sidecar.settings.training.learner import SHORT_PACK

log = structlog.get_logger()

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of a device, in bytes."""

    total: int
    free: int
    share: float
    """Part of `total` that the learner may take."""

    @property
    def budget(self) -> int:
        return min(self.free, int(self.share * self.total))


def room_of(device: torch.device, share: float) -> Room | None:
    """Measure the memory of a device, within the limit of this process's control group.

    None: it is not known.
    """
    free = free_bytes(device)
    if device.type == "cuda":
        total: int | None = int(torch.cuda.mem_get_info(device)[1])
    else:
        total = _total_ram()
    return None if free is None or total is None else Room(total=total, free=free, share=share)


def _total_ram() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (total,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    except (OSError, ValueError):
        return None
    try:
        return min(total, int((CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return total


def least_bytes(base: BaseSize, model: Sizes, *, rank: int, weight: float, number: float) -> int:
    """Return what every run needs, with layers that are computed twice. Pure.

    weight, number: bytes of a weight of the base, and of a number that a pass keeps.
    """
    adapter = rank * base.widths * 4 * (1 + MOMENTS)
    pack = pack_bytes(model, SHORT_PACK, number_bytes=number, checkpointing=True)
    return int(base.numbers * weight) + adapter + pack


def limit_torch(device: torch.device, share: float) -> None:
    """Keep torch's allocator within its share of a card. No effect on other devices."""
    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A run does not fit."""

    why: str
    """What it needs, what there is, and what to do."""
    lasts: bool
    """True: it never fits, whoever else leaves the device."""


def check_room(base_model_path: str, settings: Learner, device: torch.device) -> None:
    """Return when a run may begin; also when its needs or the free memory are not known (logged).

    Raises: NoRoomError.
    """
    found = _measured(base_model_path, settings, device)
    if found is None:
        log.info("room_not_known", base=base_model_path, device=str(device))
        return
    needed, room = found
    if needed > room.budget:
        raise NoRoomError(_words(needed, room, device))
    log.info("room_found", needed_mb=needed // 2**20, budget_mb=room.budget // 2**20)


def shortage(base_model_path: str, settings: Learner, device: torch.device) -> Shortage | None:
    """Say why a run would not fit now; None when it does, or when that is not known."""
    found = _measured(base_model_path, settings, device)
    if found is None or found[0] <= found[1].budget:
        return None
    needed, room = found
    return Shortage(why=_words(needed, room, device), lasts=needed > int(room.share * room.total))


def _measured(
    base_model_path: str, settings: Learner, device: torch.device
) -> tuple[int, Room] | None:
    """Return the bytes that every run needs, and the device's room; None where one is not known."""
    needed = _needed(base_model_path, settings, device)
    if needed is None:
        return None
    # Without cards the processes of a run have one memory, and each reads the base.
    needed *= settings.processes if device.type == "cpu" else 1
    room = room_of(device, settings.memory_fraction)
    return None if room is None else (needed, room)


def _needed(base_model_path: str, settings: Learner, device: torch.device) -> int | None:
    base = known_base(base_model_path)
    if base is None:
        return None
    weights = base.weights
    autocast = wants_autocast(settings.precision, device)
    halves = autocast and device.type == "cuda"
    number = KEPT_BF16_BYTES if halves else MIXED_BYTES if autocast else FP32_BYTES
    if settings.shard_base and device.type == "cuda":
        away = weights.in_blocks - weights.in_blocks // settings.processes
        weights = replace(weights, numbers=weights.numbers - away)
    return least_bytes(
        weights,
        base.sizes,
        rank=settings.rank,
        weight=BF16_BYTES if halves else FP32_BYTES,
        number=number,
    )


def _words(needed: int, room: Room, device: torch.device) -> str:
    allowed = int(room.share * room.total)
    if allowed < room.free:
        have = (
            f"learner.memory_fraction = {room.share:g} allows {allowed / GB:.1f} GB of the "
            f"{room.total / GB:.1f} GB"
        )
        to_do = "raise it, or use a smaller base or another learner.device"
    else:
        have = f"{room.free / GB:.1f} of {room.total / GB:.1f} GB are free"
        to_do = (
            "give vLLM less (--gpu-memory-utilization), or set learner.device to another card"
            if device.type == "cuda"
            else "free memory, or use a smaller base or another machine"
        )
    return f"a run needs about {needed / GB:.1f} GB on {device}, and {have}; {to_do}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True when torch or Python could not allocate memory, on the GPU or in RAM."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator has no class of its own
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
