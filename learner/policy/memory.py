"""What fits into the learner's share of the memory: a run, its packs, and the longest input.

The learner may stand beside vLLM on one card. It never asks vLLM for room: a run that would not fit
is refused in words before it takes a group or loads a weight (`check_room`), and tried again later.
On a GPU torch is limited to the share, so a run that grows fails by itself and not by taking what
vLLM needs. On a CPU nothing can hold it; the estimate of a pack stays within the share. Once the
packs are known, `prepare` has as many layers computed twice as are needed. `reach` says how long
an input can be, for `learner.pack_tokens = "auto"`. The bytes of a pack are in
`learner.policy.costs`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import structlog
import torch

from learner.base_weights import BaseSize
from learner.errors import NoRoomError
from learner.policy.architecture import blocks_of, positions
from learner.policy.costs import (
    BF16_BYTES,
    CHUNK_BYTES,
    FP32_BYTES,
    KEPT_BF16_BYTES,
    MIXED_BYTES,
    MOMENTS,
    SHARE,
    Sizes,
    known_base,
    longest_pack,
    pack_bytes,
    sizes,
    with_allocator,
)
from learner.policy.kept import KEPT
from learner.policy.logprobs import Policy, wants_autocast
from sidecar.settings import Learner
from sidecar.settings.training import SHORT_PACK

Checkpointing = Literal["auto", "on", "off"]

log = structlog.get_logger()

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""glibc's names in `mallopt`."""
THRESHOLD_BYTES = 128 * 1024
"""glibc's first value of both, which it raises by itself up to 32 MB."""
CGROUP = Path("/sys/fs/cgroup")


def _ram(key: str, limit: Callable[[], int]) -> int | None:
    """Return a line of /proc/meminfo in bytes, at most the limit of the control group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (found,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
    except (OSError, ValueError):
        return None
    try:
        return min(found, max(0, limit()))
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return found


def _of_group(name: str) -> int:
    return int((CGROUP / name).read_text())


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, within the limit of this process's control group; None:
    it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _ram("MemAvailable", lambda: _of_group("memory.max") - _of_group("memory.current"))


def within_share(device: torch.device, free: int | None, share: float) -> int | None:
    """Return the free memory that a process may still take, of its share of a card; on a CPU the
    share is compared before a run."""
    if free is None or device.type != "cuda" or share >= 1:
        return free
    total = torch.cuda.mem_get_info(device)[1]
    return max(0, min(free, int(share * total) - torch.cuda.memory_reserved(device)))


JOINT_TOKENS = {"cuda": 16_384}
"""By kind of device: tokens up to which several groups share a pack. A group of 1,500 tokens is 13
ms of products on an H100, and 8,400 starts of a kernel (counted); on a CPU sharing saves nothing
(-9 to +2 %, docs/log.md, 2026-11-27)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """How the packs of a run are computed."""

    checkpointing: int = 0
    """Layers that are computed twice."""
    joint: int = 0
    """Most tokens of a pack that several groups share."""


def prepare(
    policy: Policy,
    setting: Checkpointing,
    *,
    longest: int,
    gathered: int = 0,
    share: float = 1.0,
    some: bool = True,
) -> Prepared:
    """Have as many layers computed twice as the setting says, or the longest pack needs; find how
    long the pack of several groups may be without that.

    longest: tokens. gathered: most keys that the form `paths` copies for a pack. share: of the
    card, that this process may take. some: False: all layers or none, for processes that must
    decide alike.
    """
    free = within_share(policy.device, free_bytes(policy.device), share)
    plain, saving = estimate(policy, longest, gathered)
    layers = len(blocks_of(policy.model.get_base_model().get_decoder()))
    twice, needed = layers if setting == "on" else 0, saving if setting == "on" else plain
    if setting == "auto" and plain is not None and saving is not None and free is not None:
        # A layer's part of what all of them save; the last of them saves nothing.
        part = max(1, plain - saving) / max(1, layers)
        twice = min(layers, max(0, math.ceil((plain - SHARE * free) / part)))
        twice = layers if twice and not some else twice
        needed = int(plain - twice * part)
    said = {"tokens": longest, "needed_mb": _mb(needed), "free_mb": _mb(free)}
    said |= {"checkpointing": twice, "layers": layers}
    if needed is not None and free is not None and needed > free:
        log.warning("memory_may_not_do", **said, to_do="lower learner.pack_tokens, or free memory")
    else:
        log.info("memory_estimated", **said)
    if twice:
        recompute_layers(policy, twice)
        return Prepared(checkpointing=twice)
    if plain is None or free is None or policy.form in ("dense", "paths"):
        return Prepared()
    # A pack's bytes grow no faster than its tokens do.
    times = max(1.0, SHARE * free / plain)
    return Prepared(joint=min(JOINT_TOKENS.get(policy.device.type, 0), int(times * longest)))


def estimate(policy: Policy, longest: int, gathered: int = 0) -> tuple[int | None, int | None]:
    """Return the bytes that the longest pack needs, without and with checkpointing, the optimiser's
    included; None where the config does not say enough."""
    try:
        plain, saving = pack_estimate(policy, longest, gathered)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return None, None
    trainable = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    moments = trainable * MOMENTS * 4
    return plain + moments, saving + moments


