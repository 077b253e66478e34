"""The moments beside an adapter: what is written is read again, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch.nn import Parameter

from learner.adapter_folder import LINEAGE, OPTIMIZER, file_digest
from learner.errors import CheckpointError
from learner.grpo.checkpoint import HEAD, load_state, parents_state, save_state
from learner.grpo.optimizer import OptimizerState
from learner.records import Parent


@pytest.fixture
def parameters() -> dict[str, Parameter]:
    return {"a": Parameter(torch.zeros(2, 3)), "b": Parameter(torch.zeros(4))}


@pytest.fixture
def state(parameters: dict[str, Parameter]) -> OptimizerState:
    return OptimizerState(
        steps=7,
        second={name: torch.rand(p.shape) for name, p in parameters.items()},
    )


def test_what_is_written_is_read_bit_for_bit(
    tmp_path: Path, parameters: dict[str, Parameter], state: OptimizerState
) -> None:
    save_state(state, tmp_path)
    found = load_state(tmp_path, parameters)
    assert found is not None
    assert (found.steps, found.run_steps) == (7, 0)
    for name in parameters:
        assert torch.equal(found.second[name], state.second[name])


def test_the_same_moments_are_the_same_bytes(tmp_path: Path, state: OptimizerState) -> None:
    """safetensors orders the entries of its metadata by chance, each time anew."""
    found = set()
    for _ in range(32):
        save_state(state, tmp_path)
        found.add((tmp_path / OPTIMIZER).read_bytes())
    assert len(found) == 1


@pytest.mark.parametrize(
    "metadata", [{"format": "1", "steps": "7"}, {HEAD: '{"format": 2, "steps": 7}'}]
)
def test_a_file_of_an_older_format_is_read_without_its_first_moment(
    tmp_path: Path,
    parameters: dict[str, Parameter],
    state: OptimizerState,
    metadata: dict[str, str],
) -> None:
    save_state(state, tmp_path)
    tensors = load_file(tmp_path / OPTIMIZER)
    tensors |= {f"first.{name}": torch.ones(p.shape) for name, p in parameters.items()}
    save_file(tensors, tmp_path / OPTIMIZER, metadata=metadata)

    found = load_state(tmp_path, parameters)

    assert found is not None
    assert (found.steps, found.run_steps, found.first) == (7, 0, {})
    assert torch.equal(found.second["a"], state.second["a"])


def test_a_folder_without_them_starts_from_nothing(
    tmp_path: Path, parameters: dict[str, Parameter]
) -> None:
    assert load_state(tmp_path, parameters) is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("cut", "cannot be read"),
        ("empty", "cannot be read"),
        ("text", "cannot be read"),
        ("missing", "belongs to other matrices"),
        ("foreign", "belongs to other matrices"),
        ("shape", "shape"),
        ("nan", "infinity or NaN"),
        ("negative", "below 0"),
        ("steps", "cannot be read"),
        ("format", "has format"),
        ("old format", "has format"),
        ("head", "cannot be read"),
    ],
)
def test_damage_is_named(
    tmp_path: Path,
    parameters: dict[str, Parameter],
    state: OptimizerState,
    damage: str,
    words: str,
) -> None:
    save_state(state, tmp_path)
    path = tmp_path / OPTIMIZER
    tensors, metadata = load_file(path), {HEAD: '{"format": 3, "steps": 7}'}
    if damage == "missing":
        del tensors["second.a"]
    elif damage == "foreign":
        tensors["second.c"] = torch.zeros(1)
    elif damage == "shape":
        tensors["second.a"] = torch.zeros(3, 2)
    elif damage == "nan":
        tensors["second.a"][0, 0] = torch.nan
    elif damage == "negative":
        tensors["second.b"][0] = -1.0
    elif damage == "steps":
        metadata[HEAD] = '{"format": 3, "steps": [7]}'
    elif damage == "format":
        metadata[HEAD] = '{"format": 4, "steps": 7}'
    elif damage == "old format":
        metadata = {"format": "0", "steps": "7"}
    elif damage == "head":
        metadata[HEAD] = "[" * 100_000
    save_file(tensors, path, metadata=metadata)
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-5])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_bytes(b"<html>" * 50)

    with pytest.raises(CheckpointError, match=words):
        load_state(tmp_path, parameters)


@pytest.mark.parametrize(
    ("lineage", "words"),
    [
        ('{"algorithm": {"optimizer_sha256": "%s"}}', ""),
        ('{"algorithm": {}}', ""),
        ("{}", ""),
        (None, ""),
        ('{"algorithm": {"optimizer_sha256": "00%s"}}', "was changed after it was saved"),
        ('{"algorithm": {"optimizer_sha256": 7}}', "was changed after it was saved"),
        ('{"algorithm": 7}', "cannot be read"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_moments_that_are_not_those_of_the_lineage_are_not_used(
    tmp_path: Path,
    state: OptimizerState,
    parameters: dict[str, Parameter],
    lineage: str | None,
    words: str,
) -> None:
    """One changed number is as large as it likes. Where no digest is known, none is compared."""
    save_state(state, tmp_path)
    if lineage is not None:
        digest = file_digest(tmp_path / OPTIMIZER)
        (tmp_path / LINEAGE).write_text(lineage.replace("%s", digest))

    with capture_logs() as logs:
        found = parents_state(Parent(name="p", path=tmp_path), parameters)

    assert (found is None) == bool(words)
    assert [words in one["error"] for one in logs] == [True] * bool(words)
    assert all(one["event"] == "optimizer_state_unusable" for one in logs)
