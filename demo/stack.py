"""Start the whole product as its user would, in a folder of its own, and stop it again.

The demo and the end-to-end test share this: a configuration file, the stand-in judge when no real
one is named, and `sidecar up`, which starts vLLM and the sidecar's five processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from demo.ports import free_port
from deploy.supervise import status_of
from sidecar.parent_death import guarded_command
from sidecar.processes import own_python

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
MODEL_FOLDER = ROOT / ".models" / MODEL
ENGINE_SITE = Path(__file__).with_name("engine_site")
"""Python imports its `sitecustomize.py` at the start of each of vLLM's processes."""
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Linux's names, on x86 and on Arm, of the instructions that multiply bfloat16."""
STAND_IN = "stand-in-judge"
READY_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 80.0


class StackError(RuntimeError):
    """The product did not come up; the message says what to look at."""


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the parts listen."""

    engine: int
    proxy: int
    admin: int
    judge: int | None
    """Port of the stand-in judge; None when a real judge is configured."""

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.engine}"

    @property
    def proxy_url(self) -> str:
        return f"http://127.0.0.1:{self.proxy}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin}"


def choose_addresses() -> Addresses:
    """The documented ports where they are free, others where they are not."""
    judge = None if os.environ.get("SIDECAR_JUDGE__MODEL") else free_port(8090)
    return Addresses(
        engine=free_port(8000), proxy=free_port(8080), admin=free_port(8081), judge=judge
    )


def engine_dtype(cpu_description: Path) -> str:
    """bfloat16 where the processor multiplies it, float32 where the CPU build of vLLM would only
    emulate it: there bfloat16 gives 16 tokens/s to 18 requests at once, float32 71 (docs/log.md).

    `learner.policy.logprobs.wants_autocast` decides the same for the learner. It asks torch, which
    takes seconds to load and which whoever starts an engine does not need.
    """
    try:
        words = set(cpu_description.read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if words & BFLOAT16_FLAGS else "float32"


def engine_section(port: int, *, lora: bool = True) -> dict[str, Any]:
    """How to start the CPU build of vLLM.

    lora: with run-time LoRA loading. It costs the base's own requests too: their tokens pass
        through the adapters' products as well.
    """
    # Measured with 24 requests at once (docs/log.md): the CPU build gathers LoRA weights per token,
    # so rank 8 instead of 16, and blocks that can cache our short prompts, are 3 times as fast.
    flags = {
        "--model": MODEL_FOLDER,
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": port,
        "--block-size": 32,
        "--max-model-len": 2048,
        "--max-num-seqs": 32,
        "--dtype": engine_dtype(Path("/proc/cpuinfo")),
        "--logprobs-mode": "processed_logprobs",
        "--tool-call-parser": "hermes",
    }
    switches = ["--enforce-eager", "--enable-auto-tool-choice"]
    if lora:
        # More places than adapters in one life of the engine: its CPU build applies the adapter in
        # the last place to requests for the base, so that place must stay empty (docs/log.md).
        switches.append("--enable-lora")
        flags |= {"--max-loras": 16, "--max-cpu-loras": 16, "--max-lora-rank": 8}
    command = [str(ENGINE_PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in flags.items():
        command += [flag, str(value)]
    command += switches
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # By itself each engine binds its threads to the first cores, the same ones in all engines:
        # three of them, as the tests start, then share one core of two (docs/log.md).
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # of the worker, by the engine core (`engine_site`)
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ENGINE_SITE),
    }
    return {"command": command, "env": env}


def configuration(
    folder: Path, addresses: Addresses, overrides: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The sections of `sidecar.toml`: addresses and folders, then the caller's own settings."""
    sections: dict[str, dict[str, Any]] = {
        "serving": {
            "upstreams": [addresses.engine_url],
            "model": MODEL,
            "base_model_path": str(MODEL_FOLDER),
            "max_lora_rank": 8,
        },
        "engine": engine_section(addresses.engine),
        "proxy": {"port": addresses.proxy},
        "admin": {"port": addresses.admin},
        "bus": {"url": f"sqlite:///{folder}/outbox.db"},
        "store": {"url": f"sqlite:///{folder}/store.db"},
        "learner": {"adapters_dir": str(folder / "adapters")},
        "telemetry": {"spans_file": str(folder / "spans.jsonl")},
    }
    if addresses.judge is not None:
        sections["judge"] = {
            "model": f"openai/{STAND_IN}",
            "api_base": f"http://127.0.0.1:{addresses.judge}/v1",
        }
    for name, values in overrides.items():
        sections.setdefault(name, {}).update(values)
    return sections


