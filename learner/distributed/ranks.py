"""Ranks that compute a run together: each has the whole policy, or its share of the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from learner.distributed.dealing import deal_by_cost, group_cost
from learner.distributed.exchange import Exchange
from learner.errors import FaultyGroupsError, RankFailedError, RanksDisagreeError
from learner.explain import one_line
from learner.ranks import G
from learner.records import Fault

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Told:
    """What a process tells of its groups."""

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
    """Weight of the square of a pack's tokens in its cost (`learner.distributed.dealing`)."""

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
            for place in self._own(groups):
                found[place] = self._compute(groups[place], compute)
        except Exception as error:  # noqa: BLE001  it is raised again once the others know
            failed = error
        asked = tuple(group.group_id for group in groups)
        told = self._exchanged(Told(asked, found), failed)
        if failed is not None:
            raise failed
        for rank, one in enumerate(told):
            if one.error:
                text = f"process {rank} of {self.size} failed: {one.error}"
                raise RankFailedError(text, one.faults)
            if one.asked != asked:
                raise RanksDisagreeError(
                    f"process {rank} of {self.size} is at another place of the run than process "
                    f"{self.exchange.rank}; all need the same files under the same paths"
                )
        known = {place: value for one in told for place, value in one.found.items()}
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

    def _own(self, groups: Sequence[G]) -> list[int]:
        costs = [group_cost(group, pack_tokens=self.pack_tokens, c=self.c) for group in groups]  # type: ignore[arg-type]  # groups of the learner
        return deal_by_cost(costs, self.size)[self.exchange.rank]

    def _compute(self, group: G, compute: Callable[[G], T]) -> T:
        self.exchange.note_place(group.group_id)
        found = compute(group)
        self.exchange.note_place("")
        return found

    def _exchanged(self, told: Told, failed: Exception | None) -> list[Told]:
        if failed is not None:
            faults = failed.faults if isinstance(failed, FaultyGroupsError) else {}
            text = f"{type(failed).__name__}: {one_line(failed)}"
            told = Told(told.asked, {}, text, faults)
        return self.exchange.all(told)
