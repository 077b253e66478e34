"""The servers, started once for the folder, and what each client's script saw of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from demo.stack import ENGINE_PYTHON, MODEL, MODEL_FOLDER, ROOT
from tests.clients.comparison import differences
from tests.clients.servers import Servers, running_servers

CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPTS = Path(__file__).with_name("scripts")
OWN_ENVIRONMENT = frozenset({"litellm_chat"})
"""Run by the project's own Python: litellm as the judge has it, and an older `openai` with it."""
ALSO_WITH_CAPTURE_OFF = frozenset({"openai_async", "anthropic_messages"})
"""Between them they have every surface; `test_same_bytes.py` is the strict test of that mode."""
TRIES_MORE = 6
SCRIPT_TIMEOUT_S = 300


@dataclass
class Runner:
    """Runs the scripts, each once for all who ask."""

    servers: Servers
    _seen: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def seen(self, script: str) -> dict[str, dict[str, Any]]:
        """{URL: {step: what came}} for every server that this script is run against."""
        if script not in self._seen:
            self._seen[script] = self.run(script, "all", *self.urls(script))
        return self._seen[script]

    def urls(self, script: str) -> list[str]:
        urls = [self.servers.vllm, self.servers.capture_on]
        return [*urls, self.servers.capture_off] if script in ALSO_WITH_CAPTURE_OFF else urls

    def differing(self, script: str, url: str) -> dict[str, list[str]]:
        """{step: differences} between vLLM and the sidecar at `url`.

        What differs is asked again of both, and forgiven when it is the same then: vLLM itself
        gives other last digits before a prompt is in its cache, and sends two tokens in one event
        when the machine is busy. What the sidecar does wrong, it does again.
        """
        direct, through = self.seen(script)[self.servers.vllm], self.seen(script)[url]
        found = _differing(direct, through)
        for _ in range(TRIES_MORE):
            if not found:
                break
            again = self.run(script, ",".join(found), self.servers.vllm, url)
            found = _differing(again[self.servers.vllm], again[url])
        return found

    def run(self, script: str, steps: str, *urls: str) -> dict[str, dict[str, Any]]:
        """Run a script against these addresses. Raises: AssertionError when it breaks off."""
        python = sys.executable if script in OWN_ENVIRONMENT else str(CLIENTS_PYTHON)
        done = subprocess.run(
            [python, "-W", "ignore", str(SCRIPTS / f"{script}.py"), MODEL, steps, *urls],
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=SCRIPT_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        seen: dict[str, dict[str, Any]] = json.loads(done.stdout)
        return seen


def _differing(direct: dict[str, Any], through: dict[str, Any]) -> dict[str, list[str]]:
    found = {step: differences(came, through.get(step)) for step, came in direct.items()}
    return {step: lines for step, lines in found.items() if lines}


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    for needed in (ENGINE_PYTHON, MODEL_FOLDER / "config.json", CLIENTS_PYTHON):
        if not needed.exists():
            pytest.skip(f"no {needed.relative_to(ROOT)} here: `make test` makes it")
    with running_servers(tmp_path_factory.mktemp("clients")) as running:
        yield running


@pytest.fixture(scope="session")
def runner(servers: Servers) -> Runner:
    return Runner(servers)
