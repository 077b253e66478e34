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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog
import torch

from learner.policy.head import CHUNK_BYTES
from learner.policy.logprobs import Policy

Checkpointing = Literal["auto", "on", "off"]

log = structlog.get_logger()

FP32_BYTES, MIXED_BYTES, BF16_BYTES = 4.0, 2.7, 2.0
"""Bytes of a kept number: fp32; bf16 products beside an fp32 residual stream (measured: 0.67 of
fp32); bf16 weights."""
KEPT_BY_ALLOCATOR = 1.8
"""Growth of the process over what autograd keeps, with the default thresholds of glibc's malloc."""
ON_CUDA = 1.15
"""The same for torch's caching allocator: an allowance for fragments, not measured."""
MOMENTS = 7
"""Numbers beside each trainable weight: gradient, the step's sum and squares, two moments, the
start of the run, and a copy while a step is taken."""
SHARE = 0.8
"""Share of the free memory that a pack may take: other processes grow too."""
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""glibc's names in `mallopt`."""
THRESHOLD_BYTES = 128 * 1024
"""glibc's first value of both, which it raises by itself up to 32 MB."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the estimate needs to know of a model."""

    layers: int
    hidden: int
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together."""
    inner: int
    """Width of the MLP; of the chosen experts together."""
    masks: int = 1
    """Attention masks of a pack."""

    @property
    def kept_in_layer(self) -> int:
        """Numbers that a layer keeps for its backward pass, for each token."""
        return 6 * self.hidden + 3 * self.queries + 4 * self.keys + 4 * self.inner


def sizes(config: Any, *, masks: int = 1) -> Sizes:  # Any: a config of transformers, not typed
    """Read the sizes from a text model's config. Raises: AttributeError when one is missing."""
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    inner = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    return Sizes(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        queries=heads * width,
        keys=int(getattr(config, "num_key_value_heads", None) or heads) * width,
        inner=inner * experts,
        masks=masks,
    )


def pack_bytes(model: Sizes, tokens: int, *, number_bytes: float, checkpointing: bool) -> int:
    """Return the bytes that one pack needs beside the weights, forwards and backwards.

    number_bytes: of a kept number.
    """
    inputs, whole = model.layers * model.hidden, model.layers * model.kept_in_layer
    kept = inputs + model.kept_in_layer if checkpointing else whole
    masks = model.masks * tokens * tokens * number_bytes
    return int(tokens * kept * number_bytes + masks + 2 * CHUNK_BYTES)


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


def prepare(policy: Policy, setting: Checkpointing, *, longest: int, share: float = 1.0) -> bool:
    """Switch checkpointing on if the setting says so, or if the longest pack needs it.

    longest: tokens. share: of the card, that this process may take. Returns: whether it is on.
    """
    free = within_share(policy.device, free_bytes(policy.device), share)
    plain, saving = estimate(policy, longest)
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


def estimate(policy: Policy, longest: int) -> tuple[int | None, int | None]:
    """Return the bytes that the longest pack needs, without and with checkpointing, the optimiser's
    included; None where the config does not say enough."""
    base = policy.model.get_base_model()
    try:
        model = sizes(base.config.get_text_config(), masks=len(policy.shape.windows))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return None, None
    halves = next(base.parameters()).dtype != torch.float32
    number = BF16_BYTES if halves else MIXED_BYTES if policy.autocast else FP32_BYTES
    trainable = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    moments = trainable * MOMENTS * 4
    allocator = ON_CUDA if policy.device.type == "cuda" else KEPT_BY_ALLOCATOR
    plain = pack_bytes(model, longest, number_bytes=number, checkpointing=False)
    saving = pack_bytes(model, longest, number_bytes=number, checkpointing=True)
    # The C library returns freed blocks at once while layers are recomputed (`recompute_layers`).
    kept = ON_CUDA if policy.device.type == "cuda" else 1.0
    return int(plain * allocator) + moments, int(saving * kept) + moments


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
