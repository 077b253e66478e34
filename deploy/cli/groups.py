"""`sidecar groups`: the groups of answers, their scores, and why some were set aside."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.context import admin_client
from deploy.cli.output import Output, print_found, refuse_unknown

groups_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Groups of answers, and their scores."
)


@groups_app.command("ls")
def groups_ls(
    context: typer.Context,
    status: Annotated[str, typer.Option(help="such as sampled, scored or set_aside")] = "",
    reason: Annotated[str, typer.Option(help="such as judge_rejected")] = "",
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many, the newest first")] = 50,
    output: Output = "text",
) -> None:
    """The newest groups; for those set aside, the reason and the judge's words."""
    if status:
        from deploy.admin.filters import GROUP_STATUSES

        refuse_unknown("--status", status, GROUP_STATUSES)
    wanted = {"status": status, "reason": reason}
    given = {name: value for name, value in wanted.items() if value}
    print_found(admin_client(context).get("/groups", limit=limit, **given), output)


@groups_app.command("show")
def groups_show(context: typer.Context, group_id: str, output: Output = "text") -> None:
    """One group with its answers and scores."""
    print_found(admin_client(context).get(f"/groups/{group_id}"), output)
