"""What the tables of adapters, aliases, runs and the audit show of each record. Pure.

Each function takes records as the admin API lists them, and the time in Unix seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.cli.listings.table import WHOLE, table_lines
from deploy.cli.times import shown_age
from deploy.iso_times import iso
from deploy.records import version_of
from sidecar.lines import learner_of, line_name

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