def to_toml(state_dir: Path, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Render the sections. JSON strings, numbers and lists are TOML as they stand."""
    lines = [f"state_dir = {json.dumps(str(state_dir))}"]
    tables = []
    for name, values in sections.items():
        lines += ["", f"[{name}]"]
        for key, value in values.items():
            if isinstance(value, Mapping):
                tables.append((f"{name}.{key}", value))
            else:
                lines.append(f"{key} = {json.dumps(value)}")
    for name, values in tables:
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items())]
    return "\n".join(lines) + "\n"


@dataclass(kw_only=True)
class Stack:
    """The running product: `with Stack(...) as stack:` starts it and stops what it started."""

    folder: Path
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    addresses: Addresses = field(default_factory=choose_addresses)
    up: subprocess.Popen[bytes] | None = None
    judge: subprocess.Popen[bytes] | None = None
    _logs: list[IO[bytes]] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.folder / "sidecar.toml"

    @property
    def judge_label(self) -> str:
        """How the judge is named in every report."""
        if self.addresses.judge is not None:
            return "stand-in"
        return os.environ["SIDECAR_JUDGE__MODEL"]

    def __enter__(self) -> Stack:
        self.folder.mkdir(parents=True, exist_ok=True)
        sections = configuration(self.folder, self.addresses, self.overrides)
        self.config.write_text(to_toml(self.folder, sections), encoding="utf-8")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def command(self, *arguments: str) -> list[str]:
        """`sidecar ...` against this stack's configuration."""
        return [*own_python("deploy.cli.main", "--config", str(self.config)), *arguments]

    def environment(self) -> dict[str, str]:
        """The environment of the product: a key for the stand-in judge, which asks for none."""
        env = dict(os.environ)
        if self.addresses.judge is not None:
            env["SIDECAR_JUDGE__API_KEY"] = "stand-in-needs-no-key"
        return env

    def _start(self) -> None:
        if self.addresses.judge is not None:
            self.judge = self._spawn(
                "judge",
                # Of this folder, which is not installed as the product is.
                [sys.executable, "-m", "demo.stand_in_judge", "--port", str(self.addresses.judge)],
            )
        self.up = self._spawn("up", self.command("up"))
        self._wait_until_ready()

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        log_file = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log_file)
        return subprocess.Popen(
            [*guarded_command(), *command],  # it ends with us, also when we are killed
            cwd=ROOT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait_until_ready(self) -> None:
        assert self.up is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        waiting = [f"{self.addresses.proxy_url}/readyz", f"{self.addresses.admin_url}/readyz"]
        if self.addresses.judge is not None:
            waiting.append(f"http://127.0.0.1:{self.addresses.judge}/v1/models")
        while waiting:
            if self.up.poll() is not None:
                raise StackError(f"`sidecar up` ended with {self.up.returncode}: see {self.folder}")
            if time.monotonic() > deadline:
                raise StackError(f"{waiting[0]} was not ready in time: see {self.folder}/logs")
            if status_of(waiting[0]) == 200:
                waiting.pop(0)
            else:
                time.sleep(0.3)

    def stop(self) -> None:
        """Stop what was started here, by process id, and nothing else."""
        for process in (self.up, self.judge):
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log_file in self._logs:
            log_file.close()
        self._logs.clear()
