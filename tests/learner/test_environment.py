"""Faults of the machine, the base, the parent and the settings: one line, exit code 1, groups back.

Each runs the real trainer as `python -m learner --once` does, on a real folder or device.
"""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sqlalchemy import select

from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest
from learner.errors import ParentError
from learner.explain import explain
from learner.once import run_once
from learner.policy import self_test
from learner.policy.adapter_io import load_policy, save_adapter
from learner.records import Parent
from sidecar.settings import Learner, Settings
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AliasRow, GroupRow, RunRow
from support.clock import Clock


@pytest.fixture
def line(
    database: Database, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> Callable[[Settings], str]:
    """line(settings): the one line on stderr of a run that fails and gives its groups back."""

    def start(settings: Settings) -> str:
        capsys.readouterr()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            stopping = threading.Event()
            code = run_once(settings, database, run_id="r1", clock=clock, stopping=stopping)
            assert code == 1
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        (said,) = [
            one for one in capsys.readouterr().err.splitlines() if one.startswith("learner: ")
        ]
        with database.read() as session:
            assert session.get_one(RunRow, "r1").status == "failed"
            groups = session.scalars(select(GroupRow)).all()
        assert [(row.status, row.learn_attempts) for row in groups] == [("scored", 0)] * 2
        return said

    return start


def with_learner(settings: Settings, **changes: Any) -> Settings:
    learner = settings.learner.model_copy(update=changes)
    return settings.model_copy(update={"learner": learner})


def with_base(settings: Settings, path: Path) -> Settings:
    serving = settings.serving.model_copy(update={"base_model_path": str(path)})
    return settings.model_copy(update={"serving": serving})


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("device", ["cudaa", "cuda:99", "meta"])
def test_a_device_that_cannot_compute_is_one_line(
    settings: Settings, line: Callable[[Settings], str], device: str
) -> None:
    said = line(with_learner(settings, device=device))

    assert f"learner.device = {device!r} cannot be used" in said
    assert "set it to cpu" in said


@pytest.fixture
def copy_of_base(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("method", ["awq", ""])
def test_a_quantised_base_is_refused_by_its_name(
    settings: Settings, line: Callable[[Settings], str], copy_of_base: Path, method: str
) -> None:
    config = json.loads((copy_of_base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (copy_of_base / "config.json").write_text(json.dumps(config))

    said = line(with_base(settings, copy_of_base))

    assert f"is quantised ({method or 'no method named'}); the learner needs plain weights" in said
    assert "serving.base_model_path" in said


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize(
    "config",
    ["[]", "{", '{"model_type": "mystery"}'],
)
def test_a_base_whose_config_is_nonsense_is_one_line(
    settings: Settings, line: Callable[[Settings], str], copy_of_base: Path, config: str
) -> None:
    (copy_of_base / "config.json").write_text(config)

    assert f"base {copy_of_base} cannot be loaded: " in line(with_base(settings, copy_of_base))


def cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-100])


def spoil(weights: Path) -> None:
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] = math.nan
    save_file(tensors, weights, metadata={"format": "pt"})


def widen(weights: Path) -> None:
    tensors = load_file(weights)
    name = min(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: torch.zeros(7, 99)}, weights, metadata={"format": "pt"})


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "cannot be loaded: .*; copy or download the files of serving.base_model_path again"),
        (spoil, "its weight .* holds an infinity or NaN; copy or download its files again"),
        (lambda weights: shutil.rmtree(weights.parent), ".*there is no such folder; set serving"),
    ],
)
def test_a_damaged_base_is_one_line_with_what_to_do(
    settings: Settings,
    line: Callable[[Settings], str],
    copy_of_base: Path,
    damage: Callable[[Path], object],
    words: str,
) -> None:
    damage(copy_of_base / "model.safetensors")

    assert re.search(f"base {copy_of_base}.*{words}", line(with_base(settings, copy_of_base)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "parent p cannot be loaded: .*; restore the folder from a backup, or roll back"),
        (spoil, "parent p cannot be loaded: .* holds an infinity or NaN; restore the folder"),
        (widen, r"has the shape \[7, 99\]; its config and the base ask for \[4, \d+\]; restore"),
    ],
)
def test_a_damaged_parent_is_one_line_with_what_to_do(
    tiny_base: Path,
    tmp_path: Path,
    learner_settings: Learner,
    damage: Callable[[Path], None],
    words: str,
) -> None:
    save_adapter(load_policy(str(tiny_base), Parent(name="base"), learner_settings), tmp_path)
    damage(tmp_path / WEIGHTS)

    with pytest.raises(ParentError, match=words):
        load_policy(str(tiny_base), Parent(name="p", path=tmp_path), learner_settings)


