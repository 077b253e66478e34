"""What a command takes from the command line's context: the settings, and the admin API's client.

The imports are inside the functions: both need pydantic, and `--help` must not wait for it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.output import note, require_store, say, say_json

if TYPE_CHECKING:
    from deploy.admin.client import AdminClient
    from sidecar.settings import Settings
    from sidecar.store.database import Database


Project = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="a project of serving.own_adapters: its own adapters"),
]


def settings_of(context: typer.Context, project: str | None = None) -> Settings:
    """The settings of `--config`, for the line of a project. Raises: SettingsError."""
    from sidecar.settings import load_settings

    settings = load_settings(context.obj)
    return settings if project is None else settings.of_line(settings.line_named(project))


@contextmanager
def open_store(
    settings: Settings, *, upgrade: bool = True, contents: bool = False
) -> Iterator[Database]:
    """Open the store that the settings name. upgrade: bring an older one to this version.
    contents: what exchanges say is read or written. Raises: StoreError; SettingsError."""
    from sidecar.settings import open_keyring
    from sidecar.store.database import Database
    from sidecar.store.keyring import NO_KEYS

    require_store(settings.store.url)
    keyring = open_keyring(settings.store) if contents else NO_KEYS
    with closing(Database(settings.store.url, keyring)) as database:
        if upgrade:
            database.upgrade_if_behind()
        yield database


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
    params: Mapping[str, str | int] | None = None,
) -> None:
    """Ask the admin API, and print its text or its JSON. On a terminal the last column of a table
    is wrapped; elsewhere a record is one line. Raises: AdminApiError."""
    text = output == "text"
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    found, notes = client.ask(
        *path, method=method, body=body, etag=etag, text=text, columns=columns, params=params
    )
    if text:
        for line in found.removesuffix("\n").split("\n"):
            say(line)
    else:
        say_json(found)
    for one in notes:
        note(one)
