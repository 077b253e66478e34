"""The commands of `sidecar`. Thin: each parses, asks the admin API or starts a process, and prints.

A command imports what it needs when it runs: `--help` and a rollback do not wait for libraries that
they do not use. Help is plain text for the same reason: `rich` takes 0.3 s of CPU to load.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.adapters import adapters_app
from deploy.cli.canary import canary_app
from deploy.cli.config import config_app
from deploy.cli.content.exchanges import exchanges_app
from deploy.cli.content.forget import forget
from deploy.cli.content.ranking import judge_sessions
from deploy.cli.context import Project, admin_client, settings_of
from deploy.cli.doctor import doctor
from deploy.cli.groups import groups_app
from deploy.cli.judge import judge_app
from deploy.cli.keys import keys_app
from deploy.cli.learning.learner import learner_app
from deploy.cli.learning.runs import runs_app
from deploy.cli.output import (
    CutReason,
    Output,
    completed_by,
    note,
    print_found,
    require_store,
    say,
    say_json,
)
from deploy.cli.outside.hooks import hooks_app
from deploy.cli.store.audit import audit_app
from deploy.cli.store.encryption import store_app
from deploy.cli.taught.examples import teach
from deploy.supervise.processes import MODULES

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A sidecar in front of vLLM that learns from live agent traffic.",
)
app.add_typer(canary_app, name="canary")
app.add_typer(adapters_app, name="adapters")
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
app.add_typer(groups_app, name="groups")
app.add_typer(hooks_app, name="hooks")
app.add_typer(audit_app, name="audit")
judge_app.command("sessions")(judge_sessions)
app.add_typer(judge_app, name="judge")
app.add_typer(learner_app, name="learner")
app.add_typer(runs_app, name="runs")
app.add_typer(exchanges_app, name="exchanges")
app.add_typer(store_app, name="store")


@cache
def whole_command() -> Any:  # Any: typer carries its own click
    """`sidecar` as the CLI library runs it. Made once in a process: it takes 0.1 s of CPU."""
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from sidecar.processes.version import installed_version

        say(f"sidecar {installed_version()}")
        raise typer.Exit


@app.callback()
def configure(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; default ./sidecar.toml if it exists")
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    context.obj = config


@app.command()
def up(context: typer.Context) -> None:
    """Start every process of this machine and keep them running until Ctrl-C."""
    from deploy.preflight.settings_check import advice, checked_settings
    from deploy.supervise.processes import plan
    from deploy.supervise.supervisor import Supervisor
    from learner.ready import why_no_packages
    from sidecar.logs import configure_logging
    from sidecar.processes.open_files import raise_open_files

    raise_open_files()
    settings = checked_settings(context.obj)
    for one in advice(settings):
        note(f"warning: {one}")
    # It would end at once, five times, and take the proxy with it: users' traffic needs no learner.
    lacks = why_no_packages() if settings.learner.schedule != "manual" else ""
    if lacks:
        note(f"warning: `sidecar learn` is not started, all others are: {lacks}")
    configure_logging(settings.telemetry, "up")
    config = context.obj.resolve() if context.obj is not None else None
    supervisor = Supervisor(
        settings,
        config,
        announce=lambda line: say(f"sidecar {line}"),
        specs=plan(settings, config, without={"learn"} if lacks else ()),
    )
    raise typer.Exit(supervisor.run())


def _run_process(context: typer.Context, name: str, *extra: str) -> None:
    arguments = ["--config", str(context.obj)] if context.obj is not None else []
    entry = MODULES[name]
    module = import_module(entry if "." in entry else f"{entry}.__main__")
    raise typer.Exit(module.main([*arguments, *extra]))


@app.command()
def proxy(
    context: typer.Context,
    workers: Annotated[
        int | None, typer.Option(help="processes that share the port; default proxy.workers")
    ] = None,
) -> None:
    """Run the data plane alone."""
    _run_process(context, "proxy", *(("--workers", str(workers)) if workers is not None else ()))


@app.command()
def ingest(context: typer.Context) -> None:
    """Run the consumer of the bus alone."""
    _run_process(context, "ingest")


@app.command()
def score(context: typer.Context) -> None:
    """Run candidate sampling and judging alone."""
    _run_process(context, "score")


@app.command()
def learn(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="one run now, then stop")] = False,
    replay: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="train a run or version again, and compare the weights"),
    ] = None,
    project: Project = None,
) -> None:
    """Run the learner on its schedule, or once now; its exit codes stand below."""
    extra: tuple[str, ...] = ("--once",) if once else ()
    if once and replay is not None:
        raise typer.BadParameter("does not go with --replay; give one of them", param_hint="--once")
    if replay is not None:
        extra = ("--replay", replay)
    if project is not None and not extra:
        raise typer.BadParameter("goes with --once or --replay", param_hint="--project")
    if project is not None:
        settings_of(context, project)  # refuses one without adapters of its own
        extra = (*extra, "--project", project)
    _run_process(context, "learn", *extra)


@app.command()
def control(context: typer.Context) -> None:
    """Run the canary controller and the admin API alone."""
    _run_process(context, "control")


@app.command()
def status(context: typer.Context, project: Project = None, output: Output = "text") -> None:
    """What serves, what is on canary, what the learner does, how many records there are."""
    from deploy.cli.status import status_lines
    from deploy.cli.times import shown_cron
    from sidecar.errors import SettingsError

    found = admin_client(context, project).get("/status")
    learner, now = settings_of(context).learner, time.time()
    times = ""
    with suppress(SettingsError):  # `sidecar doctor` tells of a line that cannot be read
        times = shown_cron(learner, now)
    lines = None
    if output != "json":
        lines = status_lines(found, now, schedule=learner.schedule, times=times)
    if lines is None:
        print_found(found, output)
        return
    for line in lines:
        say(line)


@app.command()
def rollback(
    context: typer.Context,
    reason: CutReason,
    to: Annotated[
        str,
        typer.Option(
            help="version, `previous` or `base`", autocompletion=completed_by("previous", "base")
        ),
    ] = "previous",
    offline: Annotated[
        bool, typer.Option("--offline", help="write the store directly; control may be down")
    ] = False,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Give the traffic back to an older adapter. Takes effect on the next request.

    It bans the files of the adapter that it takes away, and of a candidate that users had met, and
    pauses the learner: `sidecar adapters allow` and `sidecar learner resume` undo that. A ban of
    the version that it goes back to is lifted."""
    if offline:
        with _without_collection():
            _roll_back_offline(context, to, reason, project, output)
        return
    client = admin_client(context, project)
    found = client.post("/rollback", body={"to": to, "reason": reason})
    print_found(found, output)
    _say_paused(found.get("learner_paused", False), project)


