"""Ranks that share the base: each keeps its part of every block (FSDP2).

A block's weights are gathered when it is computed, forwards and backwards, and given back after it.
The base is frozen, so no gradient of it is exchanged. The adapter stays whole in each process, and
its gradients are summed by hand as without shares: FSDP would sum those of different groups in the
backward pass, where one that is not finite could not be told from the others. Embeddings and head
stay whole as well: the head is used outside of the model's own forward pass.

A pass is an exchange, so all processes do their passes together: each says what it begins, and one
that has no more groups does the others' passes with its smallest input, for nothing. A pass that
fails in its middle ends the run: the other processes stand in the same pass, and the blocks that
they would gather next would be others. Each process reads the base into RAM before it keeps its
part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from learner.distributed.exchange import SLOW, DataParallel, RankReport
from learner.errors import FaultyGroupsError, RankLostError, RanksDisagreeError
from learner.policy.architecture import blocks_of
from learner.ranks import G
from learner.records import Fault

T = TypeVar("T")

Step = Literal["forward", "forward for backward", "backward", "done"]
PASS_FAILED = "computation_failed"
LOST = ("onnection", *SLOW)
"""In the texts of gloo and NCCL for a process that is gone or hangs."""


@dataclass(frozen=True, slots=True)
class _Input:
    tokens: int
    arguments: Mapping[str, Any]  # Any: transformers is not typed
    autocast: bool


@dataclass(slots=True)
class Sharded(DataParallel):
    """Implements `Ranks`: every process has a part of the base."""

    _decoder: Any = None  # Any: transformers is not typed
    _open: int = 0
    """Passes that were begun and not ended; one failed in its middle when it is not 0."""
    _helping: bool = False
    """This pass is another process's: it is not announced."""
    _small: _Input | None = None
    """The smallest input of this process so far, for such passes."""
    _helped: Tensor | None = None
    """Output of such a pass, whose backward pass follows."""

    def place(self, model: Any, device: torch.device) -> Any:  # Any: as above
        decoder = model.get_base_model().get_decoder()
        trainable = [p for p in model.parameters() if p.requires_grad]
        mesh = init_device_mesh(device.type, (self.size,))
        blocks, ours = blocks_of(decoder), set(trainable)
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=ours)
        # The decoder itself has no share: as the root it lets the blocks be gathered in advance.
        inside = {p for block in blocks for p in block.parameters()}
        outside = {p for p in decoder.parameters() if p not in inside}
        fully_shard(decoder, mesh=mesh, ignored_params=ours | outside)
        model = model.to(device)
        self.exchange.copy_first(trainable)
        self._decoder = decoder
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder.register_forward_hook(self._end)
        return model

    def backward(self, loss: Tensor) -> None:
        self._announce("backward")
        self._open += 1
        loss.backward()
        self._open -= 1

    def first(self, work: Callable[[], T]) -> T:
        """All processes work: the first cannot compute a pass without them."""
        return self._told_by_first(work())

    def _begin(self, _: nn.Module, __: object, arguments: dict[str, Any]) -> None:
        if self._helping:
            return
        if self._open:
            self._end_run("", Fault(PASS_FAILED, "several groups in one pass"))
        self._announce("forward for backward" if torch.is_grad_enabled() else "forward")
        self._open += 1
        tokens, ids = arguments["input_ids"].shape[1], arguments["input_ids"]
        if self._small is None or tokens < self._small.tokens:
            autocast = torch.is_autocast_enabled(ids.device.type)
            self._small = _Input(tokens, dict(arguments), autocast)

    def _end(self, *_: object) -> None:
        self._open -= not self._helping

    def _announce(self, step: Step) -> Step:
        """Say what this process does next. Returns: what those do that are not done."""
        steps = set(self.exchange.all(step)) - {"done"}
        if len(steps) > 1:
            raise RanksDisagreeError(
                f"the processes that share the base are in different passes: {sorted(steps)}"
            )
        return steps.pop() if steps else "done"

    def _compute(self, group: G, compute: Callable[[G], T]) -> T:
        found = super(Sharded, self)._compute(group, compute)
        if self._open:
            self._end_run(group.group_id, found)
        return found

    def _end_run(self, group_id: str, found: object) -> NoReturn:
        fault = found if isinstance(found, Fault) else Fault(PASS_FAILED, "its pass failed")
        if any(word in fault.text for word in LOST):
            raise self.exchange.lost(fault.text)
        who = f"group {group_id}" if group_id else "groups"
        text = f"{who} failed in a pass that all processes compute together: {fault.text}"
        self.exchange.leave_word(group_id, Fault(fault.reason, text))
        self.exchange.close()
        raise FaultyGroupsError(text, {group_id: fault} if group_id else {})

    def _exchanged(self, report: RankReport, failed: Exception | None) -> list[RankReport]:
        if failed is not None and (
            self._open or isinstance(failed, (RankLostError, RanksDisagreeError))
        ):
            raise failed
        while (step := self._announce("done")) != "done":
            self._help(step)
        return super(Sharded, self)._exchanged(report, failed)

    def _help(self, step: Step) -> None:
        self._helping = True
        try:
            if step == "backward" and self._helped is not None:
                trainable = [p for p in self._decoder.parameters() if p.requires_grad]
                kept = [p.grad for p in trainable]
                for parameter in trainable:
                    parameter.grad = None  # else it would be added to in place
                self._helped.float().sum().backward()
                for parameter, gradient in zip(trainable, kept, strict=True):
                    parameter.grad = gradient
                self._helped = None
            elif step != "backward" and self._small is not None:
                # The self-test of the start has given every process an input.
                gradient, given = step == "forward for backward", self._small
                device = given.arguments["input_ids"].device.type
                with (
                    torch.set_grad_enabled(gradient),
                    torch.autocast(device, dtype=torch.bfloat16, enabled=given.autocast),
                ):
                    output = self._decoder(**given.arguments).last_hidden_state
                self._helped = output if gradient else self._helped
        finally:
            self._helping = False
