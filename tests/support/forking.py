"""Processes of ours that are forked from one that has imported what they need.

torch and LiteLLM take seconds of CPU to import, and a test that kills processes starts several. How
a process is started and what it imports, other tests prove. As a program: `forking.py MODULE...`
imports the modules; each line of standard input is a JSON object. `main`, a module, `arguments`,
`environ`, `out` and `constants`: the answer is the pid of a process that runs `main(arguments)` of
it. `poll`, a pid: the answer is how it ended, a negative number for a signal, null while it runs.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


class Forked:
    """A forked process: what is used of a `Popen`."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], pid: int) -> None:
        self._ask = ask
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Fork = Callable[..., Forked]
"""fork(main, *arguments, environ=, out=, constants=): `main` of this module with these arguments;
what it prints goes into the file `out`, else to standard error. constants: MODULE:NAME -> value."""


@contextmanager
def forking(*modules: str) -> Iterator[Fork]:
    """Start a process that has imported these, and yield what forks it."""
    command = [sys.executable, "-P", __file__, *modules]
    paths = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        command,
        # LiteLLM would download a price list.
        env={**os.environ, "PYTHONPATH": paths, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        asking, answers = process.stdin, process.stdout
        assert asking is not None
        assert answers is not None

        def ask(question: dict[str, Any]) -> Any:
            asking.write(json.dumps(question) + "\n")
            asking.flush()
            return json.loads(answers.readline())

        def fork(
            main: str,
            *arguments: str,
            environ: Mapping[str, str] | None = None,
            out: Path | None = None,
            constants: Mapping[str, Any] | None = None,
        ) -> Forked:
            asked = {"main": main, "arguments": arguments, "environ": dict(environ or {})}
            asked["constants"] = dict(constants or {})
            return Forked(ask, ask({**asked, "out": str(out) if out is not None else None}))

        yield fork
        asking.close()


def _fork(
    main: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    out: str | None,
    constants: Mapping[str, Any],
) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            # Standard output is the parent's pipe.
            os.dup2(2 if out is None else os.open(out, os.O_WRONLY | os.O_CREAT), 1)
            os.environ.update(environ)
            for where, value in constants.items():
                module, _, name = where.partition(":")
                setattr(import_module(module), name, value)
            code = import_module(main).main(list(arguments))
            sys.stdout.flush()
        finally:
            os._exit(code)
    return child


def _ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _serve() -> None:
    for name in sys.argv[1:]:
        import_module(name)
    # To search all that for garbage takes a forked process half a second, and copies its memory.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        answer = _ended(asked["poll"]) if "poll" in asked else _fork(**asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
