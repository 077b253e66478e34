"""`sidecar audit`: who changed what, and whether the history of the aliases is whole."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from deploy.cli.context import admin_client, settings_of
from deploy.cli.listings.rows import audit_table
from deploy.cli.output import Output, print_found, print_table, require_store

audit_app = typer.Typer(rich_markup_mode=None, help="Who changed what, when and why.")


@audit_app.callback(invoke_without_command=True)
def audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many, the newest first")] = 20,
    output: Output = "text",
) -> None:
    """Who changed what, when and why; `-o json` has also the address, and what was before and
    after."""
    if context.invoked_subcommand is not None:
        return
    print_table(admin_client(context).get("/audit", limit=limit), output, audit_table)


@audit_app.command("verify")
def audit_verify(context: typer.Context, output: Output = "text") -> None:
    """Is the history of the aliases whole? Exit 1 when a move was changed, removed or inserted.

    It reads the store. Keep `last_hash` elsewhere: who can write the store could hash it anew.
    """
    from dataclasses import asdict

    from deploy.registry.history.aliases import verify
    from sidecar.store.database import Database

    settings = settings_of(context)
    require_store(settings.store.url)
    with closing(Database(settings.store.url)) as database, database.read() as session:
        found = verify(session)
    print_found({**asdict(found), "broken": list(found.broken)}, output)
    if found.broken:
        raise typer.Exit(1)
