"""Check that an adapter's tensors fit its configuration and the base model. Pure.

vLLM accepts matrices of another rank than the configured one (and scales them wrongly), a matrix A
without its B, and layers that the base does not have (which then have no effect).
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
    """Names and shapes of the base model's modules, from its checkpoint."""

    shapes: Mapping[str, Collection[tuple[int, ...] | None]]
    """`tail` of a module's name -> its shapes (outputs, inputs) in the base; None: the weight is
    packed, as quantised ones are."""
    kinds: Collection[str]
    """Last parts of all module names, such as `q_proj`."""


def read_matrices(tensors: Iterable[Tensor]) -> Matrices:
    """Group tensors by module. Raises: InvalidAdapterError when one is no LoRA matrix."""
    modules: dict[str, dict[str, tuple[int, int]]] = {}
    for tensor in tensors:
        match = _MATRIX.fullmatch(tensor.name)
        # vLLM removes the prefix anywhere in a name, so two names could mean one module.
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
    """Check weights against the configuration. Raises: InvalidAdapterError when they differ."""
    used: set[str] = set()
    for module, sides in modules.items():
        if sides.keys() != {"A", "B"}:
            raise InvalidAdapterError(f"{WEIGHTS}: {module} has lora_{min(sides)} alone, not both")
        for side, rank in (("A", sides["A"][0]), ("B", sides["B"][1])):
            _check_rank(f"{module}.lora_{side}.weight", rank, shape.rank_of(module), max_rank)
        targets = shape.targets_of(module)
        if not targets:
            raise InvalidAdapterError(f"{WEIGHTS}: {module} is none of {CONFIG}'s target_modules")
        if shape.excludes(module):
            raise InvalidAdapterError(
                f"{CONFIG}: exclude_modules excludes {module}, of which {WEIGHTS} has matrices; "
                "remove exclude_modules if they belong to the adapter, else save it again without "
                "them"
            )
        if shape.passes_over(module):
            raise InvalidAdapterError(
                f"{CONFIG}: layers_to_transform leaves out {module}, of which {WEIGHTS} has "
                "matrices; set it to null if they belong to the adapter, else save it again "
                "without them"
            )
        used |= targets
    unused = shape.targets - used
    if unused:
        raise InvalidAdapterError(
            f"{CONFIG}: target_modules names {min(unused)}, of which {WEIGHTS} has no matrices"
        )


def check_against_base(modules: Matrices, base: BaseModules) -> None:
    """Check weights against the base model.

    When the base has no module of these names but has modules of these kinds, its checkpoint uses
    other names than the running model; then nothing is refused.
    Raises: InvalidAdapterError for a module that the base lacks, or has in another shape.
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
        # GPT-2 stores its layers transposed.
        if None not in shapes and wanted not in shapes and wanted[::-1] not in shapes:
            raise InvalidAdapterError(
                f"{WEIGHTS}: {module} is {wanted[0]} x {wanted[1]}, the base model's is "
                + " or ".join(" x ".join(map(str, one)) for one in shapes if one)
            )


def tail(module: str) -> str:
    """Return a module's name from its layer number on, equal in a checkpoint and in memory.

    The part before it differs: `model.`, `language_model.model.`, `model.language_model.`.
    """
    match = _LAYER.search(module)
    return match[1] if match is not None else module.rpartition(".")[2]


def _check_rank(what: str, rank: int, configured: int, max_rank: int) -> None:
    if rank > max_rank:
        raise InvalidAdapterError(f"{WEIGHTS}: {what} has rank {rank} over {max_rank}")
    if rank != configured:
        raise InvalidAdapterError(f"{WEIGHTS}: {what} has rank {rank}, {CONFIG} says {configured}")
