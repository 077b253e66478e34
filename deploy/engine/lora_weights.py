"""Check an adapter's files, without torch: config, tensors, and whether they fit the base.

vLLM reads `r`, `lora_alpha`, the two patterns and `target_modules` without checking that they are
numbers or fit the weights, and uses the patterns' keys as regular expressions. It refuses some
features that it does not support and ignores others, which would serve another adapter than was
trained; both kinds are refused here.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from deploy.errors import InvalidAdapterError
from learner.adapter_folder import CONFIG, WEIGHTS
from learner.origin import not_plain_lora

# Parse untrusted JSON strictly: input that two parsers could read differently is refused.

MAX_DEPTH = 16
"""Deepest nesting. PEFT's configuration and a safetensors header have 3 levels."""
MAX_INTEGER_DIGITS = 20
"""Longest integer in digits: enough for 64 bits."""


def parse(data: bytes) -> Any:  # Any: JSON
    """Parse JSON. Raises: ValueError with the first defect, in one line."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_number,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg} at character {error.pos}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from error
    _check(value)
    return value


def shown(value: object) -> str:
    """Format an untrusted value for a message: one short ASCII line, quoted unless plain words."""
    plain = isinstance(value, str) and value.isascii() and value.isprintable()
    text = str(value) if plain else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("has a duplicate key in one object")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is no JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"holds the number {shown(text)}, which is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(f"holds an integer of {len(text)} digits")
    return int(text)


def _check(value: Any) -> None:
    """Refuse deep nesting and lone surrogates. A loop, since recursion could exhaust the stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.keys()
                below += one.values()
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str) and not one.isascii():
                _check_text(one)
        level = below
        if not level:
            return
    raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"holds a lone surrogate in {shown(text)}") from error


# Read the header of a safetensors file and check its numbers, without numpy or torch.

