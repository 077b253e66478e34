"""`sidecar audit`; `sidecar store`: its encryption keys, backup and restore."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.context import admin_client, open_store, settings_of, show
from deploy.cli.files import alone, replace_file
from deploy.cli.output import Output, group, note, print_found, require_store, say
from sidecar.store.keyring import KEY_BYTES, read_keys
from sidecar.visible import counted

# `sidecar audit`: who changed what, and whether the history of the aliases is whole.

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
    show(admin_client(context), output, "/audit", params={"limit": limit})


@audit_app.command("verify")
def audit_verify(context: typer.Context, output: Output = "text") -> None:
    """Is the history of the aliases whole? Exit 1 when a move was changed, removed or inserted.

    It reads the store. Keep `last_hash` elsewhere: who can write the store could hash it anew.
    """
    from dataclasses import asdict

    from deploy.registry.aliases import verify

    settings = settings_of(context)
    with open_store(settings, upgrade=False) as database, database.read() as session:
        found = verify(session)
    print_found({**asdict(found), "broken": list(found.broken)}, output)
    if found.broken:
        raise typer.Exit(1)


store_app = group("Encrypt, back up and restore the store.")


@store_app.command("new-key")
def new_key(
    file: Annotated[
        Path | None,
        typer.Option(help="put it first into this file of keys, which is made if there is none"),
    ] = None,
) -> None:
    """Make an encryption key: print it, or put it first into a file."""
    key_id = f"{datetime.now(UTC):%Y-%m-%d}-{secrets.token_hex(2)}"
    line = f"{key_id}:{base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}\n"
    if file is None:
        say(line.rstrip())
        return
    try:
        _put_first(file, line)
    except (OSError, ValueError) as error:
        note(f"{file}: {error}; nothing was changed")
        raise typer.Exit(1) from None
    note(
        f"{file} has the new key {key_id}. Keep a copy: without it nobody reads what it encrypts. "
        "Restart every process, then run `sidecar store rotate-key`"
    )


def _put_first(path: Path, line: str) -> None:
    """Raises: OSError; ValueError when the file holds something else than keys."""
    with alone(path):
        before = path.read_text("ascii") if path.exists() else ""
        if before.strip():
            read_keys(before)
        replace_file(path, line + before)


@store_app.command("rotate-key")
def rotate_key(
    context: typer.Context,
    output: Output = "text",
    vacuum: Annotated[
        bool,
        typer.Option(
            "--vacuum", help="rewrite a SQLite file over 256 MB too; writers wait meanwhile"
        ),
    ] = False,
) -> None:
    """Encrypt with the first key all that is not yet; the processes may run meanwhile."""
    from ingest.store.rotation import rotate
    from sidecar.settings import open_keyring
    from sidecar.store.database import Database

    store = settings_of(context).store
    require_store(store.url)
    keyring = open_keyring(store)
    if not keyring:
        note("there is no key; set store.encryption_key_file (`sidecar store new-key` makes one)")
        raise typer.Exit(1)
    with closing(Database(store.url, keyring)) as database:
        database.upgrade_if_behind()
        done = rotate(database, large_too=vacuum)
    left = sum(done.unreadable.values())
    found: dict[str, object] = {
        "key": keyring.first,
        "encrypted": done.encrypted,
        "already": done.already,
    }
    found |= {"left_as_they_are": left, "log_emptied": done.log_emptied}
    found["file_rewritten"] = not done.not_rewritten_mb
    print_found(found, output)
    for why, number in done.unreadable.most_common():
        note(f"{counted(number, 'value stays as it is', 'values stay as they are')}: {why}")
    if not done.log_emptied:
        note(
            "the store's log (its file that ends in -wal) still holds what was there before: a "
            "process was reading or writing. End long reads (an export, a backup, an open sqlite3 "
            "shell), then run `sidecar store rotate-key` again"
        )
    if done.not_rewritten_mb:
        note(
            f"the store's file of {done.not_rewritten_mb} MB may hold copies of old values: run "
            "`sidecar store rotate-key --vacuum`; writers wait meanwhile"
        )
    if left or not done.log_emptied or done.not_rewritten_mb:
        raise typer.Exit(1)


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="of the backup")]


@store_app.command("backup")
def store_backup(context: typer.Context, folder: Folder, output: Output = "text") -> None:
    """Copy the store (SQLite) and the adapters that it names into a new folder; the processes may
    run meanwhile. Exit 1 when an adapter is not as it was registered."""
    from deploy.backup import back_up, store_file

    made = back_up(store_file(settings_of(context).store.url), folder)
    print_found({"adapters": len(made.adapters), "store_sha256": made.store_sha256}, output)
    _say_missing(made.missing)


@store_app.command("restore")
def store_restore(context: typer.Context, folder: Folder, output: Output = "text") -> None:
    """Put a backup in the place of the store, and its adapters where they were. Stop everything
    before. What was there is kept beside it."""
    from deploy.backup import refuse_other_owner, restore, store_file
    from deploy.supervise import LOCKED
    from sidecar.processes import only_one

    settings = settings_of(context)
    store = store_file(settings.store.url)
    refuse_other_owner(store, settings.state_dir / "up.lock")  # before root makes the locks
    with ExitStack() as locks:
        for name in ("up", *LOCKED):  # none of them starts meanwhile
            locks.enter_context(only_one(settings.state_dir, name))
        made = restore(folder, store)
    print_found({"restored": True, "adapters": len(made.adapters), "made_at": made.made_at}, output)
    _say_missing(made.missing)


def _say_missing(missing: Mapping[str, str]) -> None:
    for path, why in missing.items():
        note(f"not in the backup: {path}: {why}")
    if missing:
        raise typer.Exit(1)
