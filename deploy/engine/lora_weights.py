"""Do an adapter's tensors fit its configuration, and the base model? Pure.

vLLM takes matrices whose rank is not the configured one (and scales them wrongly), a matrix A
without its B, and layers that the base does not have (which then do nothing).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from deploy.engine.adapter_config import LoraShape, is_module_name
from deploy.engine.safetensors_file import Tensor
from deploy.engine.strict_json import shown
from deploy.errors import InvalidAdapterError
from learner.adapter_folder import CONFIG, WEIGHTS

PREFIX = "base_model.model."
_MATRIX = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight", re.ASCII)
_LAYER = re.compile(r"(?:^|\.)([A-Za-z_]+\.\d+\..+)")

Matrices = Mapping[str, Mapping[str, tuple[int, int]]]
"""Module -> {"A": (rank, inputs), "B": (outputs, rank)}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModules:
    """What the base model's checkpoint says of its modules."""

    shapes: Mapping[str, Collection[tuple[int, ...] | None]]
    """`tail` of a module's name -> the shapes (outputs, inputs) that the base has for it; None
    among them when a weight is packed, as quantised ones are."""
    kinds: Collection[str]
    """The last parts of all names, such as `q_proj`."""


def read_matrices(tensors: Iterable[Tensor]) -> Matrices:
    """Sort tensors by module. Raises: InvalidAdapterError when one is no LoRA matrix."""
    modules: dict[str, dict[str, tuple[int, int]]] = {}
    for tensor in tensors:
        match = _MATRIX.fullmatch(tensor.name)
        # vLLM removes the prefix wherever it stands: two names could then mean one module.
        if match is None or not is_module_name(match["module"]) or PREFIX in match["module"]:
            raise InvalidAdapterError(f"{WEIGHTS}: {shown(tensor.name)} is no LoRA matrix")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise InvalidAdapterError(
                f"{WEIGHTS}: {tensor.name} is no LoRA matrix, its shape is {shown(tensor.shape)}"
            )
        modules.setdefault(match["module"], {})[match["side"]] = (tensor.shape[0], tensor.shape[1])
    if not modules:
        raise InvalidAdapterError(f"{WEIGHTS}: holds no LoRA matrices")
    return modules


def check_matrices(modules: Matrices, shape: LoraShape, *, max_rank: int) -> None:
    """Raises: InvalidAdapterError when the weights are not those that the configuration tells."""
    used: set[str] = set()
    for module, sides in modules.items():
        if sides.keys() != {"A", "B"}:
            raise InvalidAdapterError(f"{WEIGHTS}: {module} has lora_{min(sides)} alone, not both")
        for side, rank in (("A", sides["A"][0]), ("B", sides["B"][1])):
            _check_rank(f"{module}.lora_{side}.weight", rank, shape.rank_of(module), max_rank)
        targets = shape.targets_of(module)
        if not targets:
            raise InvalidAdapterError(f"{WEIGHTS}: {module} is none of {CONFIG}'s target_modules")
        used |= targets
    unused = shape.targets - used
    if unused:
        raise InvalidAdapterError(
            f"{CONFIG}: target_modules names {min(unused)}, of which {WEIGHTS} has no matrices"
        )


def check_against_base(modules: Matrices, base: BaseModules) -> None:
    """Raises: InvalidAdapterError for a module that the base lacks, or has in another shape.

    Where not one name is known but their kinds are, the checkpoint names its modules otherwise
    than the running model does; then nothing is refused.
    """
    known = any(tail(module) in base.shapes for module in modules)
    if not known and any(module.rpartition(".")[2] in base.kinds for module in modules):
        return
    for module, sides in modules.items():
        if ".experts" in module:  # stored fused in some checkpoints, one by one in others
            continue
        shapes = base.shapes.get(tail(module))
        if not shapes:
            raise InvalidAdapterError(f"{WEIGHTS}: the base model has no module {module}")
        wanted = (sides["B"][0], sides["A"][1])
        # GPT-2's layers are stored the other way round.
        if None not in shapes and wanted not in shapes and wanted[::-1] not in shapes:
            raise InvalidAdapterError(
                f"{WEIGHTS}: {module} is {wanted[0]} x {wanted[1]}, the base model's is "
                + " or ".join(" x ".join(map(str, one)) for one in shapes if one)
            )


def tail(module: str) -> str:
    """The name from its layer's number on, which is the same in a checkpoint and in memory.

    What stands before differs: `model.`, `language_model.model.`, `model.language_model.`.
    """
    match = _LAYER.search(module)
    return match[1] if match is not None else module.rpartition(".")[2]


def _check_rank(what: str, rank: int, configured: int, max_rank: int) -> None:
    if rank > max_rank:
        raise InvalidAdapterError(f"{WEIGHTS}: {what} has rank {rank} over {max_rank}")
    if rank != configured:
        raise InvalidAdapterError(f"{WEIGHTS}: {what} has rank {rank}, {CONFIG} says {configured}")
