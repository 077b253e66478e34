"""What a command takes from the command line's context: the settings, and the admin API's client.

The imports are inside the functions: both need pydantic, and `--help` must not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from deploy.admin.client import AdminClient
    from sidecar.settings import Settings


def settings_of(context: typer.Context) -> Settings:
    """The settings of `--config`. Raises: SettingsError."""
    from sidecar.settings import load_settings

    return load_settings(context.obj)


def admin_client(context: typer.Context) -> AdminClient:
    """A client for the admin API that the settings name. Raises: SettingsError."""
    from deploy.admin.client import AdminClient

    return AdminClient(settings_of(context))
