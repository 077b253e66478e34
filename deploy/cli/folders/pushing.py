"""`sidecar adapters push`: a copy of a version in a model hub or in MLflow."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.context import Project, settings_of
from deploy.cli.output import GivenReason, Output, print_found, require_store

ACTOR = "sidecar adapters push"


def adapters_push(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="a version, an alias or a full name")],
    to: Annotated[str, typer.Option("--to", help="hub:OWNER/NAME or mlflow:URI")],
    reason: GivenReason,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Copy a version, as `export` writes it, to a model hub or to MLflow; once for each."""
    from deploy.adapters.export import export_version, version_in_files
    from deploy.adapters.mirrors import open_mirror, push_version
    from deploy.registry import audit, versions
    from sidecar.hiding import hide_in_url
    from sidecar.store.database import Database

    settings = settings_of(context, project)
    require_store(settings.store.url)
    with closing(Database(settings.store.url)) as database:
        with database.read() as session:
            found = version_in_files(session, settings.line.name, version)
            kept = versions.aliases_of(session, found.model)
        aliases = [alias for alias, target in kept.items() if target == found.name]
        mirror = open_mirror(to, found.model)
        with tempfile.TemporaryDirectory(prefix="sidecar-push-") as folder:
            copy = Path(folder) / f"v{found.version}"
            export_version(found, copy)
            done = push_version(mirror, to, copy, found, aliases)
        shown = {"to": hide_in_url(to), "where": done.where, "already": done.already}
        with database.write() as session:
            audit.record(
                session,
                now=time.time(),
                actor=ACTOR,
                action="adapter.pushed",
                subject=found.name,
                before={},
                after=shown,
                reason=reason,
            )
    print_found({"adapter": found.name, **shown}, output)
