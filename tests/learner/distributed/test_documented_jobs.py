"""The jobs that the pages show: bash, YAML, and arguments that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from torch.distributed.run import get_args_parser

from learner.__main__ import parser

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "several-processes.md"
KUBERNETES = ROOT / "docs" / "kubernetes.md"
VALUES = ROOT / "install" / "helm" / "learning-sidecar" / "values.yaml"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def require_true(command: list[str]) -> Any:
    """Parse a command as torchrun and the learner do. Returns: torchrun's arguments."""
    assert command[0] == "torchrun"
    found = get_args_parser().parse_args(command[1:])
    assert found.module
    assert found.training_script == "learner"
    given = parser().parse_args(found.training_script_args)
    assert given.once
    assert given.config is not None
    return found


def test_the_command_by_hand_is_true() -> None:
    (line,) = re.findall(r"^    (torchrun .*)$", PAGE.read_text(), flags=re.MULTILINE)

    assert require_true(shlex.split(line)).nproc_per_node == "2"


def test_the_slurm_script_is_bash_and_starts_a_run() -> None:
    (script,) = blocks(PAGE, "bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
    line = re.search(
        r'^srun --cpus-per-task "\$SLURM_CPUS_PER_TASK" (torchrun .*)',
        script.replace("\\\n", " "),
        flags=re.MULTILINE,
    )
    assert line is not None
    values = {"$SLURM_NNODES": "2", "$SLURM_JOB_ID": "7", "$first:29500": "node1:29500"}
    words = [values.get(word, word) for word in shlex.split(line[1])]

    found = require_true(words)

    assert (found.nnodes, found.nproc_per_node, found.rdzv_endpoint) == ("2", "4", "node1:29500")
    gpus = re.search(r"--gpus-per-node=(\d+)", script)
    assert gpus is not None
    assert gpus[1] == found.nproc_per_node


def test_the_values_of_the_chart_have_a_process_for_each_card() -> None:
    """What the chart makes of them: tests/install/test_chart.py."""
    (text,) = blocks(KUBERNETES, "yaml")
    learn = yaml.safe_load(text)["learn"]
    chart = yaml.safe_load(VALUES.read_text())

    assert learn["processes"] == learn["resources"]["limits"]["nvidia.com/gpu"] > 1
    assert set(learn) <= set(chart["learn"])
