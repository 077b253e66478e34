"""`sidecar forget`: remove what a user, a session or an exchange said. Works with and without the
processes, on the store itself and on the files of this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.context import settings_of
from deploy.cli.output import Output, note, require_store, say, say_json
from sidecar.plurals import counted

if TYPE_CHECKING:
    from deploy.forgetting.run import Report
    from deploy.forgetting.target import Target
    from sidecar.settings import Settings
    from sidecar.store.database import Database


def forget(
    context: typer.Context,
    user: Annotated[str, typer.Option(help="as the agent named it in `x-sidecar-user`")] = "",
    session: Annotated[
        str,
        typer.Option(
            help="its id, of any project; or its name in `x-sidecar-session`, as PROJECT/NAME; of "
            "the project `default` NAME is enough where it holds no `/`"
        ),
    ] = "",
    exchange: Annotated[str, typer.Option(help="id of one exchange")] = "",
    retire: Annotated[
        bool,
        typer.Option("--retire", help="go back to the newest champion that did not learn from it"),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    all_callers: Annotated[
        bool,
        typer.Option("--all-callers", help="also when several keys or users share the session"),
    ] = False,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="rewrite a large file too; writers wait meanwhile")
    ] = False,
    output: Output = "text",
) -> None:
    """Remove content for good, and name the adapters that learned from it.

    Exit codes: 0 done, also when nothing was found; 1 something is left, run it again; 2 bad use.
    """
    from deploy.forgetting.run import forget as forget_target
    from sidecar.errors import OutboxError
    from sidecar.settings import open_keyring
    from sidecar.store.database import Database

    target = _target(user=user, session=session, exchange=exchange)
    settings = settings_of(context)
    require_store(settings.store.url)
    with closing(Database(settings.store.url, open_keyring(settings.store))) as database:
        database.upgrade_if_behind()
        if target.kind == "session" and not all_callers:
            _refuse_shared(database, target)
        if not yes:
            _ask(database, settings, target)
        try:
            report = forget_target(
                database, settings, target, now=time.time(), retire=retire, vacuum=vacuum
            )
        except (OutboxError, OSError) as error:
            note(f"not finished: {error}; run the command again, it does what is left")
            raise typer.Exit(1) from None
    if output == "json":
        say_json(report.as_json())
    else:
        for line in _lines(report, target, retire=retire):
            say(line)
    if report.traces:
        raise typer.Exit(1)


def _target(*, user: str, session: str, exchange: str) -> Target:
    from deploy.forgetting.target import Target

    if sum(map(bool, (user, session, exchange))) != 1:
        note("name one of --user, --session and --exchange")
        raise typer.Exit(2)
    if user:
        return Target("user", user)
    return Target("session", session) if session else Target("exchange", exchange)


def _refuse_shared(database: Database, target: Target) -> None:
    """End the command when the session holds what several callers said: they may have nothing to
    do with each other."""
    from deploy.forgetting.rows import callers_of

    callers, exchanges = callers_of(database, target)
    if callers > 1:
        note(
            f"the session {target.name} holds {exchanges} exchanges of {callers} callers (keys or "
            "users); name one user (--user) or exchange (--exchange), or say --all-callers"
        )
        raise typer.Exit(2)


def _ask(database: Database, settings: Settings, target: Target) -> None:
    """Say what would go, lines of others that only hold the name too, and ask."""
    from deploy.forgetting.files import count_mentions, files_with_lines
    from deploy.forgetting.rows import exchanges_of

    if not sys.stdin.isatty():
        note("this cannot be undone; say --yes")
        raise typer.Exit(2)
    number = sum(len(page) for page in exchanges_of(database, target))
    found = counted(number, "stored exchange")
    say(f"{found} of the {target.kind} {target.name}. This cannot be undone.")
    for path in files_with_lines(settings.state_dir, settings.telemetry.spans_file):
        if lines := count_mentions(path, target.mention):
            hold = "holds the name: it is blanked, whoever it is about"
            if lines > 1:
                hold = "hold the name: they are blanked, whoever they are about"
            say(f"{counted(lines, 'line')} of {path} {hold}.")
    if not typer.confirm("Forget them?"):
        raise typer.Exit(1)


def _lines(report: Report, target: Target, *, retire: bool) -> Iterator[str]:
    if not report.anything:
        yield (
            f"Nothing was found of the {target.kind} {target.name}: it was forgotten before, or "
            "the name is written otherwise."
        )
    yield (
        f"Removed: {counted(report.exchanges, 'exchange')}, {counted(report.groups, 'group')}, "
        f"{counted(report.feedback, 'record')} of feedback, "
        f"{counted(report.on_the_bus, 'record')} on the bus of this machine, "
        f"{counted(report.dead_letters, 'record')} set aside."
    )
    for path, lines in report.lines.items():
        yield f"Blanked {counted(lines, 'line')} of {path}."
    if not report.adapters:
        yield "No adapter has learned from it."
    for name in report.adapters:
        yield f"Learned from it: {name}"
    if report.rolled_back_to is not None:
        yield f"Rolled back to {report.rolled_back_to}."
    elif report.adapters and not retire:
        yield "They are marked and serve on; --retire takes them out of the traffic."
    for why in report.traces:
        yield f"Not removed yet: {why}."
    for what in report.notes:
        yield f"Note: {what}."
