"""Programs that check install/: those of `.venv-install`, which `tests/install/setup` makes, else
those on the PATH."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".venv-install" / "bin"
MADE = ROOT / ".venv-install" / ".made"
"""Written when all packages are installed."""
COMPOSE = ROOT / "install" / "compose"
SECRETS = ("POSTGRES_PASSWORD", "ADMIN_TOKEN_SHA256", "VLLM_API_KEY", "OPENAI_API_KEY", "MODELS")
"""What compose.yaml wants to be told."""
CONFIG = """
import json, os, subprocess, sys, yaml

os.environ.update(json.loads(sys.argv[2]))
command = [sys.executable, "-m", "podman_compose", "--dry-run", "-f", sys.argv[1], "config"]
done = subprocess.run(command, capture_output=True, text=True)
made = yaml.safe_load(done.stdout)
print(json.dumps({"code": done.returncode, "said": done.stderr, "made": made}))
"""


def tool(name: str, how: str = "tests/install/setup") -> str:
    """The program's path; the test is skipped, and says how to get it, where it is missing."""
    found = (MADE.exists() and shutil.which(name, path=str(OWN))) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: {how}")
    return found


def own_python() -> Path:
    """The interpreter of `.venv-install`; the test is skipped where that is missing."""
    if not MADE.exists():
        pytest.skip("no .venv-install: tests/install/setup")
    return OWN / "python"


def output(*command: str | Path, stdin: str = "") -> tuple[int, str]:
    """Exit code, and what it printed on both streams."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        input=stdin,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout


def compose_config(**environment: str) -> dict[str, Any]:
    """compose.yaml as podman-compose reads it: `code`, `said` and `made`. Any: YAML."""
    command = (own_python(), "-c", CONFIG, COMPOSE / "compose.yaml", json.dumps(environment))
    code, said = output(*command)
    assert code == 0, said
    answer: dict[str, Any] = json.loads(said)
    return answer
