"""`sidecar groups`: the groups of answers, their scores, and why some were set aside."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from deploy.cli.content.group_text import group_lines, groups_table
from deploy.cli.context import admin_client
from deploy.cli.output import Output, note, print_as, print_table, refuse_unknown

groups_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Groups of answers, and their scores."
)


def _statuses() -> list[str]:
    from deploy.admin.filters import GROUP_STATUSES

    return list(GROUP_STATUSES)


@groups_app.command("ls")
def groups_ls(
    context: typer.Context,
    status: Annotated[
        str, typer.Option(help="such as sampled, scored or set_aside", autocompletion=_statuses)
    ] = "",
    reason: Annotated[str, typer.Option(help="such as judge_rejected")] = "",
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many, the newest first")] = 50,
    project: Annotated[
        str | None, typer.Option(help="of whose line of adapters; default: of all lines")
    ] = None,
    output: Output = "text",
) -> None:
    """The newest groups, one line each; `groups show` has one with all that is known of it."""
    if status:
        refuse_unknown("--status", status, _statuses())
    wanted = {"status": status, "reason": reason}
    given = {name: value for name, value in wanted.items() if value}
    found = admin_client(context, project).get("/groups", limit=limit, **given)
    print_table(found, output, groups_table)


@groups_app.command("show")
def groups_show(context: typer.Context, group_id: str, output: Output = "text") -> None:
    """One group: what was asked, and each answer with its score, explanation and checks."""
    from deploy.admin.client import AdminApiError

    client = admin_client(context)
    found = client.get("/groups", group_id)
    request = None
    if output != "json":
        try:
            request = client.get("/exchanges", str(found.get("exchange_id")))["request"]
        except AdminApiError as error:  # retention may have deleted it before the group
            note(str(error))
    print_as(found, output, lambda: list(group_lines(found, request, time.time())))
