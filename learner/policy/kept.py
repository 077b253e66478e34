"""The base that a process keeps from run to run (`learner.resident`), and what it holds besides.

Each run gets a copy of the base's modules, which shares the kept weights: what peft, checkpointing
or another attention does to modules goes with the copy. `rest` compares the weights themselves.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

PROC = Path("/proc/self")
GROWTH = 1.25
"""A process that holds so much more than after its first training run is given up. Measured with
SmolLM2-135M on a CPU: 1.00 to 1.06 over ten runs (docs/log.md)."""


class KeptBase:
    """A base without an adapter, as it was loaded."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes of the device's memory that the base takes, which the next run need not find."""
        self._base: Any = None  # Any: a transformers causal LM, not typed
        self._prints: list[int] = []
        self._first = 0

    def copy(self, load: Callable[[], Any]) -> Any:
        """Return the base for a run. load: reads it, once. Raises: what `load` raises."""
        if self._base is None:
            before = _anonymous_bytes()
            self._base = load()
            self._prints = self._fingerprint()
            # Weights that are read as the file has them lie in the file's pages, which count as
            # free: so on a CPU what the process has grown by.
            grown = max(0, _anonymous_bytes() - before)
            self.held = torch.cuda.memory_allocated() if self._on_card() else grown
        return deepcopy(self._base, {id(one): one for one in self._base.parameters()})

    def rest(self) -> str:
        """Give back what the run before took.

        Returns: why this process should do no other run; empty: it may.
        """
        gc.collect()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)  # glibc
        with suppress(OSError):  # no Linux, or /proc cannot be written: the peaks are the process's
            (PROC / "clear_refs").write_text("5")
        if self._base is None:
            return ""
        if self._on_card():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if self._fingerprint() != self._prints:
            return "a run changed the base's weights"
        used = _anonymous_bytes() + (torch.cuda.memory_reserved() if self._on_card() else 0)
        self._first = self._first or used
        if used > GROWTH * self._first:
            return f"it holds {used >> 20} MB, after its first run {self._first >> 20} MB"
        return ""

    def _on_card(self) -> bool:
        return bool(self._base.device.type == "cuda")

    def _fingerprint(self) -> list[int]:
        """One number for each tensor: all its bits, by exclusive or."""
        with torch.no_grad():
            return [int(torch.hash_tensor(one).item()) for one in self._base.parameters()]


def _anonymous_bytes() -> int:
    """Return the memory of this process that no file has; 0 where that is not known."""
    try:
        lines = (PROC / "status").read_text().splitlines()
        (found,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    except (OSError, ValueError):
        return 0
    return found
