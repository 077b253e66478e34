"""A pipe among a base's files is named, and not waited for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from learner.base_weights import base_size, not_plain
from learner.errors import ParentError
from learner.origin import base_digest
from learner.policy.adapter_io import load_policy
from learner.records import Parent
from sidecar.settings import Learner

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_pipe_in_a_base_is_named_in_one_line(tmp_path: Path, tiny_base: Path, name: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    assert not_plain(base) is None
    (base / name).unlink(missing_ok=True)
    os.mkfifo(base / name)

    assert base_size(base) is None
    with pytest.raises(ParentError) as caught:
        load_policy(str(base), Parent(name="base"), Learner(threads=1))

    assert f"{base / name} is not a plain file" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_among_the_weights_has_no_digest(tmp_path: Path, tiny_base: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    os.mkfifo(base / "x.bin")

    with capture_logs() as logs:
        assert base_digest(str(base), tmp_path / "cache.json") is None

    (entry,) = logs
    assert "is not a plain file" in entry["why"]
    assert "x.bin" in entry["why"]


def test_a_link_to_a_file_is_a_file(tmp_path: Path, tiny_base: Path) -> None:
    """As in the cache of the Hugging Face Hub."""
    base = tmp_path / "base"
    base.mkdir()
    for file in tiny_base.iterdir():
        (base / file.name).symlink_to(file)

    assert base_size(base) == base_size(tiny_base) is not None
