"""The base that a process keeps from run to run (`learner.once.serve`), and what it holds besides.

Each run gets a copy of the base's modules, which shares the kept weights: what peft, checkpointing
or another attention does to modules goes with the copy. `rest` compares the weights themselves.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GROWTH = 1.25
"""A process that holds so much more than after its first run is given up (1.01 after eight)."""


@dataclass(slots=True)
class KeptBase:
    """A base without an adapter, as it was loaded; always of one path and one device."""

    keeps: bool = False
    """False: each run loads its own."""
    held: int = 0
    """Bytes of the device that the base takes, and that the next run need not find."""
    _base: Any = None  # Any: a transformers causal LM, not typed
    _prints: list[int] = field(default_factory=list)
    _first: int = 0

    def copy(self, load: Callable[[], Any]) -> Any:
        """Return the base for a run. load: reads it onto the device. Raises: what `load` raises."""
        if not self.keeps:
            return load()
        if self._base is None:
            before = _anonymous_bytes()
            self._base = load()
            self._prints = self._fingerprint()
            # Not the weights' bytes: on a CPU some stay pages of their file, which count as free.
            self.held = torch.cuda.memory_allocated() or max(0, _anonymous_bytes() - before)
        return deepcopy(self._base, {id(one): one for one in self._base.parameters()})

    def rest(self) -> str:
        """Give back what a run took. Returns: why this process should do no other, or nothing."""
        gc.collect()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
            trim(0)
        with suppress(OSError):  # where it cannot be, the peaks are those of all runs
            Path("/proc/self/clear_refs").write_text("5")
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if self._base is None:
            return ""
        if self._fingerprint() != self._prints:
            return "a run changed the base's weights"
        used = _anonymous_bytes() + torch.cuda.memory_reserved()
        self._first = self._first or used
        if used > GROWTH * self._first:
            return f"it holds {used >> 20} MB, after its first run {self._first >> 20} MB"
        return ""

    def _fingerprint(self) -> list[int]:
        """One number for each tensor: all its bits, by exclusive or."""
        return [int(torch.hash_tensor(one.detach()).item()) for one in self._base.parameters()]


KEPT = KeptBase()  # that of this process


def _anonymous_bytes() -> int:
    """Return the memory of this process that no file has; 0 where that is not known."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except OSError:  # no Linux
        return 0
    return (resident - shared) * mmap.PAGESIZE
