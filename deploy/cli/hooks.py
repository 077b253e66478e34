"""`sidecar hooks`: how far each web hook was told, and a test event to one of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.context import admin_client, settings_of
from deploy.cli.output import Output, group, note, say, say_either, say_json
from deploy.text import shown_time
from sidecar.visible import counted

if TYPE_CHECKING:
    from sidecar.settings import Hook, Settings


hooks_app = group("Web hooks on transitions.")


def hook_lines(hooks: Iterable[Mapping[str, Any]], now: float) -> Iterator[str]:
    """Yield a line for each of `hooks` of `GET /admin/v1/status`. now: Unix seconds."""
    for one in hooks:
        last = "never" if one["told_at"] is None else shown_time(one["told_at"], now)
        dead = f", {one['dead']:,} given up" if one["dead"] else ""
        taken = counted(one["delivered"], "event")
        yield f"Hook {one['name']}: {taken} taken{dead}; the last one: {last}."
        if one["tries"]:
            yield f"  FAILS ({counted(one['tries'], 'time')} in a row): {one['error']}"


@hooks_app.command("ls")
def hooks_ls(context: typer.Context, output: Output = "text") -> None:
    """Each hook: events taken and given up, and why the newest one fails."""
    found = admin_client(context).get("/status").get("hooks", [])
    none = ["there is no hook; [notify.hooks.NAME] in the settings makes one"]
    say_either(output, {"items": found}, hook_lines(found, time.time()) if found else none)


@hooks_app.command("test")
def hooks_test(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="its name; default: every hook")] = "",
    output: Output = "text",
) -> None:
    """Send a signed event of the type `test` from here, and say what the receiver answered.

    The secret is read here, so set its variable as for control."""
    import asyncio

    settings = settings_of(context)
    hooks = settings.notify.hooks
    chosen = {one: hook for one, hook in hooks.items() if name in ("", one)}
    if not chosen:
        known = ", ".join(hooks) or "none"
        note(f"no hook is called {name or '(none is set)'}; [notify.hooks] has {known}")
        raise typer.Exit(1)
    failed = asyncio.run(_test(settings, chosen))
    if output == "json":
        say_json({one: {"taken": one not in failed, "error": failed.get(one)} for one in chosen})
    for one in chosen if output == "text" else ():
        said = failed.get(one)
        say(f"{one}: taken") if said is None else note(f"{one}: {said}")
    if failed:
        raise typer.Exit(1)


async def _test(settings: Settings, chosen: dict[str, Hook]) -> dict[str, str]:
    """Return why each hook that failed did so."""
    from deploy.errors import error_line
    from deploy.outside.http import Caller, OutsideError
    from deploy.outside.telling import TEST, Event, Sender

    caller = Caller()
    failed: dict[str, str] = {}
    sender = Sender(settings.serving.model, caller)
    event = Event(
        seq=0,
        at=time.time(),
        type=TEST,
        subject=settings.serving.model,
        actor="sidecar hooks test",
        reason="a test",
        before={},
        after={},
    )
    try:
        for name, hook in chosen.items():
            try:
                await sender.post(name, hook, event)
            except OutsideError as error:
                failed[name] = error_line(error)
    finally:
        await caller.aclose()
    return failed
