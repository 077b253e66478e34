"""How much memory a pack needs, and whether its layers are computed twice to need less.

With checkpointing only the input of each layer is kept, and the backward pass computes the layer
once more: a third more work for a fraction of the memory. It is switched on by an estimate, before
the first pack, and not after one has failed.

Measured on SmolLM2-135M, packs of 1,024 tokens on a CPU (docs/log.md, 2026-11-23): autograd keeps
1,318 kB a token without and 118 kB with it, where this estimate says 1,420 and 69; the process
grew by 2,432 kB (1.8 times as much, because the C library keeps freed blocks) and 214 kB.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path
from typing import Literal

import structlog
import torch

from learner.policy.attention.segments import takes_grouped_heads
from learner.policy.logprobs import Policy
from learner.policy.sizes import (
    FP32_BYTES,
    KEPT_BF16_BYTES,
    MIXED_BYTES,
    MOMENTS,
    SHARE,
    pack_bytes,
    sizes,
    with_allocator,
)

Checkpointing = Literal["auto", "on", "off"]

log = structlog.get_logger()

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""glibc's names in `mallopt`."""
THRESHOLD_BYTES = 128 * 1024
"""glibc's first value of both, which it raises by itself up to 32 MB."""
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, within the limit of this process's control group.

    None: it is not known.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (free,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError):
        return None
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return free
    return min(free, max(0, limit - used))


def within_share(device: torch.device, free: int | None, share: float) -> int | None:
    """Return the free memory that a process may still take, of its share of a card.

    On a CPU the share is compared before a run, and what others use changes meanwhile.
    """
    if free is None or device.type != "cuda" or share >= 1:
        return free
    total = torch.cuda.mem_get_info(device)[1]
    return max(0, min(free, int(share * total) - torch.cuda.memory_reserved(device)))


def prepare(
    policy: Policy,
    setting: Checkpointing,
    *,
    longest: int,
    gathered: int = 0,
    share: float = 1.0,
) -> bool:
    """Switch checkpointing on if the setting says so, or if the longest pack needs it.

    longest: tokens. gathered: most keys that the forms `varlen` and `paths` copy for a pack. share:
    of the card, that this process may take. Returns: whether it is on.
    """
    free = within_share(policy.device, free_bytes(policy.device), share)
    plain, saving = estimate(policy, longest, gathered)
    tight = plain is not None and free is not None and plain > SHARE * free
    on = setting == "on" or (setting == "auto" and tight)
    needed = saving if on else plain
    said = {"tokens": longest, "needed_mb": _mb(needed), "free_mb": _mb(free), "checkpointing": on}
    if needed is not None and free is not None and needed > free:
        log.warning("memory_may_not_do", **said, to_do="lower learner.pack_tokens, or free memory")
    else:
        log.info("memory_estimated", **said)
    if on:
        recompute_layers(policy)
    return on


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
    model = sizes(
        config,
        masks=masks,
        eager=getattr(config, "_attn_implementation", "") == "eager",
        grouped=policy.form != "paths" and takes_grouped_heads(),
        cuda=cuda,
    )
    halves = next(base.parameters()).dtype != torch.float32
    number = KEPT_BF16_BYTES if halves else MIXED_BYTES if policy.autocast else FP32_BYTES
    copied = gathered if policy.form in ("varlen", "paths") else 0
    plain, saving = (
        pack_bytes(model, tokens, number_bytes=number, checkpointing=twice, gathered=copied)
        for twice in (False, True)
    )
    return (
        with_allocator(plain, cuda=cuda, checkpointing=False),
        with_allocator(saving, cuda=cuda, checkpointing=True),
    )


def recompute_layers(policy: Policy) -> None:
    """Keep the inputs of the layers alone; the backward pass computes the layers once more."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    base = policy.model.get_base_model()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in base.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # transformers checkpoints layers in training alone. The flag of the modules inside,
            # which would switch dropout on, stays as it is.
            module.training = True
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
