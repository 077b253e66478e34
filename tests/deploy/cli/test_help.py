"""`--help` and `--version` of every command: what they load, and what they say."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from deploy.cli.app import EXAMPLES, GROUPS, help_text, whole_command
from deploy.cli.main import main
from sidecar.processes import installed_version

HEAVY = frozenset(
    {"alembic", "apscheduler", "fastapi", "httpx", "litellm", "opentelemetry", "pydantic", "rich"}
    | {"sqlalchemy", "starlette", "structlog", "torch", "transformers", "uvicorn", "uvloop"}
)
"""Each takes a tenth of a second of CPU or more to load; the sum must stay under half a second."""
LOADED = """
import sys
from {module} import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print([name for name in sys.modules if "." not in name])
"""


def commands_of(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and every group below `command`, with the words that name it."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands_of(below, *words, name)


ALL = list(commands_of(whole_command()))
COMMANDS = [words for words, _ in ALL]


def modules_after(module: str, *arguments: str) -> set[str]:
    """The top-level modules that a process has loaded when its `main` returns."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    [
        "sidecar.__main__",
        "ingest.__main__",
        "ingest.score",
        "learner.__main__",
        "deploy.__main__",
    ],
)
def test_the_help_of_a_process_loads_nothing_heavy(module: str) -> None:
    assert modules_after(module, "--help") & HEAVY == set()


def test_the_help_of_no_command_loads_anything_heavy() -> None:
    # One process for all of them: what one command loads stays loaded.
    code = (
        "import sys\nfrom deploy.cli.main import main\n"
        f"codes = {{main([*words, '--help']) for words in {COMMANDS!r}}}\n"
        "print((codes, [name for name in sys.modules if '.' not in name]))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    codes, modules = ast.literal_eval(done.stdout.splitlines()[-1])
    assert len(COMMANDS) > 20
    assert codes == {0}
    assert set(modules) & HEAVY == set()


@pytest.mark.parametrize("words", [(), ("keys", "create")])
def test_the_help_is_that_of_the_cli_library(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, "--help"])
    quick = capsys.readouterr().out

    with pytest.raises(SystemExit):
        whole_command()([*words, "--help"], prog_name="sidecar")

    assert quick == capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["up"], ["nothing", "--help"], ["up", "x", "--help"], ["--help", "up"]]
)
def test_other_arguments_are_left_to_the_cli_library(arguments: list[str]) -> None:
    assert help_text(whole_command(), arguments) is None


@pytest.mark.parametrize("module", ["deploy.cli.main", "sidecar"])
def test_the_version_is_that_of_the_package(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"sidecar {installed_version()}\n"


def test_the_version_of_a_package_that_is_not_installed_is_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sidecar.processes.PACKAGE", "no-such-package")

    assert installed_version().startswith("unknown")


def test_every_command_says_its_purpose_an_example_and_its_exit_codes() -> None:
    lacking = []
    for words, command in ALL:
        text = help_text(whole_command(), [*words, "--help"]) or ""
        purpose = (command.help or "").split("\n\n")[0].strip()
        complete = purpose and "Example:" in text and "Exit codes: 0 " in text
        if not complete or purpose[-1] not in ".:)":
            lacking.append(words)

    assert lacking == []
    assert set(EXAMPLES) == {
        " ".join(words)
        for words, command in ALL
        if words and (not hasattr(command, "commands") or words == ("audit",))
    }
    listed = help_text(whole_command(), ["--help"]) or ""
    assert "..." not in listed.partition("Commands:")[2], "a sentence is cut off"


@pytest.mark.parametrize(
    ("words", "name", "begun", "offered"),
    [
        ("adapters ls", "state", "re", ["registered", "retired", "rejected"]),
        ("adapters ls", "output", "", ["text", "json"]),
        ("adapters alias", "alias", "", ["anchor", "champion"]),
        ("groups ls", "status", "se", ["set_aside"]),
        ("exchanges export", "form", "t", ["trl-sft", "trl-preference"]),
        ("rollback", "to", "", ["previous", "base"]),
        ("status", "output", "j", ["json"]),
    ],
)
def test_a_shell_completes_the_values_that_there_are(
    words: str, name: str, begun: str, offered: list[str]
) -> None:
    command = dict(ALL)[tuple(words.split())]
    parameter = next(one for one in command.params if one.name == name)
    context = typer.Context(command)

    assert [one.value for one in parameter.shell_complete(context, begun)] == offered


def test_every_example_names_options_and_arguments_that_there_are() -> None:
    commands = dict(ALL)
    for example in [*EXAMPLES.values(), *(line for lines in GROUPS.values() for line in lines)]:
        words = shlex.split(example.split(" && ")[0], comments=True)
        name = max((name for name in commands if " ".join(name) in example), key=len)
        given = words[words.index(name[-1]) + 1 :]
        if "--help" not in given:
            commands[name].make_context(example, given, resilient_parsing=False)


def test_bash_completes_a_command_by_the_script_that_the_command_prints(tmp_path: Path) -> None:
    sidecar = tmp_path / "sidecar"
    sidecar.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m deploy.cli.main "$@"\n')
    sidecar.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    asked = """
        eval "$(_SIDECAR_COMPLETE=source_bash sidecar)"
        COMP_WORDS=(sidecar adapters ex); COMP_CWORD=2
        _sidecar_completion sidecar
        echo "${COMPREPLY[@]}"
    """

    done = subprocess.run(
        ["bash", "-c", asked], env=env, capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["export"]
