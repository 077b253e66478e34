"""The `sidecar` command: what a run of it prints and returns when it fails.

Exit codes: 0 done, 1 failed, 2 bad use, 130 interrupted; `canary wait` and `watch`: 0 promoted,
1 rolled back, 3 inconclusive, 4 not answered, 124 timed out. An error is one line on stderr: what,
why, what to do. The commands are in `deploy.cli.app`.
"""

from __future__ import annotations

import learning_sidecar  # noqa: F401 - first: it decides where the other imports come from

# isort: split
import logging
import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from io import TextIOWrapper
from types import ModuleType
from typing import Any

from sidecar.processes import ends_in_one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns: its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with ends_in_one_line("sidecar"):
            code = _run(arguments)
    except SystemExit as done:  # how the CLI library ends, also after bad use (2)
        code = done.code if isinstance(done.code, int) else 1
    if argv is None:
        _end_now_if_a_check_hangs(code)
    return code


def _end_now_if_a_check_hangs(code: int) -> None:
    """End the process at once when `sidecar doctor` gave up a check that still runs."""
    checks = sys.modules.get("deploy.doctor.collect")
    if checks is not None and checks.are_unfinished():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: Sequence[str]) -> int:
    from deploy.cli.app import help_text, whole_command
    from deploy.cli.output import USAGE_ERROR, note, note_usage, say
    from deploy.errors import DeployError
    from ingest.errors import IngestError
    from sidecar.errors import InvalidKeyError, SettingsError, StateLockError, StoreError

    if any("\ud800" <= character <= "\udfff" for one in arguments for character in one):
        note("an argument is not valid UTF-8; type it again")
        return 2
    if isinstance(sys.stdout, TextIOWrapper):
        # `keys create` prints a key only once: a terminal without its characters must not lose it.
        sys.stdout.reconfigure(errors="backslashreplace")
    if (text := help_text(whole_command(), arguments)) is not None:
        for line in text.split("\n"):
            say(line)
        return 0
    _log_to_stderr()
    try:
        code = whole_command()(args=list(arguments), prog_name="sidecar", standalone_mode=False)
    except USAGE_ERROR as error:
        note_usage(error)
        return 2
    except (SettingsError, InvalidKeyError) as error:
        note(str(error))
        return 2
    except (DeployError, IngestError, StateLockError, StoreError) as error:
        note(str(error))
        return 1
    except OSError as error:  # a disk that is full, read-only or broken, and no permission
        place = "" if error.filename is None else f"{error.filename}: "
        note(f"{place}{error.strerror or error}")
        return 1
    return code if isinstance(code, int) else 0  # a command's `typer.Exit` is returned


def _log_to_stderr() -> None:
    """Send log events to stderr: stdout has what was asked for, which a program may read.

    structlog writes to stdout until it is told otherwise. Most commands load it, which takes 0.1 s
    of CPU; a rollback does not, so it is told when it is loaded. A command that runs a process sets
    its logs up by the settings afterwards (`sidecar.logs`).
    """
    if "structlog" in sys.modules:
        _configure_structlog()
    elif not any(isinstance(one, _StructlogFinder) for one in sys.meta_path):
        sys.meta_path.insert(0, _StructlogFinder())


class _StructlogFinder(MetaPathFinder):
    """Configures structlog as soon as somebody has imported it."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "structlog":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_configure(module: ModuleType) -> None:
            load(module)
            _configure_structlog()

        spec.loader.exec_module = load_and_configure  # type: ignore[method-assign]
        return spec


def _configure_structlog() -> None:
    import structlog

    def shown(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
        from sidecar.visible import visible

        return {
            key: visible(value) if isinstance(value, str) else value for key, value in event.items()
        }

    def lines(*_: object) -> Any:
        from sidecar.logs import Lines  # not before the first event: its own import may go on

        return Lines(stderr)

    stderr = sys.stderr
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            shown,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lines,
    )


if __name__ == "__main__":
    raise SystemExit(main())
