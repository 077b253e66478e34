"""Which adapter folders are refused before they are loaded anywhere."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.engine.validation import Registered, ServingLimits, validate_folder
from deploy.errors import AlteredAdapterError, InvalidAdapterError
from learner.adapter_folder import file_digest, folder_digest

LIMITS = ServingLimits(max_rank=8, bases=frozenset({"/models/m", "m"}))
Folder = Callable[..., tuple[Path, str]]


def refusal(folder: Path, digest: str, limits: ServingLimits = LIMITS) -> str:
    with pytest.raises(InvalidAdapterError) as caught:
        validate_folder(folder, Registered(digest=digest), limits)
    return str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("BF16", 3.3895e38), ("F16", 65504.0), ("F32", 3.4028e38), ("F64", 1e308)],
)
def test_a_sound_folder_is_taken_with_the_largest_finite_numbers(
    adapter_folder: Folder, dtype: str, largest: float
) -> None:
    folder, digest = adapter_folder(dtype=dtype, values=(0.5, -0.0, largest, -largest))
    (folder / "README.md").write_text("# card")

    validate_folder(folder, Registered(digest=digest), LIMITS)


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


def test_a_rank_over_the_server_s_is_refused(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder(rank=9)

    assert refusal(folder, digest).startswith("adapter_config.json: rank 9 is not in 1..8")


def test_a_file_of_a_higher_rank_than_its_config_says_is_refused(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder(rank=9, config={"r": 8})

    assert "lora_A.weight has rank 9 over 8" in refusal(folder, digest)


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


@pytest.mark.parametrize("what", ["adapter_config.json", "adapter_model.safetensors", ""])
def test_a_link_in_the_place_of_the_folder_or_of_what_vllm_reads_is_refused(
    adapter_folder: Folder, tmp_path: Path, what: str
) -> None:
    folder, digest = adapter_folder()
    (folder / what).rename(tmp_path / "moved")
    (folder / what).symlink_to(tmp_path / "moved")

    assert refusal(folder, digest) == (f"{what or folder}: cannot be read (is a symbolic link)")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "README.md"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    adapter_folder: Folder, name: str, make: Callable[[Path], None]
) -> None:
    folder, digest = adapter_folder()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)

    assert name in refusal(folder, digest)


@pytest.mark.parametrize("name", ["tokenizer.json", "new_embeddings.safetensors", ".DS_Store"])
def test_a_file_that_nobody_digested_is_refused(adapter_folder: Folder, name: str) -> None:
    folder, digest = adapter_folder()
    (folder / name).write_bytes(b"{}")

    assert refusal(folder, digest).startswith(f"{name}: does not belong here")


@pytest.mark.parametrize("name", ["README.md", "lineage.json"])
def test_a_document_that_was_changed_is_refused(adapter_folder: Folder, name: str) -> None:
    folder, digest = adapter_folder()
    (folder / name).write_text("as it was")
    registered = Registered(digest=digest, documents={name: file_digest(folder / name)})
    validate_folder(folder, registered, LIMITS)

    (folder / name).write_text("as it is")

    with pytest.raises(AlteredAdapterError, match=f"{name}: was changed"):
        validate_folder(folder, registered, LIMITS)


def test_a_relative_path_is_refused_because_vllm_would_ask_the_hub(
    adapter_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, digest = adapter_folder()
    monkeypatch.chdir(folder.parent)

    assert refusal(Path(folder.name), digest) == "adapter: is no absolute path"


def test_a_sparse_file_of_a_terabyte_is_not_read(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder()
    os.truncate(folder / "adapter_model.safetensors", 2**40)

    assert "has more than 17179869184 bytes" in refusal(folder, digest)


def test_a_long_config_is_not_parsed(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder(config={"notes": "x" * 300_000})

    assert refusal(folder, digest) == "adapter_config.json: has more than 262144 bytes"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *(
            (
                {"exclude_modules": one},
                "exclude_modules excludes layers.0.q_proj, of which adapter_model.safetensors has "
                "matrices; remove exclude_modules if they belong",
            )
            for one in (["q_proj"], ["layers.0.q_proj"], r".*\.q_proj", ".*q_.*|x")
        ),
        *(
            ({"exclude_modules": one}, "adapter_config.json: exclude_modules is ")
            for one in (7, [7], {"q_proj": 1}, "(")
        ),
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"task_type": "SEQ_CLS"}, "task_type is SEQ_CLS, and only CAUSAL_LM can be served"),
        ({"task_type": ["CAUSAL_LM"]}, "task_type is ['CAUSAL_LM'], and only CAUSAL_LM"),
        ({"init_lora_weights": 7}, "init_lora_weights is 7, which is not true, false or an"),
        ({"lora_dropout": "x"}, "lora_dropout is x, which is no number of 0 to 1"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config is {'top_k': 1}, which is no part of"),
        ({"eva_config": {"rho": 2.0}}, "eva_config is {'rho': 2.0}, and init_lora_weights is not"),
        ({"sparse_config": {"top_k": 1}}, "this release does not know what it does"),
        ({"layers_to_transform": [1]}, "layers_to_transform leaves out layers.0.q_proj"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform is ['0'], which is no list"),
        ({"layers_pattern": "layers"}, "and there is no layers_to_transform"),
        ({"layers_to_transform": [0], "layers_pattern": "blocks"}, "layers_to_transform leaves"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "saved modules"),
        ({"bias": "all"}, "bias is all"),
        ({"r": True}, "rank True"),
        ({"r": 2}, "lora_A.weight has rank 4, adapter_config.json says 2"),
        ({"rank_pattern": {"q_proj": 2}}, "lora_A.weight has rank 4, adapter_config.json says 2"),
        ({"rank_pattern": {"q_proj": 64}}, "rank 64"),
        ({"rank_pattern": [4]}, "rank_pattern is not a table"),
        ({"rank_pattern": {"q_proj": True}}, "rank True"),
        ({"rank_pattern": {"(a+)+": 4}}, "rank_pattern names (a+)+; use plain names"),
        ({"rank_pattern": {f"m{n}": 4 for n in range(4_097)}}, "rank_pattern is not a table"),
        ({"alpha_pattern": {"(.*a){20}": 8}}, "alpha_pattern names (.*a){20}; use plain names"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern holds 0"),
        ({"alpha_pattern": {"q_proj": 65_537}}, "alpha_pattern holds 65537"),
        ({"alpha_pattern": "q_proj"}, "alpha_pattern is not a table"),
        ({"lora_alpha": 0}, "lora_alpha holds 0, which is no number over 0 and up to 65536"),
        ({"lora_alpha": True}, "lora_alpha holds True"),
        ({"lora_alpha": "8"}, "lora_alpha holds 8"),
        ({"lora_alpha": 1e300}, "lora_alpha holds 1e+300"),
        ({"lora_alpha": math.nan}, "holds NaN, which is no JSON"),
        ({"lora_alpha": 10**400}, "holds an integer of 401 digits"),
        ({"target_modules": None}, "target_modules is not a list"),
        ({"target_modules": [["q_proj"]]}, "target_modules names ['q_proj']"),
        ({"target_modules": ["(a+)+$"]}, "target_modules names (a+)+$"),
        ({"target_modules": ["k_proj"]}, "layers.0.q_proj is none of"),
        ({"target_modules": ["q_proj", "k_proj"]}, "target_modules names k_proj, of which"),
        ({"use_rslora": "yes"}, "use_rslora is yes, which is not true or false"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa"),
        ({"target_parameters": ["experts"]}, "target_parameters is ['experts'], which is no part"),
        ({"base_model_name_or_path": "/models/other"}, "was trained on /models/other"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    adapter_folder: Folder, config: dict[str, object], words: str
) -> None:
    folder, digest = adapter_folder(config=config)

    assert words in refusal(folder, digest)


@pytest.mark.parametrize(
    "config",
    [
        *({"exclude_modules": one} for one in (None, [], "", ["proj"], ["lm_head"])),
        *({"exclude_modules": one} for one in ("q_proj", "layers", r".*vision.*")),
        # These may take long to match, and are not looked at.
        *({"exclude_modules": one} for one in ("(a+)+b", "(.*q)*_proj", "a*" * 5, "x" * 600)),
        {"rank_pattern": {"q_proj": 4}, "r": 8},
        {"rank_pattern": {"v_proj": 2, "layers.0.q_proj": 4}, "r": 8},
        {"rank_pattern": None, "alpha_pattern": None},
        {"alpha_pattern": {"q_proj": 16.5}},
        {"lora_alpha": 16.5, "use_rslora": True},
        {"init_lora_weights": "Gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}},
        {"task_type": None, "arrow_config": None, "use_bdlora": None, "loftq_config": {}},
        {"layers_to_transform": [0, 2], "layers_pattern": None},
        {"layers_to_transform": 0, "layers_pattern": ["blocks", "layers"]},
        {"layers_to_transform": None, "layers_pattern": None},
        {"of_a_later_peft": None, "another": False, "more": [], "size": 16, "how": "fast"},
        {"target_modules": ["layers.0.q_proj", "q_proj"]},
        {"base_model_name_or_path": "/models/m/"},
    ],
)
def test_a_config_that_can_be_served_is_taken(
    adapter_folder: Folder, config: dict[str, object]
) -> None:
    folder, digest = adapter_folder(config=config)

    validate_folder(folder, Registered(digest=digest), LIMITS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no JSON"),
        (b"\xff{}", "is not UTF-8 at byte 0"),
        (b'{"r": 4, "r": 4}', "has a duplicate key in one object"),
        (b'{"r": 1e999}', "holds the number 1e999, which is too large"),
        (rb'{"a": ["\ud800"]}', "holds a lone surrogate"),
        (b"[" * 17 + b"]" * 17, "is nested deeper than 16 levels"),
        (b'{"a":' * 200_000, "is nested deeper than 16 levels"),
    ],
)
def test_a_config_that_two_readers_could_read_differently_is_refused(
    adapter_folder: Folder, content: bytes, words: str
) -> None:
    folder, _ = adapter_folder()
    (folder / "adapter_config.json").write_bytes(content[:200_000])

    assert words in refusal(folder, folder_digest(folder))


def test_without_a_known_base_any_base_is_taken(adapter_folder: Folder) -> None:
    folder, digest = adapter_folder(config={"base_model_name_or_path": "/models/other"})

    validate_folder(folder, Registered(digest=digest), ServingLimits(max_rank=8, bases=frozenset()))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone", "00") == (
        f"{tmp_path / 'gone'}: cannot be read (No such file or directory)"
    )


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


A = "base_model.model.layers.0.q_proj.lora_A.weight"
TENSOR = {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no header"),
        (b"PK\x03\x04zipfile!!", "does not fit the file"),
        (raw(b"{nope"), "header is no JSON"),
        (raw([]), "header is no JSON object"),
        (raw({"a": {"dtype": "BF16"}}), "is not described by"),
        (raw({"x.lora_A.weight": {**TENSOR, "dtype": "I8"}}, b"\0" * 4), "is I8"),
        (raw({"x.lora_A.weight": {**TENSOR, "shape": [1, -2]}}, b"\0" * 4), "broken shape"),
        (raw({"x.lora_A.weight": TENSOR}, b"\0" * 5), "holds 5 bytes"),
        (raw({"x.lora_A.weight": {**TENSOR, "data_offsets": [2, 6]}}, b"\0" * 6), "wrong place"),
        (raw({"x.lora_A.weight": {**TENSOR, "shape": [2, 2]}}, b"\0" * 4), "wrong place"),
        (raw({"lm_head.weight": TENSOR}, b"\0" * 4), "is no LoRA matrix"),
        (raw({"q.lora_A.weight": TENSOR}, b"\0" * 4), "is no LoRA matrix"),
        (raw({f"{A}": {**TENSOR, "shape": [2]}}, b"\0" * 4), "its shape is (2,)"),
        (raw({f"{A}": {**TENSOR, "shape": [0, 2], "data_offsets": [0, 0]}}), "its shape is"),
        (raw({f"{A}": TENSOR}, b"\0" * 4), "layers.0.q_proj has lora_A alone, not both"),
        (raw({f"base_model.model.{A}": TENSOR}, b"\0" * 4), "is no LoRA matrix"),
        (raw({"a": {**TENSOR, "more": 1}}, b"\0" * 4), "is not described by"),
        (raw({"a": {**TENSOR, "dtype": {}}}, b"\0" * 4), "is {}; a LoRA weight is one of"),
        (raw({"a": {**TENSOR, "shape": "12"}}, b"\0" * 4), "broken shape"),
        (raw({"a": {**TENSOR, "shape": [True, 2]}}, b"\0" * 4), "broken shape"),
        (raw({"a": {**TENSOR, "data_offsets": [0]}}, b"\0" * 4), "broken shape"),
        (raw({"a": TENSOR, "b": TENSOR}, b"\0" * 4), "b lies at a wrong place"),
        (raw(b'{"a": {}, "a": {}}'), "has a duplicate key in one object"),
        (raw({"__metadata__": {"format": 1}}), "__metadata__ is not a table of texts"),
        (raw(b" " * 300_000), "header of 300000 bytes is over 262144"),
        (struct.pack("<Q", 2**64 - 1), "does not fit the file"),
        (raw({}), "holds no LoRA matrices"),
    ],
)
def test_a_broken_weights_file_is_refused(
    adapter_folder: Folder, content: bytes, words: str
) -> None:
    folder, _ = adapter_folder()
    (folder / "adapter_model.safetensors").write_bytes(content)

    assert words in refusal(folder, folder_digest(folder))
