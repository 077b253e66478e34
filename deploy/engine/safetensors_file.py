"""Read the header of a safetensors file and check its numbers, without numpy or torch.

Format: 8 bytes little-endian header length, a JSON object of that length (tensor name -> dtype,
shape, data_offsets), then the tensors' bytes. A number is infinite or NaN exactly when all bits of
its exponent are set, which its one or two highest bytes show; slices and a translation table find
such bytes at memory speed (10 MB in about 20 ms). The file is read in pieces, so the memory of a
check does not grow with the weights.
"""

from __future__ import annotations

import io
import math
import os
import struct
from dataclasses import dataclass
from typing import Any

from deploy.engine import strict_json
from deploy.engine.strict_json import shown
from deploy.errors import InvalidAdapterError

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
        entries = strict_json.parse(file.read(length))
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
