"""`sidecar adapters`: the adapter versions, as the admin API knows them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, get_args

import typer

from deploy.cli.context import Project, admin_client
from deploy.cli.folders.copies import adapters_diff, adapters_export
from deploy.cli.folders.prune import adapters_prune
from deploy.cli.folders.pushing import adapters_push
from deploy.cli.learning.importing import adapters_import
from deploy.cli.listings.rows import adapters_table, aliases_table
from deploy.cli.output import (
    GivenReason,
    Output,
    completed_by,
    print_found,
    print_table,
    refuse_unknown,
)
from deploy.records import AdapterState

adapters_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Adapter versions.")
adapters_app.command("import")(adapters_import)
adapters_app.command("push")(adapters_push)
adapters_app.command("diff")(adapters_diff)
adapters_app.command("export")(adapters_export)
adapters_app.command("prune")(adapters_prune)


@adapters_app.command("ls")
def adapters_ls(
    context: typer.Context,
    state: Annotated[
        str,
        typer.Option(
            help="such as champion, retired or rejected",
            autocompletion=completed_by(*get_args(AdapterState)),
        ),
    ] = "",
    at: Annotated[
        str, typer.Option(help="a time, such as 2026-03-01T09:30Z: who held which alias then")
    ] = "",
    project: Project = None,
    output: Output = "text",
) -> None:
    """Every version, newest first; with --at, which one was champion at that time.

    `adapters show VERSION` has its name in vLLM, its digest and its folder."""
    if at:
        found = admin_client(context, project).get("/aliases", at=str(_seconds(at)))
        print_table(found, output, aliases_table)
        return
    refuse_unknown("--state", state, get_args(AdapterState))
    given = {"state": state} if state else {}
    found = admin_client(context, project).get_all("/adapters", **given)
    print_table(found, output, adapters_table)


def _seconds(at: str) -> float:
    """Read an ISO time, in UTC where it names no zone. Raises: typer.BadParameter."""
    try:
        moment = datetime.fromisoformat(at)
    except ValueError as error:
        raise typer.BadParameter(
            "is no time; write one such as 2026-03-01T09:30Z", param_hint="--at"
        ) from error
    at_s = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if at_s < 0:
        raise typer.BadParameter(
            "is before 1970, when nothing was champion; write a time such as 2026-03-01T09:30Z",
            param_hint="--at",
        )
    return at_s


@adapters_app.command("alias")
def adapters_alias(
    context: typer.Context,
    alias: Annotated[str, typer.Argument(autocompletion=completed_by("anchor", "champion"))],
    version: str,
    reason: GivenReason,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Point an alias at a version: `anchor`, or `champion` by the rules of a rollback."""
    client = admin_client(context, project)
    etag = client.etag("/aliases", alias)
    body = {"adapter": version, "reason": reason}
    print_found(client.put("/aliases", alias, body=body, etag=etag), output)


@adapters_app.command("allow")
def adapters_allow(
    context: typer.Context,
    version: str,
    reason: GivenReason,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Lift the ban of a version's files: `sidecar canary start` may try it again."""
    client = admin_client(context, project)
    found = client.post("/adapters", version, "allow", body={"reason": reason})
    print_found(found, output)


@adapters_app.command("show")
def adapters_show(
    context: typer.Context, version: str, project: Project = None, output: Output = "text"
) -> None:
    """One version."""
    print_found(admin_client(context, project).get("/adapters", version), output)
