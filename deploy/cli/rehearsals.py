"""`sidecar rehearsals`: the tasks that were played again, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from deploy.cli.context import open_store, settings_of
from deploy.cli.output import Output, group, say_either
from deploy.text import shown_age, table_lines

rehearsals_app = group("Recorded tasks that the runner played again.")
HEADS = ("TASK", "AGE", "ATTEMPTS", "COUNT", "OUTCOMES", "SPREAD", "TOKENS", "REST")


def _row(one: Mapping[str, Any], now: float) -> tuple[str, ...]:
    results = dict(one["results"])
    good = results.pop("ended", 0)
    rest = ", ".join(f"{number} {why}" for why, number in sorted(results.items()))
    outcomes = sorted(one["outcomes"])
    shown = "-" if not outcomes else f"{outcomes[0]:g} to {outcomes[-1]:g}"
    return (
        str(one["task"]),
        shown_age(now - one["at"]),
        str(one["attempts"]),
        str(good),
        shown,
        "-" if one["spread"] is None else f"{one['spread']:g}",
        f"{one['tokens']:,}",
        rest + (f": {one['detail']}" if one["detail"] else "") or "-",
    )


@rehearsals_app.command("ls")
def rehearsals_ls(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="tasks, the newest first")] = 20,
    output: Output = "text",
) -> None:
    """Each task: attempts, those that count, outcomes, their spread, and tokens."""
    from ingest.tasks.rehearsals import rehearsed_tasks

    with open_store(settings_of(context)) as database, database.read() as session:
        found = rehearsed_tasks(session)[:limit]
    lines = ["nothing was rehearsed; [rehearsals] runner and tokens_per_day turn it on"]
    if found:
        now = time.time()
        lines = table_lines(HEADS, [_row(one, now) for one in found])
    say_either(output, {"items": found}, lines)
