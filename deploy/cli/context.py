"""What a command takes from the command line's context: the settings, and the admin API's client.

The imports are inside the functions: both need pydantic, and `--help` must not wait for it.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.output import note, say, say_json

if TYPE_CHECKING:
    from deploy.admin.client import AdminClient
    from sidecar.settings import Settings


Project = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="a project of serving.own_adapters: its own adapters"),
]


def settings_of(context: typer.Context, project: str | None = None) -> Settings:
    """The settings of `--config`, for the line of a project. Raises: SettingsError."""
    from sidecar.settings import load_settings

    settings = load_settings(context.obj)
    return settings if project is None else settings.of_line(settings.line_named(project))


def admin_client(context: typer.Context, project: str | None = None) -> AdminClient:
    """A client for the admin API that the settings name, for the line of a project.

    Raises: SettingsError.
    """
    from deploy.admin.client import AdminClient

    return AdminClient(settings_of(context), project)


def show(
    client: AdminClient,
    output: str,
    *path: str,
    method: str = "GET",
    body: dict[str, Any] | None = None,
    etag: str | None = None,
    **params: str | int,
) -> None:
    """Ask the admin API, and print its text or its JSON. On a terminal the last column of a table
    is wrapped; elsewhere a record is one line. Raises: AdminApiError."""
    text = output == "text"
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    found, notes = client.ask(
        *path, method=method, body=body, etag=etag, text=text, columns=columns, **params
    )
    if text:
        for line in found.removesuffix("\n").split("\n"):
            say(line)
    else:
        say_json(found)
    for one in notes:
        note(one)
