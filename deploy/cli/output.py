"""How every part of the `sidecar` command prints and refuses, and which store it may open.

Text that people and models wrote (reasons, names, errors) is printed without the characters that a
terminal obeys, each record on lines of its own; JSON escapes them by itself. Text output is for
people: times are dates with an age. Programs read `-o json`, which has each time in Unix seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.iso_times import is_time, iso
from deploy.records import MAX_REASON, cut_reason, version_of
from sidecar.errors import StoreError
from sidecar.hiding import hide_in_url
from sidecar.lines import learner_of, line_name
from sidecar.visible import visible

if TYPE_CHECKING:
    from sidecar.settings import Learner


# A table for a terminal: columns as wide as what stands in them, the last one wrapped. Pure.

GAP = "  "
LEAST = 20
"""Characters that the last column has at least, however narrow the terminal is."""
WHOLE = 10_000
"""A width in which nothing is wrapped: for output that goes to a file or to another program."""


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int = WHOLE
) -> list[str]:
    """Return the lines of a table; "none" without rows.

    The last column is wrapped to `width` characters a line: nothing is cut off.
    """
    if not rows:
        return ["none"]
    shown = [[" ".join(cell.split()) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[k]) for row in shown) for k in range(len(heads) - 1)]
    left = sum(widths) + len(GAP) * len(widths)
    lines = []
    for row in shown:
        first = GAP.join(map(str.ljust, row, widths)) + GAP if widths else ""
        parts = textwrap.wrap(row[-1], max(LEAST, width - left)) or [""]
        lines += [
            f"{first if place == 0 else ' ' * left}{part}".rstrip()
            for place, part in enumerate(parts)
        ]
    return lines


# Times for people: when, in UTC, and how long ago. Pure.

UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
UNITS = ((86_400.0, "day"), (3_600.0, "h"), (60.0, "min"))


def shown_time(at: float, now: float) -> str:
    """A time such as `2026-03-01T09:30:00Z (3 min ago)`. at, now: Unix seconds."""
    try:
        moment = datetime.fromtimestamp(int(at), UTC)
    except (OverflowError, ValueError, OSError):  # no time of our calendar: a damaged row
        return str(at)
    return f"{moment:%Y-%m-%dT%H:%M:%SZ} ({shown_age(now - at)})"


def shown_cron(learner: Learner, now: float) -> str:
    """The next three times of `learner.cron`; "" under another schedule. now: Unix seconds.

    Raises: SettingsError.
    """
    if learner.schedule != "cron":
        return ""
    from learner.schedule.rule import next_times

    times = next_times(learner, datetime.fromtimestamp(now, UTC))
    shown = ", ".join(f"{one:%a %Y-%m-%d %H:%M}" for one in times)
    return f"{shown} ({learner.timezone})"


def shown_age(age_s: float) -> str:
    """`3 min ago`, `in 2 days`, `now`."""
    length = shown_length(abs(age_s))
    if abs(age_s) < 1:
        return "now"
    return f"{length} ago" if age_s > 0 else f"in {length}"


def shown_length(length_s: float) -> str:
    """The number of whole units of the largest unit that fits: `45 s`, `3 min`, `26 h`, `2 days`.

    Hours go on to two days: "30 h" tells more than "1 day".
    """
    for unit_s, unit in UNITS:
        count = int(length_s // unit_s)
        if count >= (2 if unit == "day" else 1):
            return f"{count} {unit}s" if unit == "day" else f"{count} {unit}"
    return f"{int(length_s)} s"


def read_length(text: str) -> int | None:
    """Read a length of time such as `90m`, `12h`, `30d`, `8w`, in seconds; None when it is none."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    return int(match[1]) * UNITS_S[match[2]] if match else None


FORMATS = ("text", "json")
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Base of the CLI library's usage errors, which has no public name."""


Table = Callable[[Sequence[Mapping[str, Any]], float, int], list[str]]
"""(items of a listing, Unix seconds, width in characters) -> lines."""


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


def say_json(value: Any) -> None:  # Any: JSON
    """Print JSON in ASCII. It escapes every other control character but DEL by itself.

    Bytes, which a damaged row of the store may hold, are printed as text.
    """
    _print_json(value, indent=2)


def say_json_line(value: Any) -> None:  # Any: JSON
    """Print JSON as `say_json` does, on one line: for a command that prints one record after the
    other."""
    _print_json(value, indent=None)


def _print_json(value: Any, *, indent: int | None) -> None:
    text = json.dumps(value, indent=indent, default=str)
    print(text.replace("\x7f", "\\u007f"), flush=True)


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
    """Print one record, or the `items` of a listing: an empty line stands between two of them.

    Rows of a listing that are damaged in the store are named on stderr, and a listing that does not
    show all of them says so there.
    output: `text` or `json`.
    """
    if output == "json":
        say_json(found)
        return
    for line in found_lines(found, time.time()):
        say(line)
    note_missing(found)


