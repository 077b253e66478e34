"""The processes of one run: their messages with bounded waits, and how they share the work.

Objects go by gloo in any case, and tensors by the backend of their device. A process that is gone
closes its connections, so the others stop at once; one that hangs is waited for until the group's
timeout. Both are RankLostError. Objects are pickles: the processes of a run trust each other, and
the port between them belongs on a private network.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its list of exports

from learner.distributed.place import Place
from learner.errors import FaultyGroupsError, RankFailedError, RankLostError, RanksDisagreeError
from learner.explain import one_line
from learner.policy.packing import packed_length
from learner.ranks import G
from learner.records import Fault, TrainingGroup

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
        place: Place,
        store: Store,
        cards: bool,
        timeout_s: float,
        killed: Callable[[float], Mapping[int, str]] = lambda _: {},
    ) -> None:
        """Connect with the other processes.

        store: where they find each other; kept by the first process, or by its launcher.
        cards: tensors are on GPUs. killed(seconds to wait for each): rank -> how it failed.
        Raises: RankLostError when one is known to have ended, or not all came within the timeout.
        """
        self.place, self.rank, self.size = place, place.rank, place.size
        self._store = store
        self._timeout_s = timeout_s
        self._killed = killed
        with self._bounded():
            self._wait_for_all()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cards else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
            )

    def _wait_for_all(self) -> None:
        """Wait until each process has come: torch would not see that one has ended before."""
        self.note_place("")
        until = time.monotonic() + self._timeout_s
        while not self._store.check([f"place/{rank}" for rank in range(self.size)]):
            if self._killed(0.0):
                raise RuntimeError("a process ended before all had come")
            if time.monotonic() > until:
                raise TimeoutError("timed out before all had come")
            time.sleep(0.05)

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
        report: list[Any] = [None] * self.size
        with self._bounded():
            dist.all_gather_object(report, found)
        return report

    def from_first(self, found: T | None) -> T | None:
        """Return what the first process has; the others give None."""
        report: list[Any] = [found]
        with self._bounded():
            dist.broadcast_object_list(report, src=0)
        result: T | None = report[0]
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
        report = self.all(digest.hexdigest())
        others = [rank for rank, found in enumerate(report) if found != report[0]]
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
        """Return the error of a process that is gone, with what is known of its end. said: by
        gloo, NCCL or torch, for the log."""
        log.warning("exchange_failed", rank=self.rank, size=self.size, error=said)
        known, faults = self._known()
        if not known and any(word in said for word in SLOW):
            return RankLostError(
                f"process {self.rank} of {self.size} waited {self._timeout_s:g} s for another "
                "(its start with torch and the base too); its own lines in the log say where it is",
                faults,
            )
        return RankLostError(
            f"process {self.rank} of {self.size} lost another{known}: its connection is closed; "
            "its own lines in the log say why (exchange_failed has torch's words)",
            faults,
        )

    def _known(self) -> tuple[str, dict[str, Fault]]:
        word = self._noted("word")
        if word:
            rank, group_id, reason, text = json.loads(word)
            faults = {group_id: Fault(reason, text)} if group_id else {}
            return f" (process {rank}: {text})", faults
        killed = self._killed(0.5)  # a connection may be gone before its process
        faults = {
            place: Fault(KILLED, f"process {rank} of the run {how} while it computed it")
            for rank, how in killed.items()
            if (place := self._noted(f"place/{rank}"))
        }
        report = ", ".join(f"process {rank} {how}" for rank, how in killed.items())
        return (f" ({report})" if report else ""), faults

    def _noted(self, key: str) -> str:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:  # the process that keeps the store is the one that is gone
            return ""


# Which process computes which group: equal cost for each. Pure.


def attention_share(*, layers: int, queries: int, weights: int) -> float:
    """Return c: operations of attention for a pair of tokens, over those of the weights for one.

    A token takes 2 operations for each weight, and 4 * `queries` for each token that it is compared
    with, in each layer: once for the score, once for the sum.
    """
    return 2 * layers * queries / weights if weights else 0.0


def group_cost(group: TrainingGroup, *, pack_tokens: int, c: float) -> float:
    """Return the cost of a group, in tokens, as if its answers filled its packs evenly."""
    lengths = [len(row.token_ids) for row in group.rows if row.trainable]
    prompt = len(group.prompt_token_ids)
    room = max(1, pack_tokens - prompt)
    packs = max(1, -(-(packed_length(prompt, lengths) - prompt) // room))
    tokens = packed_length(prompt, lengths) + (packs - 1) * prompt
    return tokens + c * tokens * tokens / packs


def deal_by_cost(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal places 0.. to ranks: the most expensive first, each to the rank with the least so far.

    It is at most 4/3 - 1/(3 * ranks) of the best (Graham, SIAM J. Appl. Math. 17, 1969).
    Returns: for each rank its places, in order.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        rank = min(range(ranks), key=lambda one: (loads[one], one))
        dealt[rank].append(place)
        loads[rank] += costs[place]
    return [sorted(places) for places in dealt]


# Ranks that compute a run together: each has the whole policy, or its share of the base.


@dataclass(frozen=True, slots=True)
class RankReport:
    asked: tuple[str, ...]
    """Ids of all the groups that were dealt: the processes must be at the same place."""
    found: Mapping[int, Any]
    error: str = ""
    faults: Mapping[str, Fault] = field(default_factory=dict)


@dataclass(slots=True)
class DataParallel:
    """Implements `Ranks`: every process has the whole base, and the gradients are summed."""

    exchange: Exchange
    pack_tokens: int
    c: float = 0.0
    """Weight of the square of a pack's tokens in its cost (`learner.distributed.exchange`)."""

    @property
    def size(self) -> int:
        return self.exchange.size

    def place(self, model: Any, device: torch.device) -> Any:  # Any: transformers is not typed
        model = model.to(device)
        self.exchange.copy_first([p for p in model.parameters() if p.requires_grad])
        return model

    def each(self, groups: Sequence[G], compute: Callable[[G], T]) -> list[T]:
        found: dict[int, T] = {}
        failed: Exception | None = None
        try:
            costs = [group_cost(group, pack_tokens=self.pack_tokens, c=self.c) for group in groups]  # type: ignore[arg-type]  # groups of the learner
            for place in deal_by_cost(costs, self.size)[self.exchange.rank]:
                found[place] = self._compute(groups[place], compute)
        except Exception as error:  # noqa: BLE001  it is raised again once the others know
            failed = error
        asked = tuple(group.group_id for group in groups)
        report = self._exchanged(RankReport(asked, found), failed)
        if failed is not None:
            raise failed
        for rank, one in enumerate(report):
            if one.error:
                text = f"process {rank} of {self.size} failed: {one.error}"
                raise RankFailedError(text, one.faults)
            if one.asked != asked:
                raise RanksDisagreeError(
                    f"process {rank} of {self.size} is at another place of the run than process "
                    f"{self.exchange.rank}; all need the same files under the same paths"
                )
        known = {place: value for one in report for place, value in one.found.items()}
        return [known[place] for place in range(len(groups))]

    def add(self, tensors: Sequence[Tensor]) -> None:
        self.exchange.add(tensors)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def first(self, work: Callable[[], T]) -> T:
        return self._told_by_first(work() if self.exchange.rank == 0 else None)

    def require_same(self, tensors: Mapping[str, Tensor]) -> None:
        self.exchange.require_same(tensors)

    def _told_by_first(self, found: T | None) -> T:
        return self.exchange.from_first(found if self.exchange.rank == 0 else None)  # type: ignore[return-value]  # the first has it

    def _compute(self, group: G, compute: Callable[[G], T]) -> T:
        self.exchange.note_place(group.group_id)
        found = compute(group)
        self.exchange.note_place("")
        return found

    def _exchanged(self, report: RankReport, failed: Exception | None) -> list[RankReport]:
        if failed is not None:
            faults = failed.faults if isinstance(failed, FaultyGroupsError) else {}
            text = f"{type(failed).__name__}: {one_line(failed)}"
            report = RankReport(report.asked, {}, text, faults)
        return self.exchange.all(report)