def _say_paused(paused: bool, project: str | None) -> None:
    if paused:
        of = "" if project is None else f" --project {project}"
        note(f"the learner is paused until `sidecar learner resume{of}`")


@contextmanager
def _without_collection() -> Iterator[None]:
    """Turn garbage collection off, for the body and for the end of the process.

    One short command makes little garbage, and the search for it among all imported modules took
    a quarter of a rollback's time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _roll_back_offline(
    context: typer.Context, to: str, reason: str, project: str | None, output: str
) -> None:
    from deploy.registry.rollback import rollback as roll_back
    from sidecar.records import BASE
    from sidecar.store.database import Database

    settings = settings_of(context, project)
    require_store(settings.store.url)
    with closing(Database(settings.store.url)) as database:
        database.upgrade_if_behind()  # control, which does it otherwise, may never have started
        done = roll_back(
            database,
            settings.line.name,
            to=to,
            reason=reason,
            actor="sidecar rollback --offline",
            now=time.time(),
        )
    shown = {"from": done.before, "to": done.after, "changed": done.changed}
    more = {"ended_canary": done.ended_canary, "learner_paused": done.learner_paused}
    print_found({**shown, **more, "banned": list(done.banned)}, output)
    _say_paused(done.learner_paused, project)
    if done.after != BASE:
        note(
            "vLLM was not asked: a replica without the adapter answers with the base model until "
            "`sidecar control` has loaded it"
        )


@app.command()
def lineage(
    context: typer.Context, adapter: str, project: Project = None, output: Output = "text"
) -> None:
    """What an adapter learned from: parents, runs, groups, exchanges, scores, settings."""
    from dataclasses import asdict

    from deploy.iso_times import deep
    from deploy.registry.lineage import render_lineage, trace_lineage
    from sidecar.store.database import Database

    settings = settings_of(context, project)
    require_store(settings.store.url)
    with closing(Database(settings.store.url)) as database, database.read() as session:
        traced = trace_lineage(session, settings.line.name, adapter)
    if output == "json":
        say_json(deep(asdict(traced)))
        return
    for line in render_lineage(traced).split("\n"):
        say(line)


app.command()(doctor)
app.command()(forget)
teach(app)
