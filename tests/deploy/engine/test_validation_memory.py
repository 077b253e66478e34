"""What a validation costs in memory: never more than 1.2 times the file."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.engine.validation import Registered, ServingLimits, validate_folder
from deploy.errors import InvalidAdapterError
from learner.adapter_folder import WEIGHTS, folder_digest

LIMITS = ServingLimits(max_rank=8, bases=frozenset())
Folder = Callable[..., tuple[Path, str]]
MODULE = "base_model.model.layers.0.q_proj"
SIZE = 64 * 2**20


def peak_bytes(folder: Path, words: str | None = None) -> int:
    """Most bytes that one validation holds; `words`: it must be refused so."""
    registered = Registered(digest=folder_digest(folder))
    tracemalloc.start()
    try:
        if words is None:
            validate_folder(folder, registered, LIMITS)
        else:
            with pytest.raises(InvalidAdapterError, match=words):
                validate_folder(folder, registered, LIMITS)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def write_weights(folder: Path, header: bytes, data: bytes) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range(SIZE // len(data)):
            file.write(data)


def two_matrices(dtype: str, width: int) -> bytes:
    columns, half = SIZE // 2 // 8 // width, SIZE // 2
    a = {"dtype": dtype, "shape": [8, columns], "data_offsets": [0, half]}
    b = {"dtype": dtype, "shape": [columns, 8], "data_offsets": [half, SIZE]}
    return json.dumps({f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b}).encode()


@pytest.mark.parametrize(
    ("dtype", "width", "number"),
    [
        ("BF16", 2, b"\x00\x3f"),
        # All of them the largest numbers there are: each has to be looked at twice.
        ("BF16", 2, b"\x7f\x7f"),
        ("F64", 8, b"\xff" * 6 + b"\xef\x7f"),
    ],
    ids=["usual", "large bf16", "large f64"],
)
def test_weights_of_64_mb_are_validated_within_a_quarter_of_their_size(
    adapter_folder: Folder, dtype: str, width: int, number: bytes
) -> None:
    folder, _ = adapter_folder(rank=8)
    write_weights(folder, two_matrices(dtype, width), number * (2**20 // width))

    peak = peak_bytes(folder)

    assert peak < SIZE / 4


@pytest.mark.parametrize("unit", [b"[],", b'{"ab":0},'])
def test_the_longest_header_that_is_read_costs_less_than_the_file(
    adapter_folder: Folder, unit: bytes
) -> None:
    folder, _ = adapter_folder(rank=8)
    room = SIZE // 64 - 100
    header = b'{"a": [' + unit * (room // len(unit)) + b"0]}"
    write_weights(folder, header, b"\0" * 2**20)

    peak = peak_bytes(folder, "is not described by")

    assert len(header) > 2**20 - 200
    assert peak < 1.2 * SIZE
