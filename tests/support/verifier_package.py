"""An installed package with an entry point for verifiers, as a child process sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingest.verifiers.records import ENTRY_POINTS


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, **entry_points: str) -> None:
    """Put a module `shop_checks` with this code where Python finds it.

    entry_points: name -> attribute of the module.
    """
    (folder / "shop_checks.py").write_text(code)
    info = folder / "shop_checks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-checks\nVersion: 1.0\n")
    lines = [f"{name} = shop_checks:{attribute}" for name, attribute in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINTS}]", *lines, ""]))
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{before}")
