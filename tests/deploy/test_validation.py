"""Which adapter folders are refused before they are loaded anywhere."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.errors import InvalidAdapterError
from deploy.safetensors_file import first_non_finite, read_tensors
from deploy.validation import ServingLimits, validate_folder
from learner.adapter_folder import folder_digest

LIMITS = ServingLimits(max_rank=8, bases=frozenset({"/models/m", "m"}))
Folder = Callable[..., tuple[Path, str]]


def refusal(folder: Path, digest: str, limits: ServingLimits = LIMITS) -> str:
    with pytest.raises(InvalidAdapterError) as caught:
        validate_folder(folder, digest=digest, limits=limits)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_a_sound_folder_is_taken(adapter_folder: Folder, dtype: str) -> None:
    folder, digest = adapter_folder(dtype=dtype, values=(0.5, -0.0, 3e4, -1e-4))

    validate_folder(folder, digest=digest, limits=LIMITS)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(
    adapter_folder: Folder, dtype: str, bad: float
) -> None:
    folder, digest = adapter_folder(dtype=dtype, values=(*([0.5] * 7), bad))

    assert refusal(folder, digest) == (
        "adapter_model.safetensors: base_model.model.layers.0.q_proj.lora_A.weight holds an "
        "infinity or NaN"
    )


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("BF16", 3.3895e38), ("F16", 65504.0), ("F32", 3.4028e38), ("F64", 1e308)],
)
def test_the_largest_finite_numbers_are_not_taken_for_infinities(
    adapter_folder: Folder, dtype: str, largest: float
) -> None:
    folder, _ = adapter_folder(dtype=dtype, values=(largest, -largest))

    assert first_non_finite(read_tensors(folder / "adapter_model.safetensors")) is None


def test_a_rank_over_the_server_s_is_refused(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder(rank=9)

    assert refusal(folder, digest).startswith("adapter_config.json: rank 9 is not in 1..8")


def test_a_file_of_a_higher_rank_than_its_config_says_is_refused(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder(rank=9, config={"r": 8})

    assert "lora_A.weight has rank 9 over 8" in refusal(folder, digest)


def test_a_rank_pattern_counts(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder(config={"rank_pattern": {"q_proj": 64}})

    assert "rank 64" in refusal(folder, digest)


def test_a_changed_file_is_refused(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder()
    config = folder / "adapter_config.json"
    config.write_text(config.read_text() + " ")

    assert "the folder was changed" in refusal(folder, digest)


@pytest.mark.parametrize("name", ["adapter_model.bin", "optimizer.PT", "state.pkl"])
def test_a_pickle_is_refused(adapter_folder: Folder, name: str) -> None:
    folder, digest = adapter_folder()
    (folder / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")

    assert refusal(folder, digest) == (
        f"{name}: could run code when it is read; weights must be safetensors"
    )


def test_a_link_is_refused(adapter_folder: Folder, tmp_path: Path) -> None:
    folder, digest = adapter_folder()
    (folder / "notes.md").symlink_to(tmp_path)

    assert refusal(folder, digest) == "notes.md: is not a plain file"


def test_card_and_lineage_are_welcome(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder()
    (folder / "README.md").write_text("# card")
    (folder / "lineage.json").write_text("{}")

    validate_folder(folder, digest=digest, limits=LIMITS)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "saved modules"),
        ({"bias": "all"}, "bias is all"),
        ({"r": True}, "rank True"),
        ({"r": "8"}, "rank 8"),
        ({"base_model_name_or_path": "/models/other"}, "was trained on /models/other"),
        ({"base_model_name_or_path": None}, "was trained on None"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    adapter_folder: Folder, config: dict[str, object], words: str
) -> None:
    folder, digest = adapter_folder(config=config)

    assert words in refusal(folder, digest)


def test_without_a_known_base_any_base_is_taken(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder(config={"base_model_name_or_path": "/models/other"})

    validate_folder(folder, digest=digest, limits=ServingLimits(max_rank=8, bases=frozenset()))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone", "00").endswith("is no folder")


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_refused(adapter_folder: Folder, missing: str) -> None:
    folder, digest = adapter_folder()
    (folder / missing).unlink()

    assert missing in refusal(folder, digest)


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


TENSOR = {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no header"),
        (b"PK\x03\x04zipfile!!", "does not fit the file"),
        (raw(b"{nope"), "header is broken"),
        (raw([]), "header is broken"),
        (raw({"a": {"dtype": "BF16"}}), "header is broken"),
        (raw({"x.lora_A.weight": {**TENSOR, "dtype": "I8"}}, b"\0" * 4), "is I8"),
        (raw({"x.lora_A.weight": {**TENSOR, "shape": [1, -2]}}, b"\0" * 4), "broken shape"),
        (raw({"x.lora_A.weight": {**TENSOR, "shape": [1, "2"]}}, b"\0" * 4), "broken shape"),
        (raw({"x.lora_A.weight": TENSOR}, b"\0" * 3), "holds 3 bytes"),
        (raw({"x.lora_A.weight": TENSOR}, b"\0" * 5), "holds 5 bytes"),
        (raw({"x.lora_A.weight": {**TENSOR, "data_offsets": [2, 6]}}, b"\0" * 6), "wrong place"),
        (raw({"x.lora_A.weight": {**TENSOR, "shape": [2, 2]}}, b"\0" * 4), "wrong place"),
        (raw({"lm_head.weight": TENSOR}, b"\0" * 4), "is no LoRA matrix"),
        (raw({}), "holds no LoRA matrices"),
        (raw({"__metadata__": {"format": "pt"}}), "holds no LoRA matrices"),
    ],
)
def test_a_broken_weights_file_is_refused(
    adapter_folder: Folder, content: bytes, words: str
) -> None:
    folder, _ = adapter_folder()
    (folder / "adapter_model.safetensors").write_bytes(content)

    assert words in refusal(folder, folder_digest(folder))


def test_ten_megabytes_are_checked_in_under_a_second(tmp_path: Path) -> None:
    count = 5_000_000
    header = {"x.lora_B.weight": {**TENSOR, "shape": [count, 1], "data_offsets": [0, 2 * count]}}
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(raw(header, struct.pack("<f", 0.5)[2:] * count))

    started = time.perf_counter()
    assert first_non_finite(read_tensors(path)) is None

    assert time.perf_counter() - started < 1.0
