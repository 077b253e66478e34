"""`sidecar keys`: make, list and revoke the API keys of the data plane, in the store itself.

No other process has to run. A key is printed when it is made, and never again.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.context import open_store, settings_of
from deploy.cli.output import (
    GivenReason,
    Output,
    group,
    note,
    print_found,
    read_length,
    require_store,
)
from sidecar.access.keys import PREFIX, ApiKey, FreshKey
from sidecar.errors import InvalidKeyError, StoreError

if TYPE_CHECKING:
    from sidecar.settings import Settings

keys_app = group("API keys of the data plane.")
ACTOR = "sidecar keys"
STORE_VARIABLE = "SIDECAR_STORE__URL"
MOST = 2**53
"""Largest limit of a key: the store holds whole numbers up to 63 bits, JSON readers up to 53."""


@keys_app.command("create")
def keys_create(
    context: typer.Context,
    project: Annotated[str, typer.Option(help="the project that its requests belong to")],
    name: Annotated[str, typer.Option(help="who or what holds the key")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option(help="`operate` or `voices`, in addition to `infer`, which every key has"),
    ] = None,
    expires: Annotated[
        str, typer.Option(help="after this time, such as 12h, 30d, 8w; default: never")
    ] = "",
    rpm: Annotated[int | None, typer.Option(help="requests per minute", max=MOST)] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(help="prompt and completion tokens per UTC day", max=MOST)
    ] = None,
    best_of: Annotated[int, typer.Option(help="largest x-sidecar-best-of; 1 is off")] = 1,
    output: Output = "text",
) -> None:
    """Make a key and print it: it is shown this once and never again."""
    from deploy.registry import api_keys
    from sidecar.store.database import Database

    settings = settings_of(context)
    _require_place(context, settings)
    now = time.time()
    length_s = read_length(expires) if expires else None
    if expires and length_s is None:
        raise InvalidKeyError(
            f"--expires {expires}: not a length of time; give a number and m, h, d or w, such as "
            "30d"
        )

    def wanted(fresh: FreshKey) -> ApiKey:
        return ApiKey(
            key_id=fresh.key_id,
            project=project,
            secret_hash=fresh.secret_hash,
            scopes=frozenset({"infer", *(scope or ())}),
            expires_at=None if length_s is None else now + length_s,
            requests_per_minute=rpm,
            tokens_per_day=tokens_per_day,
            best_of_max=best_of,
            name=name,
        )

    with closing(Database(settings.store.url)) as database:
        database.upgrade()  # also before the first `sidecar up`, which then uses this store
        key, presented = api_keys.create(
            database, wanted, randomness=os.urandom, actor=ACTOR, now=now
        )
    print_found({"key": presented, **_shown(key)}, output)
    note("the key is shown only now; the store keeps its hash")
    if settings.access.mode != "keys":
        note(
            f'access.mode is "{settings.access.mode}", so no key is checked; set it to "keys" and '
            "restart the proxy"
        )


@keys_app.command("ls")
def keys_ls(context: typer.Context, output: Output = "text") -> None:
    """Every key, also expired and revoked ones, without its secret."""
    from deploy.registry import api_keys

    settings = settings_of(context)
    now = time.time()
    with open_store(settings) as database:
        found, damaged = api_keys.all_keys(database)
    items = [
        {
            **_shown(one.key),
            "state": one.state(now),
            "created_at": one.created_at,
            "revoked_at": one.revoked_at,
        }
        for one in found
    ]
    print_found({"items": items, "damaged": damaged}, output)


@keys_app.command("revoke")
def keys_revoke(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(help="its id, or the whole key")],
    reason: GivenReason = "no reason given",
    output: Output = "text",
) -> None:
    """Revoke a key for good: proxies refuse it from their next poll of the store."""
    from deploy.registry import api_keys

    settings = settings_of(context)
    if key_id.startswith(PREFIX):
        key_id = key_id.removeprefix(PREFIX).partition("-")[0]
    with open_store(settings) as database:
        revoked_at = api_keys.revoke(database, key_id, reason=reason, actor=ACTOR, now=time.time())
    print_found({"key_id": key_id, "revoked_at": revoked_at}, output)


def _require_place(context: typer.Context, settings: Settings) -> None:
    """Refuse to make a store where nothing names one: `sidecar up` would look elsewhere for keys.

    Raises: StoreError.
    """
    from sidecar.settings import DEFAULT_FILE

    told = (
        context.obj is not None
        or DEFAULT_FILE.exists()
        or any(name.upper() == STORE_VARIABLE for name in os.environ)
    )
    if told:
        return
    try:
        require_store(settings.store.url)
    except StoreError:
        raise StoreError(
            f"neither {DEFAULT_FILE.absolute()} nor a store at {settings.store.url} exists; go to "
            f"the folder of your settings, or name them by --config or {STORE_VARIABLE}"
        ) from None


def _shown(key: ApiKey) -> dict[str, Any]:  # Any: JSON
    from deploy.registry.api_keys import public_fields

    return {"key_id": key.key_id, **public_fields(key)}
