"""The sizes of a base model, from the heads of its safetensors files. Loads no weights."""

from __future__ import annotations

import json
import math
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from learner.adapter_folder import open_plain

HEAD_BYTES = 100_000_000
"""Longest head of a safetensors file, as the format limits it."""
READ = ("*.json", "*.safetensors", "*.bin")
"""Files of a base that are read."""
OF_BLOCK = (".layers.", ".h.", ".blocks.")
"""What names of weights inside of a decoder's blocks contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSize:
    """Numbers of a base model."""

    numbers: int
    """All weights."""
    in_blocks: int
    """Those of the decoder's blocks."""
    widths: int
    """Sum of inputs and outputs over the blocks' matrices: a LoRA of rank r has r times as many."""


def base_size(folder: Path) -> BaseSize | None:
    """Add up the weights of a folder; None when it has no safetensors, or one that is damaged, or
    what is `not_plain`: what asks for sizes reads the config next."""
    if not_plain(folder) is not None:
        return None
    numbers = in_blocks = widths = 0
    files = sorted(folder.glob("*.safetensors"))
    try:
        for path in files:
            for name, shape in _shapes(path):
                size = math.prod(shape)
                numbers += size
                if any(part in name for part in OF_BLOCK):
                    in_blocks += size
                    widths += sum(shape) if len(shape) == 2 else 0
    except (OSError, ValueError, TypeError, AttributeError, struct.error):
        return None
    return BaseSize(numbers=numbers, in_blocks=in_blocks, widths=widths) if files else None


def not_plain(folder: Path) -> Path | None:
    """Return a file of a base that is a pipe, a device or a socket: to read it could hang."""
    for path in sorted(one for pattern in READ for one in folder.glob(pattern)):
        try:
            mode = path.stat().st_mode
        except OSError:  # a link into nowhere
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return path
    return None


def _shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    with open_plain(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > HEAD_BYTES:
            raise ValueError(f"{path}: its head has {length} bytes")
        head = json.loads(file.read(length))
    for name, tensor in head.items():
        if name != "__metadata__":
            yield name, [int(width) for width in tensor["shape"]]


def base_folder(name: str) -> Path | None:
    """Return the folder of a base; of a hub name, the one in the cache, if it is there."""
    folder = Path(name)
    if name and folder.is_dir():
        return folder
    if not name or find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache  # no torch, but slow to import

    try:
        found = try_to_load_from_cache(name, "config.json")
    except (OSError, ValueError):  # a text that can be no name on the Hub
        return None
    return Path(found).parent if isinstance(found, str) else None
