"""`sidecar groups`: the groups of answers, their scores, and why some were set aside."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.output import Output, print_found

groups_app = typer.Typer(no_args_is_help=True, help="Groups of answers, and their scores.")


@groups_app.command("ls")
def groups_ls(
    context: typer.Context,
    status: Annotated[str, typer.Option(help="such as sampled, scored or set_aside")] = "",
    reason: Annotated[str, typer.Option(help="such as judge_rejected")] = "",
    limit: Annotated[int, typer.Option(min=1, max=200, help="the newest so many")] = 50,
    output: Output = "text",
) -> None:
    """The newest groups; of those set aside the reason and the judge's words."""
    from deploy.admin.client import AdminClient
    from sidecar.settings import load_settings

    wanted = {"status": status, "reason": reason}
    given = {name: value for name, value in wanted.items() if value}
    client = AdminClient(load_settings(context.obj))
    print_found(client.get("/groups", limit=limit, **given), output)


@groups_app.command("show")
def groups_show(context: typer.Context, group_id: str, output: Output = "text") -> None:
    """One group with its answers and scores."""
    from deploy.admin.client import AdminClient
    from sidecar.settings import load_settings

    client = AdminClient(load_settings(context.obj))
    print_found(client.get(f"/groups/{group_id}"), output)
