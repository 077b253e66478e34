"""What a command takes from the command line's context: the settings, and the admin API's client.

The imports are inside the functions: both need pydantic, and `--help` must not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

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
