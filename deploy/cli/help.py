"""The help of a command, without parsing the command line.

The CLI library checks each parsed value with pydantic, also the values of `sidecar` itself before
the help of a subcommand. That takes as long as everything else together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

HELP = "--help"


def help_text(command: Any, arguments: Sequence[str]) -> str | None:
    """The help that `sidecar WORD... --help` prints.

    command: `sidecar` itself, with all commands below it. Any: typer carries its own click.
    Returns None when the arguments are anything else: the CLI library then handles them.
    """
    if not arguments or arguments[-1] != HELP:
        return None
    context = typer.Context(command, info_name="sidecar")
    for word in arguments[:-1]:
        # Only a group has commands below it.
        below = getattr(command, "get_command", lambda *_: None)(context, word)
        if below is None:
            return None
        command = below
        context = typer.Context(command, info_name=word, parent=context)
    text: str = command.get_help(context)
    return text
