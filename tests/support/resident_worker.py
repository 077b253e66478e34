"""`python -m learner --worker` in a forked process (`support.forking`).

Arguments: the path of the socket to its schedule; the number of the optimiser step, of
all runs, before whose end the process kills itself, 0 for none; the arguments of the learner. What
it prints at its end is torch's global state, before its first run and after its last.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import learner.__main__
import learner.grpo.trainer
import learner.progress.export


def state() -> dict[str, Any]:
    """Return what a run could leave behind for the next one in torch itself."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomalies": torch.is_anomaly_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
    }


def draw_nothing(steps: Sequence[Any], path: Any, *, title: str) -> None:
    """In place of the curves, which take longer than the run of a tiny model."""
    path.write_bytes(title.encode())


def killing(number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which kills the process when it is called for this time."""
    calls = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    return counted


def main(arguments: list[str]) -> int:
    path, kill_at, *of_learner = arguments
    control = socket.socket(socket.AF_UNIX)
    control.connect(path)
    learner.progress.export.draw = draw_nothing
    trainer: Any = learner.grpo.trainer
    trainer.step_metrics = killing(int(kill_at), trainer.step_metrics)
    torch.set_num_threads(1)
    before = state()
    try:
        return learner.__main__.main(["--worker", str(control.detach()), *of_learner])
    except SystemExit as end:  # whoever forked this process does not know it
        return int(str(end.code))
    finally:
        sys.stdout.write(json.dumps([before, state()]) + "\n")
        sys.stdout.flush()
