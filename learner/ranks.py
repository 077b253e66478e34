"""The processes that compute a run together, as the trainer sees them; and one process alone.

Each process, a rank, has the policy, and the optimiser in the same state. Groups are dealt to the
ranks; what one finds of its groups, all know. So all decide alike, and the trainer has no branch
for the number of processes. Needs no torch: `learner.distributed` has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
TIMEOUT_S = 1_800.0
"""How long the processes of a run wait for one of them, and a run for each answer of a Tinker
server: one that hangs would hold the run for ever."""


class Group(Protocol):
    """What is dealt to the ranks; of `learner.records.TrainingGroup`."""

    @property
    def group_id(self) -> str: ...


G = TypeVar("G", bound=Group)


class Ranks(Protocol):
    """The processes of a run. All call the same methods in the same order.

    Each method raises RankLostError when another process is gone or does not answer in time.
    """

    @property
    def size(self) -> int:
        """Number of processes."""

    def place(self, model: Any, device: torch.device) -> Any:  # Any: transformers is not typed
        """Put a model with its LoRA onto the device of this process, or this process's share of it.

        Returns: the model. Its trainable weights are those of the first process.
        """

    def each(self, groups: Sequence[G], compute: Callable[[G], T]) -> list[T]:
        """Have each group computed by one process.

        Returns: [groups] what was found of all of them, in order.
        Raises: what `compute` raises, and RankFailedError in the other processes.
        """

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes: the same bits in each of them."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of a loss of this process."""

    def first(self, work: Callable[[], T]) -> T:
        """Return what the first process finds. Only its files and its store are to be kept."""

    def require_same(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare tensors bit by bit. Raises: RanksDisagreeError when a process has others."""


class Alone:
    """One process: it computes everything, and waits for nobody."""

    size = 1

    def place(self, model: Any, device: torch.device) -> Any:  # Any: as above
        return model.to(device)

    def each(self, groups: Sequence[G], compute: Callable[[G], T]) -> list[T]:
        return [compute(group) for group in groups]

    def add(self, tensors: Sequence[Tensor]) -> None: ...

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def first(self, work: Callable[[], T]) -> T:
        return work()

    def require_same(self, tensors: Mapping[str, Tensor]) -> None: ...
