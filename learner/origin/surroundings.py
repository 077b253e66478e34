"""What a run computes with: libraries, the learner's own code, and the machine."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("learning-sidecar", "torch", "transformers", "peft", "safetensors", "numpy")
GIT_S = 5.0
"""A git that takes longer is not waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The learner's own code; both None where it is not known: a wheel names no commit."""

    commit: str | None
    dirty: bool | None
    """True when files were changed after that commit."""


def library_versions() -> dict[str, str]:
    """Return the versions of what computes, and of Python; "" for what is not installed."""
    found = {name: _version(name) for name in LIBRARIES}
    return {**found, "python": platform.python_version()}


def machine() -> dict[str, Any]:
    """Describe the machine, without what only its owner may know (no names, no addresses)."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
    }


@cache
def code_version() -> Code:
    """Return the commit of the learner's code, from pip's record or from the clone it lies in."""
    recorded = _recorded_commit()
    if recorded is not None:
        return Code(commit=recorded, dirty=False)
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return Code(commit=None, dirty=None)
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return Code(commit=commit or None, dirty=None if changed is None else bool(changed))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _recorded_commit() -> str | None:
    """Return the commit that pip installed from a repository; None when it did not."""
    try:
        text = Distribution.from_name(LIBRARIES[0]).read_text("direct_url.json")
        found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (PackageNotFoundError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except (OSError, ValueError):
            return platform.processor()
    return platform.processor()
