"""A command in this process, and the settings that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.main import main


class Command:
    """`sidecar ...` with the settings of a file, and what it printed last."""

    def __init__(self, config: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        self._begin = ("--config", str(config), *words)
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        code = main([*self._begin, *arguments])
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *arguments: str) -> Any:
        assert self(*arguments, "-o", "json") == 0, self.err
        return json.loads(self.out)

    def said(self, *arguments: str) -> tuple[int, str, str]:
        """Returns: exit status, output, errors."""
        return self(*arguments), self.out, self.err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Settings with a store that does not exist, and an admin API where nobody listens."""
    path = tmp_path / "sidecar.toml"
    path.write_text(
        f'[store]\nurl = "sqlite:///{tmp_path}/store.db"\n[admin]\nport = 9\n'
        '[serving]\nmodel = "m"\n'
    )
    return path


@pytest.fixture
def sidecar(config: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(config, capsys)