def print_table(found: Any, output: str, table: Table) -> None:  # Any: JSON of the admin API
    """Print a listing as a table, or each record by its fields when it is not as this version
    knows it. On a terminal the table is as wide as that; elsewhere a record is one line.

    output: as for `print_found`.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WHOLE
    print_as(found, output, lambda: table(found["items"], time.time(), width))


def print_as(found: Any, output: str, lines: Callable[[], list[str]]) -> None:  # Any: as above
    """Print a reply by these lines, or by its fields when it is not as this version knows it.

    output: as for `print_found`.
    """
    try:
        shown = None if output == "json" else lines()
    except (KeyError, TypeError, AttributeError):
        shown = None
    if shown is None:
        print_found(found, output)
        return
    for line in shown:
        say(line)
    note_missing(found)


def note_missing(found: Mapping[str, Any]) -> None:
    """Name the damaged rows of a listing on stderr, and say there that it does not show all."""
    for damaged in found.get("damaged", []) if "items" in found else []:
        note(damaged)
    if "items" in found and found.get("next_cursor"):
        note(f"there are more than these {len(found['items'])}; --limit shows up to 200")


def found_lines(found: Mapping[str, Any], now: float) -> list[str]:
    """Return the text of one record or of a listing. now: Unix seconds. Pure."""
    if "items" not in found:
        return _lines(found, now)
    lines: list[str] = []
    for block in found["items"]:
        lines += ["", *_lines(block, now)] if lines else _lines(block, now)
    return lines or ["none"]


def _lines(block: Mapping[str, Any], now: float, indent: int = 0) -> list[str]:
    """Indented `key: value` lines; lists and objects below their key, each item after a dash."""
    pad = "  " * indent
    lines: list[str] = []
    for key, value in block.items():
        if isinstance(value, dict) and value:
            lines += [f"{pad}{key}:", *_lines(value, now, indent + 1)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{pad}{key}:")
            for item in value:
                first, *rest = _lines(item, now, indent + 2) or [f"{pad}    -"]
                lines += [f"{pad}  - {first[len(pad) + 4 :]}", *rest]
        else:
            lines.append(f"{pad}{key}: {_shown(key, value, now)}")
    return lines


def _shown(key: str, value: Any, now: float) -> str:
    """Return a value in words: no value of Python's, times with an age, basis points in percent."""
    if is_time(key, value):
        over = key == "next_step_earliest_at" and value < now
        more = "; the step has lasted long enough, and `reason` says what else it needs"
        return shown_time(value, now) + (more if over else "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bp") and isinstance(value, int):
        return f"{value} ({value / 100:g}%)"
    if isinstance(value, list):
        if key == "steps":  # of a canary's ramp
            value = [f"{weight_bp / 100:g}%" for weight_bp in value]
        return ", ".join(map(str, value)) or "-"
    return str(value) if value or value == 0 else "-"  # a limit of "none" would read as 0


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


# What the tables of adapters, aliases, runs and the audit show of each record. Pure.

Json = Mapping[str, Any]
_CANARY_ID = re.compile(r"[0-9a-f]{32}")


def adapters_table(items: Sequence[Json], now: float, width: int = WHOLE) -> list[str]:
    """One line a version; `sidecar adapters show` has its name, digest and folder."""
    heads = ("version", "state", "made", "from", "aliases", "loaded", "why")
    rows = [
        (
            f"v{one['version']}",
            str(one["state"]),
            shown_age(now - one["created_at"]),
            version_of(one["parent"]),
            ", ".join(one["aliases"]) or "-",
            {True: "yes", False: "no", None: "-"}[one["loaded"]],
            "; ".join(_marks(one)) or "-",
        )
        for one in items
    ]
    return table_lines(heads, rows, width)


def _marks(adapter: Json) -> list[str]:
    found = [str(adapter["reason"])] if adapter["reason"] else []
    if adapter["banned"]:
        same = adapter["banned"] == adapter["reason"]
        found.append("banned" if same else f"banned: {adapter['banned']}")
    if adapter["removed_at"] is not None:
        found.append("its folder is removed")
    if adapter["forgotten_at"] is not None:
        found.append("content that it learned from is forgotten")
    return found


def aliases_table(items: Sequence[Json], now: float, width: int = WHOLE) -> list[str]:
    """One line an alias; `now` is not used."""
    rows = [(str(one["alias"]), str(one["adapter"] or "-")) for one in items]
    return table_lines(("alias", "adapter"), rows, width)


def audit_table(items: Sequence[Json], now: float, width: int = WHOLE) -> list[str]:
    """One line a change; `-o json` has before, after, address and request id."""
    heads = ("seq", "at (UTC)", "by", "what", "of", "why")
    rows = [
        (
            str(one["seq"]),
            (iso(one["at"]) or "-")[:16].replace("T", " "),
            str(one["actor"]),
            str(one["action"]),
            _subject(str(one["subject"]), one.get("project")),
            str(one["reason"] or "-"),
        )
        for one in items
    ]
    return table_lines(heads, rows, width)


def runs_table(items: Sequence[Json], now: float, width: int = WHOLE) -> list[str]:
    """One line a run; `sidecar runs show` has its counts, settings and steps."""
    heads = ("run", "status", "began", "from", "made", "groups", "why")
    rows = [
        (
            str(one["run_id"]),
            str(one["status"]),
            shown_age(now - one["started_at"]),
            version_of(one["parent"]),
            version_of(one["adapter"] or "-"),
            str(one["counts"].get("used", "-")),
            str(one["reason"] or "-"),
        )
        for one in items
    ]
    return table_lines(heads, rows, width)


def _subject(subject: str, project: str | None) -> str:
    """The first eight characters of a canary's id, the version of an adapter, else all of it; and
    whose line it is, because each line has a v1."""
    short = subject[:8] if _CANARY_ID.fullmatch(subject) else version_of(subject)
    if project is None:
        return short
    line = line_name("", project)  # how the name of each model's line of the project ends
    return short if short == learner_of(line) else f"{short.removesuffix(line)} of {project}"
