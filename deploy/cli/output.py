"""How every part of the `sidecar` command prints and refuses, and which store it may open.

Text that people and models wrote (reasons, names, errors) is printed without the characters that a
terminal obeys, each record on lines of its own; JSON escapes them by itself. Text output is for
people: times are dates with an age. Programs read `-o json`, which has each time in Unix seconds.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.records import MAX_REASON, cut_reason
from deploy.text import record_lines
from sidecar.errors import StoreError
from sidecar.hiding import hide_in_url
from sidecar.visible import visible

UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def read_length(text: str) -> int | None:
    """Read a length of time such as `90m`, `12h`, `30d`, `8w`, in seconds; None when it is none."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    return int(match[1]) * UNITS_S[match[2]] if match else None


def group(help_text: str) -> typer.Typer:
    """Return a group of commands. Its help is plain text: `rich` takes 0.3 s of CPU to load."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


FORMATS = ("text", "json")
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Base of the CLI library's usage errors, which has no public name."""


def completed_by(*known: str) -> Callable[[], list[str]]:
    """Offer these values when a shell completes an option or an argument."""
    return lambda: list(known)


def _known_format(value: str) -> str:
    refuse_unknown("--output", value, FORMATS)
    return value


def _usable_reason(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise typer.BadParameter("is blank; say why, in a word at least", param_hint="--reason")
    if value is not None and len(value) > MAX_REASON:
        what = f"has {len(value):,} characters; at most {MAX_REASON:,} are kept"
        raise typer.BadParameter(what, param_hint="--reason")
    return value


def _cut_reason(value: str) -> str:
    """A rollback is never refused for what somebody pasted."""
    kept = cut_reason(value)
    if kept != value:
        note(f"--reason: of {len(value):,} characters the first {MAX_REASON - 1:,} are kept")
    _usable_reason(kept)
    return kept


Output = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        callback=_known_format,
        autocompletion=completed_by(*FORMATS),
        help="text or json",
    ),
]
GivenReason = Annotated[str, typer.Option(callback=_usable_reason, help="why; kept in the audit")]
CutReason = Annotated[str, typer.Option(callback=_cut_reason, help="why; kept in the audit")]
Reason = Annotated[str | None, typer.Option(callback=_usable_reason, help="why; kept in the audit")]


def say(line: str) -> None:
    """Print one line."""
    print(visible(line), flush=True)


def say_json(value: Any, *, indent: int | None = 2) -> None:  # Any: JSON
    """Print JSON in ASCII. It escapes every other control character but DEL by itself.

    Bytes, which a damaged row of the store may hold, are printed as text. indent: None: one line.
    """
    text = json.dumps(value, indent=indent, default=str)
    print(text.replace("\x7f", "\\u007f"), flush=True)


def say_either(output: str, found: Any, lines: Iterable[str]) -> None:  # Any: JSON
    """Print JSON, or these lines. output: `text` or `json`."""
    if output == "json":
        say_json(found)
        return
    for line in lines:
        say(line)


def note(text: str) -> None:
    """Print one line on stderr: it is for the person, not for a program that reads the output."""
    print(f"sidecar: {visible(text)}", file=sys.stderr)


def note_usage(error: Any) -> None:  # Any: a `USAGE_ERROR`
    """Print a usage error as one line. A command that only lacks a subcommand prints its help."""
    context = error.ctx
    if context is not None and error.message == context.get_help():
        print(error.message, file=sys.stderr)
        return
    command = context.command_path if context is not None else "sidecar"
    note(f"{error.format_message().rstrip('.')}; see `{command} --help`")


def print_found(found: Any, output: str) -> None:  # Any: JSON of the admin API, or like it
    """Print what a command found in the store: one record, or the `items` of a listing, whose
    damaged rows are named on stderr. output: `text` or `json`."""
    say_either(output, found, record_lines(found, time.time()))
    for damaged in found.get("damaged", ()) if output == "text" else ():
        note(damaged)


def refuse_unknown(option: str, value: str, known: Collection[str]) -> None:
    """Raises: typer.BadParameter, which names the known values; nothing when `value` is empty."""
    if value and value not in known:
        raise typer.BadParameter(
            f"no such value: {value}; known: {', '.join(known)}", param_hint=option
        )


def require_store(url: str) -> None:
    """Refuse an SQLite file that does not exist: opening it would make an empty store.

    Raises: StoreError.
    """
    from sqlalchemy import make_url

    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        raise StoreError(
            f"store {hide_in_url(url)}: no such file; check store.url, or name --config"
        )


def read_rubric(path: Path) -> str:
    """Read the file of `--rubric`. Raises: typer.BadParameter."""
    try:
        words = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"{path} cannot be read ({error}); name a file of plain text", param_hint="--rubric"
        ) from None
    if not words.strip():
        raise typer.BadParameter(f"{path} is empty", param_hint="--rubric")
    return words