@pytest.mark.parametrize("precision", ["float32", "auto"])
def test_a_parent_with_enormous_weights_is_blamed_itself(
    tiny_base: Path, tmp_path: Path, learner_settings: Learner, precision: str
) -> None:
    settings = learner_settings.model_copy(update={"precision": precision})
    save_adapter(load_policy(str(tiny_base), Parent(name="base"), settings), tmp_path)
    tensors = {
        name: torch.full_like(one, 1e36) for name, one in load_file(tmp_path / WEIGHTS).items()
    }
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})

    with pytest.raises(ParentError, match=r"^parent p: .* so large .*`sidecar rollback") as caught:
        load_policy(str(tiny_base), Parent(name="p", path=tmp_path), settings)

    assert "learner.precision" not in str(caught.value)


@pytest.mark.parametrize(("precision", "advised"), [("float32", False), ("bfloat16", True)])
def test_a_base_that_overflows_is_not_told_to_set_what_is_set(
    tiny_base: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    advised: bool,
) -> None:
    settings = learner_settings.model_copy(update={"precision": precision})
    monkeypatch.setattr(self_test, "_own_logprobs", lambda *_: torch.tensor([math.inf]))

    with pytest.raises(ParentError, match=r"^base .*: no weight, but its own forward") as caught:
        load_policy(str(tiny_base), Parent(name="base"), settings)

    assert ("set learner.precision" in str(caught.value)) is advised


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ("[]", b""),
        ("[" * 5_000, b""),
        ('{"peft_type": "LORA", "target_modules": {"a": 1}, "r": "x"}', b""),
        ('{"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4}', b"\xff" * 64),
    ],
)
def test_a_parent_whose_folder_is_nonsense_is_one_line(
    settings: Settings,
    line: Callable[[Settings], str],
    database: Database,
    tmp_path: Path,
    config: str,
    weights: bytes,
) -> None:
    folder = tmp_path / "parent"
    folder.mkdir()
    (folder / CONFIG).write_text(config)
    (folder / WEIGHTS).write_bytes(weights)
    with database.write() as session:
        session.add(
            AdapterRow(
                name="m--v1-x",
                model="m",
                version=1,
                digest=folder_digest(folder),
                path=str(folder),
                parent="base",
                state="champion",
                created_at=1.0,
            )
        )
        session.add(AliasRow(model="m", alias="champion", adapter="m--v1-x", generation=1))

    assert "parent m--v1-x" in line(settings)


@pytest.mark.usefixtures("two_groups")
def test_an_adapters_folder_that_is_a_file_is_one_line(
    settings: Settings, line: Callable[[Settings], str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    said = line(with_learner(settings, adapters_dir=tmp_path / "file"))

    assert str(tmp_path / "file") in said
    assert "check that learner.adapters_dir is a folder" in said


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ("/a cannot", "free space")),
        (OSError(errno.EACCES, "Permission denied", "/b"), ("/b cannot", "right to write")),
        (MemoryError(), ("out of memory", "learner.pack_tokens")),
        (ZeroDivisionError("x\ny" * 9_999), ("unexpected ZeroDivisionError: x y", "report it")),
    ],
)
def test_every_error_says_what_why_and_what_to_do(error: Exception, parts: tuple[str, ...]) -> None:
    said = explain(error, adapters_dir=Path("/a"))

    assert "\n" not in said
    assert len(said) < 800
    for part in parts:
        assert part in said
