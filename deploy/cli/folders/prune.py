"""`sidecar adapters prune`: remove the folders of versions that nothing needs."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.context import settings_of
from deploy.cli.output import Output, require_store, say, say_json
from sidecar.plurals import counted

if TYPE_CHECKING:
    from deploy.adapters.needed import Fate
    from deploy.adapters.prune import Pruned

ACTOR = "sidecar adapters prune"


def adapters_prune(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would go and what stays; remove nothing")
    ] = False,
    output: Output = "text",
) -> None:
    """Remove the adapter folders that nothing needs (control does it by itself, every hour).

    What an alias, a canary, a run, a vLLM or the last champions need stays, and so do its parents.
    Lineage and events stay for ever. The settings `[adapters]` say when."""
    from deploy.adapters.needed import FolderRule
    from deploy.adapters.prune import Pruner
    from learner.shared_folders import shared_folders
    from sidecar.store.database import Database

    settings = settings_of(context)
    require_store(settings.store.url)
    rule = FolderRule(
        folder_days=settings.adapters.folder_days, keep_champions=settings.adapters.keep_champions
    )
    folders = settings.learner.adapters_dir
    with closing(Database(settings.store.url)) as database:
        database.upgrade_if_behind()
        pruner = Pruner(
            database=database,
            adapters_dir=folders,
            rule=rule,
            shared=shared_folders(settings),
        )
        now = time.time()
        found = pruner.plan(now=now) if dry_run else pruner.prune(now=now, actor=ACTOR)
    if output == "json":
        say_json(_as_json(found, dry_run))
        return
    for line in _lines(found, dry_run):
        say(line)


def _as_json(found: Pruned, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "removed": [_one(fate) for fate in found.fates if fate.goes],
        "kept": [_one(fate) for fate in found.fates if not fate.goes],
        "freed_bytes": found.freed_bytes,
    }


def _one(fate: Fate) -> dict[str, Any]:
    version = fate.version
    return {
        "name": version.name,
        "version": version.version,
        "state": version.state,
        "path": version.path,
        "why": fate.why,
    }


def _lines(found: Pruned, dry_run: bool) -> list[str]:
    goes = [one for one in found.fates if one.goes]
    stays = [one for one in found.fates if not one.goes]
    verb = "would go" if dry_run else "went"
    folders = counted(len(goes), "folder")
    lines = [
        f"{folders} {verb} ({_size(found.freed_bytes)}), {counted(len(stays), 'stays', 'stay')}"
    ]
    lines += [f"  {verb}  {_words(one)}" for one in goes]
    lines += [f"  stays {_words(one)}" for one in stays]
    return lines


def _words(fate: Fate) -> str:
    return f"v{fate.version.version} [{fate.version.state}]: {fate.why}"


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