def pack_estimate(policy: Policy, tokens: int, gathered: int = 0) -> tuple[int, int]:
    """Return the bytes that a pack needs beside the weights, without and with checkpointing.

    Raises: AttributeError, TypeError, ValueError or ZeroDivisionError where the config does not say
        enough.
    """
    base = policy.model.get_base_model()
    masks = len(policy.shape.windows) if policy.form == "dense" and policy.shape.packs else 0
    config = base.config.get_text_config()
    cuda = policy.device.type == "cuda"
    eager = getattr(config, "_attn_implementation", "") == "eager"
    model = sizes(config, masks=masks, eager=eager, cuda=cuda)
    halves = next(base.parameters()).dtype != torch.float32
    number = number_bytes(halves=halves, autocast=policy.autocast)
    copied = gathered if policy.form == "paths" else 0
    plain, saving = (
        pack_bytes(model, tokens, number_bytes=number, checkpointing=twice, gathered=copied)
        for twice in (False, True)
    )
    return (
        with_allocator(plain, cuda=cuda, checkpointing=False),
        with_allocator(saving, cuda=cuda, checkpointing=True),
    )


def recompute_layers(policy: Policy, number: int | None = None) -> None:
    """Keep the inputs of the first layers alone, of all without a number; the backward pass, which
    has given back what the others kept by then, computes them once more."""
    base = policy.model.get_base_model()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for block in blocks_of(base.get_decoder())[:number]:
        # transformers checkpoints layers in training alone. The flag of the modules inside, which
        # would switch dropout on, stays as it is; what a block drops by itself (OPT) is set to 0.
        block.training = True
        for name in [one for one in vars(block) if "dropout" in one]:
            if isinstance(getattr(block, name), float):
                setattr(block, name, 0.0)
    if policy.device.type == "cpu":
        _return_freed_blocks()


def _return_freed_blocks() -> None:
    """Let the C library give large freed blocks back at once, where it is glibc: it keeps up to 32
    MB of each size, which made 1,226 kB a token of 214. A step takes a fifth longer."""
    name = ctypes.util.find_library("c")
    mallopt = getattr(ctypes.CDLL(name), "mallopt", None) if name else None
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, THRESHOLD_BYTES)
        mallopt(TRIM_THRESHOLD, THRESHOLD_BYTES)


def _mb(number: int | None) -> int | None:
    return None if number is None else number // 2**20


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
    """Measure the memory of a device, as `free_bytes`."""
    free = free_bytes(device)
    if device.type == "cuda":
        total: int | None = int(torch.cuda.mem_get_info(device)[1])
    else:
        total = _ram("MemTotal", lambda: _of_group("memory.max"))
    if free is None or total is None:
        return None
    return Room(total=total, free=free + KEPT.held, share=share)


def number_bytes(*, halves: bool, autocast: bool) -> float:
    """Return the bytes of a number that a pass keeps. halves: the base's weights are bf16."""
    return KEPT_BF16_BYTES if halves else MIXED_BYTES if autocast else FP32_BYTES


def fixed_bytes(base: BaseSize, *, rank: int, halves: bool) -> int:
    """Return the bytes of the base's weights, and of the adapter with its moments. Pure."""
    adapter = rank * base.widths * 4 * (1 + MOMENTS)
    return int(base.numbers * (BF16_BYTES if halves else FP32_BYTES)) + adapter


def least_bytes(base: BaseSize, model: Sizes, *, rank: int, halves: bool, autocast: bool) -> int:
    """Return what every run needs: one short pack, with layers that are computed twice. Pure."""
    number = number_bytes(halves=halves, autocast=autocast)
    pack = pack_bytes(model, SHORT_PACK, number_bytes=number, checkpointing=True)
    return fixed_bytes(base, rank=rank, halves=halves) + pack + 2 * CHUNK_BYTES


def limit_torch(device: torch.device, share: float) -> None:
    """Keep torch's allocator within its share of a card. No effect on other devices."""
    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
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
    base, room = known_base(base_model_path), room_of(device, settings.memory_fraction)
    if base is None or room is None:
        return None
    weights, cuda = base.weights, device.type == "cuda"
    autocast = wants_autocast(settings.precision, device)
    if settings.shard_base and cuda:
        away = weights.in_blocks - weights.in_blocks // settings.processes
        weights = replace(weights, numbers=weights.numbers - away)
    halves = autocast and cuda
    needed = least_bytes(weights, base.sizes, rank=settings.rank, halves=halves, autocast=autocast)
    # Without cards the processes of a run have one memory, and each reads the base.
    return needed * (settings.processes if device.type == "cpu" else 1), room


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


# How long an input can be trained on here, for `learner.pack_tokens = "auto"`.


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
    return longest_pack(
        model,
        int(SHARE * (budget - fixed_bytes(base, rank=rank, halves=halves))),
        number_bytes=number_bytes(halves=halves, autocast=autocast),
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
        on with the inputs that it had (`learner.origin`).
        """
        return before if before <= self.holds and self.safe <= 2 * before else self.safe


def reach(
    base_model_path: str, settings: Learner, device: torch.device, *, answers: int
) -> Reach | None:
    """Measure the memory, and return the longest inputs; None where too little is known.

    answers: of a group (`groups.size`).
    Masks of all pairs of tokens, and their scores, are counted for models that are known to need
    them by their config. Where a form turns out to be none for a device only once a model is loaded
    (`learner.policy.attention`), what does not fit is left out (`out_of_memory`).
    """
    autocast = wants_autocast(settings.precision, device)
    base = known_base(base_model_path)
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
        checkpointing=True,
        answers=answers,
    )
    most = positions(base.config) or found
    return Reach(holds=min(found, most), safe=min(found * 3 // 4, most))
