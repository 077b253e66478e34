"""What the processes of a run tell each other: objects and sums of tensors, with bounded waits.

Objects go by gloo in any case, and tensors by the backend of their device. A process that is gone
closes its connections, so the others stop at once; one that hangs is waited for until the group's
timeout. Both are RankLostError. Objects are pickles: the processes of a run trust each other, and
the port between them belongs on a private network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its list of exports

from learner.errors import RankLostError, RanksDisagreeError
from learner.explain import one_line
from learner.records import Fault

T = TypeVar("T")

log = structlog.get_logger()

SLOW = ("imed out", "imeout")
"""In the texts of gloo, NCCL and torch for a process that hangs, or has not come."""
KILLED = "failed_runs"
"""Reason of a group whose process was killed, as where the only process of a run is."""


class Exchange:
    """The open connections of this process to the others. One for each process of a run."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        store: Store,
        cards: bool,
        timeout_s: float,
        killed: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """Connect with the other processes.

        store: where they find each other; kept by the first process, or by its launcher.
        cards: tensors are on GPUs. killed: rank -> how it ended, of ended processes, if known.
        Raises: RankLostError when not all came within the timeout.
        """
        self.rank, self.size = rank, size
        self._store = store
        self._timeout_s = timeout_s
        self._killed = killed
        with self._bounded():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cards else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )

    def close(self) -> None:
        """Close the connections; the others then stop waiting for this process."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def note_place(self, group_id: str) -> None:
        """Say what this process computes now, in case it is killed."""
        with self._bounded():
            self._store.set(f"place/{self.rank}", group_id)

    def leave_word(self, group_id: str, fault: Fault) -> None:
        """Say why this process ends, where no exchange is possible any more."""
        with self._bounded():
            self._store.set("word", json.dumps([self.rank, group_id, fault.reason, fault.text]))

    def all(self, found: T) -> list[T]:
        """Return what every process found, by rank."""
        told: list[Any] = [None] * self.size
        with self._bounded():
            dist.all_gather_object(told, found)
        return told

    def from_first(self, found: T | None) -> T | None:
        """Return what the first process has; the others give None."""
        told: list[Any] = [found]
        with self._bounded():
            dist.broadcast_object_list(told, src=0)
        result: T | None = told[0]
        return result

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the processes, in place; one exchange for all of one type."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # in one order everywhere
            of_type = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().flatten() for tensor in of_type])
            with self._bounded():
                dist.all_reduce(flat)
            self._give_back(flat, of_type)

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite each tensor by that of the first process."""
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            with self._bounded():
                dist.broadcast(sent, src=0)
            self._give_back(sent.flatten(), [tensor])

    def require_same(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises: RanksDisagreeError when the bits of a process are others."""
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(
                tensors[name].detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
            )
        told = self.all(digest.hexdigest())
        others = [rank for rank, found in enumerate(told) if found != told[0]]
        if others:
            raise RanksDisagreeError(
                f"processes {', '.join(map(str, others))} of {self.size} have other weights or "
                "moments than the first; all need the same libraries, kind of processor and "
                "learner.adapters_dir"
            )

    @staticmethod
    def _give_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            parts = flat.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TimeoutError) as error:  # torch has a RuntimeError for each
            raise self.lost(one_line(error)) from error

    def lost(self, said: str) -> RankLostError:
        """Return the error of a process that is gone, with what is known of its end.

        said: the words of gloo, NCCL or torch, which go to the log.
        """
        log.warning("exchange_failed", rank=self.rank, size=self.size, error=said)
        known, faults = self._known()
        if not known and any(word in said for word in SLOW):
            return RankLostError(
                f"process {self.rank} of {self.size} waited {self._timeout_s:g} s for another "
                "(learner.processes_timeout_s, which covers its start too, with torch and the "
                "base); its own lines in the log say where it is: raise the setting if it is slow",
                faults,
            )
        return RankLostError(
            f"process {self.rank} of {self.size} lost another{known}: its connection is closed; "
            "its own lines in the log say why (exchange_failed has torch's words)",
            faults,
        )

    def _known(self) -> tuple[str, dict[str, Fault]]:
        """Return what is known of the process that is gone, and the group that it computed."""
        word = self._noted("word")
        if word:
            rank, group_id, reason, text = json.loads(word)
            faults = {group_id: Fault(reason, text)} if group_id else {}
            return f" (process {rank}: {text})", faults
        killed = self._killed()
        faults = {
            place: Fault(KILLED, f"process {rank} of the run {how} while it computed it")
            for rank, how in killed.items()
            if (place := self._noted(f"place/{rank}"))
        }
        told = ", ".join(f"process {rank} {how}" for rank, how in killed.items())
        return (f" ({told})" if told else ""), faults

    def _noted(self, key: str) -> str:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:  # the process that keeps the store is the one that is gone
            return ""