SMALL_HEADER_BYTES = 256 * 2**10
"""Header length allowed for any file: 1,700 tensors, as many as an adapter of a 405B model has."""
HEADER_SHARE = 1 / 64
"""Largest share of the file for a longer header. A hostile header takes up to 35 times its length
when parsed, so the check stays within 0.6 times the size of the file."""
PIECE_BYTES = 2**20
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_EXPONENT_MASKS = {
    # dtype -> exponent bits in the highest byte, and in the byte below it
    "F64": (0x7F, 0xF0),
    "F32": (0x7F, 0x80),
    "BF16": (0x7F, 0x80),
    "F16": (0x7C, 0x00),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the header. `start` and `end` are byte offsets after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_tensors(file: io.BufferedReader, name: str) -> tuple[Tensor, ...]:
    """Read the header and leave the file positioned at the first tensor's bytes.

    Returns: the tensors in the order of their bytes.
    Raises: InvalidAdapterError when it is not a valid safetensors file of floating-point numbers.
    """
    entries, size = read_header(file, name)
    tensors = sorted(
        (_tensor(name, key, entry) for key, entry in entries.items()),
        key=lambda tensor: (tensor.start, tensor.end),
    )
    _check_layout(name, tensors, size)
    return tuple(tensors)


def read_header(file: io.BufferedReader, name: str) -> tuple[dict[str, Any], int]:
    """Read the header: tensor name -> unchecked entry, and the number of bytes after the header.

    Raises: InvalidAdapterError when the header violates the format.
    """
    total = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise InvalidAdapterError(f"{name}: is no safetensors file, it has no header")
    (length,) = struct.unpack("<Q", prefix)
    if length > total - 8:
        raise InvalidAdapterError(f"{name}: header of {length} bytes does not fit the file")
    limit = max(SMALL_HEADER_BYTES, int(total * HEADER_SHARE))
    if length > limit:
        raise InvalidAdapterError(
            f"{name}: header of {length} bytes is over {limit}, too long for a file of {total}"
        )
    try:
        entries = parse(file.read(length))
    except ValueError as error:
        raise InvalidAdapterError(f"{name}: its safetensors header {error}") from error
    if not isinstance(entries, dict):
        raise InvalidAdapterError(f"{name}: its safetensors header is no JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InvalidAdapterError(f"{name}: its __metadata__ is not a table of texts")
    return entries, total - 8 - length


def first_non_finite(file: io.BufferedReader, tensors: tuple[Tensor, ...]) -> str | None:
    """Return the name of the first tensor that holds an infinity or a NaN, or None.

    file: positioned as `read_tensors` left it.
    Raises: InvalidAdapterError when the file ends too early.
    """
    for tensor in tensors:
        left = tensor.end - tensor.start
        while left:
            piece = file.read(min(left, PIECE_BYTES))
            if not piece or len(piece) % _ITEM_BYTES[tensor.dtype]:
                raise InvalidAdapterError(f"{tensor.name}: the file became shorter meanwhile")
            if not _finite(piece, tensor.dtype):
                return tensor.name
            left -= len(piece)
    return None


def _tensor(name: str, key: str, entry: Any) -> Tensor:  # Any: JSON of a foreign file
    where = f"{name}: {shown(key)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidAdapterError(f"{where} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise InvalidAdapterError(
            f"{where} is {shown(dtype)}; a LoRA weight is one of {', '.join(_ITEM_BYTES)}"
        )
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise InvalidAdapterError(f"{where} has a broken shape or place")
    return Tensor(key, dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: Any) -> bool:  # Any: as above
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _check_layout(name: str, tensors: list[Tensor], size: int) -> None:
    """The tensors must fill the data without gap or overlap, as the format demands."""
    place = 0
    for tensor in tensors:
        expected = math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
        if tensor.start != place or tensor.end - tensor.start != expected:
            raise InvalidAdapterError(f"{name}: {shown(tensor.name)} lies at a wrong place")
        place = tensor.end
    if place != size:
        raise InvalidAdapterError(f"{name}: holds {size} bytes of tensors, the header says {place}")


def _finite(data: bytes, dtype: str) -> bool:
    width = _ITEM_BYTES[dtype]
    high_mask, low_mask = _EXPONENT_MASKS[dtype]
    # 1 where all exponent bits of the highest byte are set, which is rare in valid weights.
    high = _has_all_bits(data[width - 1 :: width], high_mask)
    if 1 not in high:
        return True
    # One operation on all bytes: a file of large numbers must not cost a Python loop over them.
    low = _has_all_bits(data[width - 2 :: width], low_mask)
    return int.from_bytes(high, "little") & int.from_bytes(low, "little") == 0


def _has_all_bits(data: bytes, mask: int) -> bytes:
    return data.translate(bytes(int(byte & mask == mask) for byte in range(256)))


MAX_ALPHA = 65_536.0
"""Largest `lora_alpha`: above it a weight of 1 overflows half precision. In use: below 1,000."""
MAX_NAMES = 4_096
"""Most target modules, or keys of a pattern: a 405B model has 1,764 adapted layers."""
_MODULE = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
"""A module's name. As a regular expression it cannot cause catastrophic backtracking."""
_MAX_NAME = 512
_HEAVY = re.compile(r"\)[*+?{]|\\[1-9]|\(\?")
_REPEATS, _MAX_REPEATS = re.compile(r"[*+{]"), 4
"""What makes a pattern's time exponential, or polynomial of a high degree, in a name's length."""
_ANY_LAYER = re.compile(r"(?:^|.*?\.)[^.]+\.(\d+)\.")
"""Finds a layer's number in a module's name as peft does: the first number of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The shape that the configuration demands of the weights."""

    rank: int
    rank_pattern: Mapping[str, int]
    """Module-name pattern -> rank; the first pattern that matches a module decides."""
    targets: frozenset[str]
    """Names, or name suffixes, of the adapted modules."""
    excluded: frozenset[str] | re.Pattern[str] = frozenset()
    """Names, or name suffixes, that PEFT does not adapt; or a pattern of their whole names."""
    layers: frozenset[int] | None = None
    """Numbers of the layers that PEFT adapts; None: all."""
    layer_names: tuple[str, ...] = ()
    """Names of the lists whose layers are counted; empty: any."""

    def rank_of(self, module: str) -> int:
        """Return the rank that vLLM and PEFT expect of a module."""
        pattern = self.rank_pattern.items()
        return next((rank for key, rank in pattern if _matches(key, module)), self.rank)

    def targets_of(self, module: str) -> set[str]:
        """Return the targets that match a module."""
        return _ends(module) & self.targets

    def excludes(self, module: str) -> bool:
        """Return True when PEFT would not load matrices of this module."""
        if isinstance(self.excluded, re.Pattern):
            return self.excluded.fullmatch(module) is not None
        return not self.excluded.isdisjoint(_ends(module))

    def passes_over(self, module: str) -> bool:
        """Return True when PEFT would not load matrices of this module for its layer's number."""
        if self.layers is None:
            return False
        patterns = [re.compile(rf"(?:^|.*?\.){re.escape(n)}\.(\d+)\.") for n in self.layer_names]
        found = (pattern.match(module) for pattern in patterns or [_ANY_LAYER])
        match = next((one for one in found if one is not None), None)
        return match is None or int(match[1]) not in self.layers


def _ends(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[place:]) for place in range(len(parts))}


def is_module_name(name: object) -> bool:
    """Return True for a valid name of a model's module."""
    return isinstance(name, str) and len(name) <= _MAX_NAME and bool(_MODULE.fullmatch(name))


def _matches(key: str, module: str) -> bool:
    """Return True when the key, a regular expression in vLLM and PEFT, matches the name's end."""
    start = len(module) - len(key)
    if start < 0 or (start > 0 and module[start - 1] != "."):
        return False
    return all(one in (".", other) for one, other in zip(key, module[start:], strict=True))


def check_config(config: Any, *, max_rank: int, bases: Collection[str]) -> LoraShape:  # Any: JSON
    """Check a parsed `adapter_config.json` and return the shape that it demands.

    max_rank: highest rank that vLLM serves (`serving.max_lora_rank`).
    bases: names that an adapter may give for the served base model; empty: any.
    Raises: InvalidAdapterError with the first defect.
    """
    if not isinstance(config, dict):
        raise InvalidAdapterError(f"{CONFIG}: is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise InvalidAdapterError(
            f"{CONFIG}: peft_type is {shown(config.get('peft_type'))}, not LORA"
        )
    rank = config.get("r")
    rank_pattern = _pattern(config, "rank_pattern")
    for one in (rank, *rank_pattern.values()):
        _check_rank(one, max_rank)
    for key, alpha in (
        ("lora_alpha", config.get("lora_alpha")),
        *(("alpha_pattern", one) for one in _pattern(config, "alpha_pattern").values()),
    ):
        _check_alpha(key, alpha)
    if (found := not_plain_lora(config)) is not None:
        raise InvalidAdapterError(
            f"{CONFIG}: {found.member} is {shown(config.get(found.member))}, {found.why}"
        )
    base = config.get("base_model_name_or_path")
    served = {name.rstrip("/") for name in bases}
    if bases and not (isinstance(base, str) and base.rstrip("/") in served):
        raise InvalidAdapterError(
            f"{CONFIG}: was trained on {shown(base)}, vLLM serves {' = '.join(sorted(bases))}; "
            "if these are the same weights, write one of the served names as "
            "base_model_name_or_path there"
        )
    return LoraShape(
        rank=int(rank or 0),
        rank_pattern=rank_pattern,
        targets=_targets(config.get("target_modules")),
        excluded=_excluded(config.get("exclude_modules")),
        layers=_layers(config),
        layer_names=_layer_names(config),
    )


def _pattern(config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict) or len(found) > MAX_NAMES:
        raise InvalidAdapterError(f"{CONFIG}: {key} is not a table of at most {MAX_NAMES} modules")
    for name in found:
        if not is_module_name(name):
            raise InvalidAdapterError(
                f"{CONFIG}: {key} names {shown(name)}; use plain names of modules, vLLM would "
                "run it as a regular expression"
            )
    return found


def _check_rank(rank: Any, max_rank: int) -> None:
    if type(rank) is not int or not 0 < rank <= max_rank:
        raise InvalidAdapterError(
            f"{CONFIG}: rank {shown(rank)} is not in 1..{max_rank} "
            "(serving.max_lora_rank, vLLM's --max-lora-rank)"
        )


def _check_alpha(key: str, alpha: Any) -> None:
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or not 0 < alpha <= MAX_ALPHA:
        raise InvalidAdapterError(
            f"{CONFIG}: {key} holds {shown(alpha)}, which is no number over 0 and up to "
            f"{MAX_ALPHA:g}"
        )


def _layers(config: dict[str, Any]) -> frozenset[int] | None:
    """Read `layers_to_transform`: a number, or a list of them; null and an empty list: all."""
    found = config.get("layers_to_transform")
    if found is None or found == []:
        return None
    numbers = found if isinstance(found, list) else [found]
    if len(numbers) > MAX_NAMES or not all(type(one) is int and one >= 0 for one in numbers):
        raise InvalidAdapterError(
            f"{CONFIG}: layers_to_transform is {shown(found)}, which is no list of at most "
            f"{MAX_NAMES} numbers of layers"
        )
    return frozenset(numbers)


def _layer_names(config: dict[str, Any]) -> tuple[str, ...]:
    """Read `layers_pattern`: names of the lists of layers, which peft takes for patterns."""
    found = config.get("layers_pattern")
    if not found:
        return ()
    names = found if isinstance(found, list) else [found]
    if len(names) > MAX_NAMES or not all(map(is_module_name, names)):
        raise InvalidAdapterError(
            f"{CONFIG}: layers_pattern is {shown(found)}; write plain names of modules"
        )
    if config.get("layers_to_transform") is None:
        raise InvalidAdapterError(
            f"{CONFIG}: layers_pattern is {shown(found)}, and there is no layers_to_transform, "
            "without which PEFT refuses it; remove it there"
        )
    return tuple(names)


def _targets(found: Any) -> frozenset[str]:
    if not isinstance(found, list) or not 0 < len(found) <= MAX_NAMES:
        raise InvalidAdapterError(
            f"{CONFIG}: target_modules is not a list of 1 to {MAX_NAMES} names of modules"
        )
    for name in found:
        if not is_module_name(name):
            raise InvalidAdapterError(
                f"{CONFIG}: target_modules names {shown(name)}, which is no name of a module"
            )
    return frozenset(found)


def _excluded(found: Any) -> frozenset[str] | re.Pattern[str]:
    """Read `exclude_modules`: a list holds names or their ends, a text is a regular expression.

    A pattern that may take long to match is not looked at: an adapter with one was served before,
    and the learner says what it excludes when it loads it.
    """
    if not found:
        return frozenset()
    if isinstance(found, list) and len(found) <= MAX_NAMES and all(map(is_module_name, found)):
        return frozenset(found)
    if isinstance(found, str):
        repeats = len(_REPEATS.findall(found))
        if len(found) > _MAX_NAME or _HEAVY.search(found) or repeats > _MAX_REPEATS:
            return frozenset()
        with suppress(re.error, OverflowError, RecursionError):
            return re.compile(found)
    raise InvalidAdapterError(
        f"{CONFIG}: exclude_modules is {shown(found)}; write a list of at most {MAX_NAMES} plain "
        "names of modules, or a regular expression"
    )


# Check that an adapter's tensors fit its configuration and the base model. Pure.

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
            _check_tensor_rank(
                f"{module}.lora_{side}.weight", rank, shape.rank_of(module), max_rank
            )
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


def _check_tensor_rank(what: str, rank: int, configured: int, max_rank: int) -> None:
    if rank > max_rank:
        raise InvalidAdapterError(f"{WEIGHTS}: {what} has rank {rank} over {max_rank}")
    if rank != configured:
        raise InvalidAdapterError(f"{WEIGHTS}: {what} has rank {rank}, {CONFIG} says {configured}")


# Read the names and shapes of the base model's linear layers from its checkpoint's headers.

log = structlog.get_logger()

MAX_SHARDS = 1_024
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Data types that store one number for one weight, so the stored shape is the layer's shape."""
_ENDINGS = (".weight", ".qweight", ".weight_packed")
"""Suffixes of a layer's weight tensor: unquantised, and in the two usual quantised formats."""


def read_base(base_model_path: str, modules: Collection[str]) -> BaseModules | None:
    """Read the base's shapes of the named modules. Returns: None when its checkpoint is unreadable.

    base_model_path: a folder, or a Hugging Face Hub name, which is looked up in the local cache.
    """
    tails = {tail(module) for module in modules}
    shapes: dict[str, set[tuple[int, ...] | None]] = {}
    kinds: set[str] = set()
    try:
        shards = _shards(base_model_path)
        for shard in shards:
            with shard.open("rb") as file:
                entries, _ = read_header(file, shard.name)
            for name, entry in entries.items():
                module = _module(name)
                if module is None:
                    continue
                kinds.add(module.rpartition(".")[2])
                if tail(module) in tails:
                    shapes.setdefault(tail(module), set()).add(_shape(name, entry))
    except (OSError, InvalidAdapterError) as error:
        log.warning("base_not_readable", base_model=base_model_path, reason=str(error))
        return None
    return BaseModules(shapes=shapes, kinds=kinds) if shards else None


def _shards(base_model_path: str) -> list[Path]:
    folder = Path(base_model_path) if base_model_path else None
    if folder is not None and not folder.is_dir():
        folder = _in_hub_cache(base_model_path)
    shards = sorted(folder.glob("*.safetensors")) if folder is not None else []
    if not shards:
        log.info("base_not_readable", base_model=base_model_path, reason="no safetensors there")
    return shards[:MAX_SHARDS]


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise OSError(f"is neither a folder nor a Hugging Face Hub name: {error}") from error
    return Path(found).parent if isinstance(found, str) else None


def _module(name: str) -> str | None:
    ending = next((one for one in _ENDINGS if name.endswith(one)), None)
    return None if ending is None else name.removesuffix(ending)


def _shape(name: str, entry: Any) -> tuple[int, ...] | None:  # Any: JSON of a header
    plain = isinstance(entry, dict) and entry.get("dtype") in _PLAIN and name.endswith(".weight")
    return tuple(entry["shape"]) if plain and isinstance(entry.get("shape"), list) else None
