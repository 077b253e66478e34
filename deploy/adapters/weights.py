"""Compare the weights of two LoRA folders, module by module.

What a LoRA adds to a module is `scale * B A`. Its norm, and the cosine of two of them, follow from
products of rank by rank: with `<X, Y> = sum(X * Y)`,

    <B1 A1, B2 A2> = sum((B1^T B2) * (A1 A2^T))

so no matrix of the module's own size is made. One module is in memory at a time.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.engine import strict_json
from deploy.engine.adapter_config import check_config
from deploy.engine.lora_weights import read_matrices
from deploy.engine.safetensors_file import Tensor, read_tensors
from deploy.errors import InvalidAdapterError
from learner.adapter_folder import CONFIG, WEIGHTS, open_file, open_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

ANY_RANK = 10**6
"""These versions were checked against vLLM's limit when they were tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """How what two adapters add to one module differs. Frobenius norms of `scale * B A`."""

    module: str
    norm_a: float
    """0 where A does not change the module."""
    norm_b: float
    norm_difference: float
    cosine: float | None
    """Cosine of the two as vectors, -1..1; None where one of them is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """A folder's weights file, ready to read single matrices from."""

    path: Path
    begin: int
    """Byte at which the tensors begin."""
    tensors: Mapping[str, Tensor]
    modules: tuple[str, ...]
    scales: Mapping[str, float]
    """Module -> what `B A` is multiplied with."""


def open_lora(folder: Path) -> LoraFile:
    """Read the header of a folder's weights, and its config.

    Raises: InvalidAdapterError when they are no LoRA; OSError.
    """
    with open_folder(folder) as descriptor:
        with open_file(descriptor, CONFIG) as file:
            config = read_config(file)
        with open_file(descriptor, WEIGHTS) as file:
            tensors = read_tensors(file, WEIGHTS)
            begin = file.tell()
    shape = check_config(config, max_rank=ANY_RANK, bases=frozenset())
    modules = read_matrices(tensors)
    scales = {name: _scale(config, shape.rank_of(name), name) for name in modules}
    return LoraFile(
        path=folder / WEIGHTS,
        begin=begin,
        tensors={one.name: one for one in tensors},
        modules=tuple(modules),
        scales=scales,
    )


def read_config(file: io.BufferedReader) -> dict[str, Any]:
    """Raises: InvalidAdapterError when it is no JSON object."""
    try:
        found = strict_json.parse(file.read())
    except ValueError as error:
        raise InvalidAdapterError(f"{CONFIG}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidAdapterError(f"{CONFIG}: is no JSON object")
    return found


def compare_weights(a: LoraFile, b: LoraFile) -> list[ModuleChange]:
    """Compare module by module, in the order of their names.

    Raises: OSError; ImportError without numpy; InvalidAdapterError when the two are of base models
        with other shapes.
    """
    with a.path.open("rb") as file_a, b.path.open("rb") as file_b:
        names = sorted({*a.modules, *b.modules})
        return [_compare(name, (a, file_a), (b, file_b)) for name in names]


def total(changes: list[ModuleChange]) -> ModuleChange:
    """Return the same of all modules together. Pure."""
    inner = sum((one.cosine or 0.0) * one.norm_a * one.norm_b for one in changes)
    norm_a, norm_b, difference = (
        math.sqrt(sum(getattr(one, name) ** 2 for one in changes))
        for name in ("norm_a", "norm_b", "norm_difference")
    )
    return ModuleChange(
        module="all modules",
        norm_a=norm_a,
        norm_b=norm_b,
        norm_difference=difference,
        cosine=inner / (norm_a * norm_b) if norm_a and norm_b else None,
    )


def _compare(
    module: str, a: tuple[LoraFile, io.BufferedReader], b: tuple[LoraFile, io.BufferedReader]
) -> ModuleChange:
    first, second = _sides(module, *a), _sides(module, *b)
    aa = _inner(first, first, module) if first is not None else 0.0
    bb = _inner(second, second, module) if second is not None else 0.0
    both = first is not None and second is not None
    ab = _inner(first, second, module) if first is not None and second is not None else 0.0
    norms = math.sqrt(max(aa, 0.0)), math.sqrt(max(bb, 0.0))
    cosine = ab / (norms[0] * norms[1]) if both and all(norms) else None
    return ModuleChange(
        module=module,
        norm_a=norms[0],
        norm_b=norms[1],
        norm_difference=math.sqrt(max(aa + bb - 2 * ab, 0.0)),
        cosine=cosine if cosine is None else max(-1.0, min(1.0, cosine)),
    )


def _inner(one: tuple[Matrix, Matrix], other: tuple[Matrix, Matrix], module: str) -> float:
    (a1, b1), (a2, b2) = one, other
    if a1.shape[1] != a2.shape[1] or b1.shape[0] != b2.shape[0]:
        raise InvalidAdapterError(f"{module} has two shapes: the adapters are of two base models")
    return float(((b1.T @ b2) * (a1 @ a2.T)).sum())


def _sides(module: str, lora: LoraFile, file: io.BufferedReader) -> tuple[Matrix, Matrix] | None:
    """Return `A` and `scale * B` of a module; None where the adapter does not change it."""
    if module not in lora.scales:
        return None
    a, b = (_matrix(lora, file, f"base_model.model.{module}.lora_{side}.weight") for side in "AB")
    return a, b * lora.scales[module]


def _matrix(lora: LoraFile, file: io.BufferedReader, name: str) -> Matrix:
    import numpy as np

    tensor = lora.tensors[name]
    file.seek(lora.begin + tensor.start)
    data = file.read(tensor.end - tensor.start)
    if tensor.dtype == "BF16":  # the upper half of a float32
        numbers = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        numbers = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])
    return numbers.astype(np.float64).reshape(tensor.shape)


def _scale(config: Mapping[str, Any], rank: int, module: str) -> float:
    """Return what PEFT and vLLM multiply `B A` with."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config.get("lora_alpha", 8)
    for pattern, value in patterns.items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
