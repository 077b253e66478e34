"""Compare two adapter versions: descent, config, what they learned from, weights. Pure."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.engine import lora_weights
from deploy.engine.lora_weights import Tensor, check_config, read_matrices, read_tensors
from deploy.errors import InvalidAdapterError
from deploy.registry.lineage import Lineage, LineageRun
from learner.adapter_folder import CONFIG, WEIGHTS, open_file, open_folder
from sidecar.records import BASE
from sidecar.visible import counted, visible

# Compare the weights of two LoRA folders, module by module.

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
        found = lora_weights.parse(file.read())
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


SHOWN_MODULES = 20
"""Modules that are named in the text, those that differ most; `-o json` has all."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """How two versions are related."""

    common: str
    """Newest version that both descend from or are, or "base"."""
    steps_a: int
    """Versions from it to A; 0: A is it."""
    steps_b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Groups that the versions and their ancestors were trained on."""

    only_a: tuple[str, ...]
    """Ids of groups that A alone learned from."""
    only_b: tuple[str, ...]
    both: int
    judges_a: tuple[str, ...]
    """Judge and rubric hash of each kind of score that A learned from."""
    judges_b: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDiff:
    """Everything in which A and B differ."""

    a: str
    b: str
    same_files: bool
    descent: Descent
    config: Mapping[str, tuple[Any, Any]]
    """Key of `adapter_config.json` -> value in A and in B, of the keys that differ."""
    settings: Mapping[str, tuple[Any, Any]]
    """Setting of the training run -> value in A's and B's, of those that differ."""
    data: TrainingData
    modules: tuple[ModuleChange, ...]
    """What the two add to each module; empty when it was not compared."""
    not_compared: str
    """Why the weights were not compared; empty: they were."""


def compare_descent(a: Lineage, b: Lineage) -> Descent:
    """Find the newest common ancestor of two versions."""
    names_a = [step.adapter.name for step in a.steps]
    names_b = [step.adapter.name for step in b.steps]
    common = next((name for name in names_a if name in names_b), BASE)
    if common == BASE:
        return Descent(common=BASE, steps_a=len(names_a), steps_b=len(names_b))
    return Descent(common=common, steps_a=names_a.index(common), steps_b=names_b.index(common))


def compare_data(a: Lineage, b: Lineage) -> TrainingData:
    """Compare what the whole chains of two versions were trained on."""
    groups_a, groups_b = _trained(a), _trained(b)
    return TrainingData(
        only_a=tuple(one for one in groups_a if one not in groups_b),
        only_b=tuple(one for one in groups_b if one not in groups_a),
        both=len(groups_a.keys() & groups_b.keys()),
        judges_a=tuple(sorted(set(groups_a.values()))),
        judges_b=tuple(sorted(set(groups_b.values()))),
    )


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key -> both values, of the keys that differ; a missing one is None."""
    keys = sorted({*a, *b})
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def settings_of_run(lineage: Lineage) -> Mapping[str, Any]:
    """Return the settings of the run that made the version; empty when none is recorded."""
    run = lineage.steps[0].run if lineage.steps else None
    return run.settings if run is not None else {}


def render(diff: AdapterDiff) -> str:
    """Say in words how two versions differ."""
    return "\n".join(visible(line) for line in _lines(diff))


def _lines(diff: AdapterDiff) -> Iterator[str]:
    yield f"A: {diff.a}"
    yield f"B: {diff.b}"
    if diff.same_files:
        yield "They have the same files."
    yield _descent_words(diff)
    yield from _value_lines("Config", diff.config)
    yield from _value_lines("Settings of the run", diff.settings)
    data = diff.data
    yield (
        f"Trained on: {counted(len(data.only_a), 'group')} in A alone, {len(data.only_b)} in B "
        f"alone, {data.both} in both (with all ancestors)"
    )
    if data.judges_a != data.judges_b:
        yield f"  judges of A: {', '.join(data.judges_a) or 'none'}"
        yield f"  judges of B: {', '.join(data.judges_b) or 'none'}"
    if diff.not_compared:
        yield f"Weights: not compared: {diff.not_compared}"
        return
    yield from _weight_lines(diff.modules)


def _descent_words(diff: AdapterDiff) -> str:
    found = diff.descent
    if diff.a == diff.b:
        return "Descent: A and B are the same version"
    if found.common == diff.a:
        return f"Descent: B descends from A, {counted(found.steps_b, 'version')} later"
    if found.common == diff.b:
        return f"Descent: A descends from B, {counted(found.steps_a, 'version')} later"
    common = "the base model" if found.common == BASE else found.common
    return (
        f"Descent: both descend from {common}: A {counted(found.steps_a, 'version')}, "
        f"B {counted(found.steps_b, 'version')} later"
    )


def _value_lines(title: str, values: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    yield f"{title}: {'the same' if not values else ''}".rstrip()
    for key, (a, b) in values.items():
        yield f"  {key}: {_value(a)} in A, {_value(b)} in B"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None or value == "" else str(value)


def _weight_lines(modules: Sequence[ModuleChange]) -> Iterator[str]:
    yield (
        "Weights: what the adapter adds to a module (Frobenius norm of scale * B A), the norm of "
        "the difference, and the cosine of the two"
    )
    yield f"{'A':>10}{'B':>10}{'A - B':>10}{'cosine':>9}  module"
    most = sorted(modules, key=lambda one: -one.norm_difference)
    for one in [total(list(modules)), *most[:SHOWN_MODULES]]:
        cosine = "-" if one.cosine is None else f"{one.cosine:+.4f}"
        yield (
            f"{one.norm_a:>10.4g}{one.norm_b:>10.4g}{one.norm_difference:>10.4g}{cosine:>9}"
            f"  {one.module}"
        )
    if len(modules) > SHOWN_MODULES:
        left = len(modules) - SHOWN_MODULES
        differ = counted(left, "module that differs", "modules that differ")
        yield f"and {differ} less (-o json has all)"


def _trained(lineage: Lineage) -> dict[str, str]:
    """Group id -> its judge, of the groups that the chain was trained on, the newest run first."""
    found: dict[str, str] = {}
    for step in lineage.steps:
        for group_id, judge in _of_run(step.run):
            found.setdefault(group_id, judge)
    return found


def _of_run(run: LineageRun | None) -> Iterator[tuple[str, str]]:
    for group in run.groups if run is not None else ():
        if group.status == "trained":
            yield group.group_id, f"{group.judge_model} rubric {str(group.rubric_hash or '')[:12]}"
