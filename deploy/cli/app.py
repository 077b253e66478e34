"""The commands of `sidecar`: each asks the admin API or starts a process, and prints.

A command imports what it needs when it runs: `--help` and a rollback do not wait for libraries that
they do not use. Help is plain text for the same reason: `rich` takes 0.3 s of CPU to load.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any

import typer

from deploy.cli.adapters import adapters_app
from deploy.cli.canary import canary_app
from deploy.cli.config import config_app
from deploy.cli.content import exchanges_app, forget, groups_app, judge_sessions, tasks_app
from deploy.cli.context import Project, admin_client, open_store, settings_of, show
from deploy.cli.doctor import doctor
from deploy.cli.hooks import hooks_app
from deploy.cli.judge import judge_app
from deploy.cli.keys import keys_app
from deploy.cli.learner import learner_app, runs_app
from deploy.cli.output import CutReason, Output, completed_by, note, print_found, say, say_either
from deploy.cli.rehearsals import rehearsals_app
from deploy.cli.replay import replay
from deploy.cli.store import audit_app, store_app
from deploy.supervisor_rules import MODULES
from deploy.text import paused_words

DOCS = Path(__file__).resolve().parents[1] / "docs"

# The help of a command, without parsing the command line.

HELP = "--help"


def help_text(command: Any, arguments: Sequence[str]) -> str | None:
    """The help that `sidecar WORD... --help` prints.

    command: `sidecar` itself, with all commands below it. Any: typer carries its own click.
    Returns None when the arguments are anything else: the CLI library then handles them.
    """
    if not arguments or arguments[-1] != HELP:
        return None
    context = typer.Context(command, info_name="sidecar")
    for word in arguments[:-1]:
        # Only a group has commands below it.
        below = getattr(command, "get_command", lambda *_: None)(context, word)
        if below is None:
            return None
        command = below
        context = typer.Context(command, info_name=word, parent=context)
    text: str = command.get_help(context)
    return text


# An example of each command and group, and its exit codes, for the end of its help. Pure.

EXAMPLES: dict[str, str] = {
    "up": "sidecar --config sidecar.toml up",
    "proxy": "sidecar proxy --workers 4",
    "ingest": "sidecar ingest",
    "score": "sidecar score",
    "learn": "sidecar learn --once",
    "control": "sidecar control",
    "status": "sidecar status",
    "progress": "sidecar progress",
    "doctor": "sidecar doctor --offline",
    "replay": "sidecar replay v7 --since 7d",
    "rollback": 'sidecar rollback --to v7 --reason "replies got worse"',
    "lineage": "sidecar lineage v7",
    "forget": "sidecar forget --user 4711 --yes",
    "dashboards": "sidecar dashboards /etc/sidecar/monitoring",
    "docs": "sidecar docs",
    "canary get": "sidecar canary get -o json",
    "canary start": 'sidecar canary start v7 --reason "the judge was away"',
    "canary pause": 'sidecar canary pause --reason "a sale begins"',
    "canary resume": "sidecar canary resume",
    "canary promote": 'sidecar canary promote --reason "seen enough"',
    "canary abort": 'sidecar canary abort --reason "too long"',
    "canary skip-step": "sidecar canary skip-step",
    "canary wait": "sidecar canary wait --timeout 7200 && echo promoted",
    "canary watch": "sidecar canary watch",
    "adapters import": 'sidecar adapters import ./my-lora --reason "our SFT"',
    "adapters diff": "sidecar adapters diff v7 champion",
    "adapters export": "sidecar adapters export v7 /tmp/v7.tar",
    "adapters push": 'sidecar adapters push champion --to hub:our-team/agent --reason "shared"',
    "adapters prune": "sidecar adapters prune --dry-run",
    "adapters ls": "sidecar adapters ls --at 2026-03-01T09:30Z",
    "adapters alias": 'sidecar adapters alias anchor v7 --reason "a good month"',
    "adapters allow": 'sidecar adapters allow v7 --reason "the judge was wrong"',
    "adapters show": "sidecar adapters show champion",
    "config init": "sidecar config init",
    "config show": "sidecar config show",
    "config check": "sidecar config check --online",
    "keys create": "sidecar keys create --project shop --rpm 60",
    "keys ls": "sidecar keys ls",
    "keys revoke": "sidecar keys revoke key_1a2b3c",
    "groups ls": "sidecar groups ls --status set_aside",
    "groups show": "sidecar groups show g-0f3a9c",
    "groups retry": "sidecar groups retry --all judge_rubbish",
    "tasks ls": "sidecar tasks ls --status scored",
    "tasks show": "sidecar tasks show tg_0f3a9c",
    "audit": "sidecar audit --limit 50",
    "audit verify": "sidecar audit verify -o json",
    "judge calibrate": "sidecar judge calibrate --judge openai/gpt-4.1-mini",
    "judge noise": "sidecar judge noise",
    "judge sessions": "sidecar judge sessions session-1 session-2",
    "hooks ls": "sidecar hooks ls",
    "rehearsals ls": "sidecar rehearsals ls",
    "hooks test": "sidecar hooks test",
    "learner pause": 'sidecar learner pause --reason "a sale begins"',
    "learner resume": "sidecar learner resume",
    "learner run": "sidecar learner run",
    "learner override": 'sidecar learner override --reason "longer answers are wanted"',
    "learner watch": "sidecar learner watch",
    "runs ls": "sidecar runs ls --limit 5",
    "runs show": "sidecar runs show",
    "runs plot": "sidecar runs plot --out run.png",
    "exchanges ls": "sidecar exchanges ls --since 1h",
    "exchanges show": "sidecar exchanges show ex_1a2b3c",
    "exchanges export": "sidecar exchanges export --help",
    "exchanges import": "sidecar exchanges import langfuse observations.jsonl",
    "store new-key": "sidecar store new-key --file keys",
    "store rotate-key": "sidecar store rotate-key",
    "store backup": "sidecar store backup /backup/2026-11-29",
    "store restore": "sidecar store restore /backup/2026-11-29",
}
"""Words of a command -> a line that can be typed."""

GROUPS: dict[str, tuple[str, ...]] = {
    "": (
        "sidecar config init      # writes sidecar.toml, with every setting explained",
        "sidecar config check --online",
        "sidecar up",
        "sidecar status",
    ),
    "canary": ("sidecar canary watch", 'sidecar canary pause --reason "a sale begins"'),
    "adapters": ("sidecar adapters ls", "sidecar adapters show v7"),
    "config": ("sidecar config init", "sidecar config check --online"),
    "keys": ("sidecar keys create --project shop --rpm 60", "sidecar keys ls"),
    "groups": ("sidecar groups ls --status set_aside", "sidecar groups show g-0f3a9c"),
    "tasks": ("sidecar tasks ls --status scored", "sidecar tasks show tg_0f3a9c"),
    "hooks": ("sidecar hooks ls", "sidecar hooks test"),
    "rehearsals": ("sidecar rehearsals ls",),
    "judge": ("sidecar judge calibrate --judge openai/gpt-4.1-mini", "sidecar judge noise"),
    "learner": ('sidecar learner pause --reason "a sale begins"', "sidecar learner run"),
    "runs": ("sidecar runs ls", "sidecar runs show"),
    "exchanges": ("sidecar exchanges ls --since 1h", "sidecar exchanges show ex_1a2b3c"),
    "store": ("sidecar store new-key --file keys", "sidecar store rotate-key"),
}
"""Words of a group of commands -> lines that can be typed."""

USUAL = "0 done, 1 failed, 2 bad use"
ENDED = (
    "0 promoted, 1 rolled back or rejected, 2 bad use, 3 inconclusive or withdrawn, "
    "4 could not ask, 124 timed out"
)
EXITS: dict[str, str] = {
    "": f"{USUAL}, 130 interrupted; the help of a command names those that it has besides",
    "canary": f"{USUAL}; `canary wait` and `canary watch` also 3, 4 and 124, which their help "
    "explains",
    "canary wait": ENDED,
    "canary watch": f"{ENDED}, 130 interrupted",
    "doctor": "0 records come through, 1 something stops them, 2 bad use",
    "replay": "0 proven no worse or better, 1 failed or not scored, 2 bad use, 3 undecided, "
    "4 proven worse, 130 interrupted",
    "learn": "0 done, 1 failed, 2 bad use; with --once also 3 nothing to learn from, 4 held, "
    "5 no room, 6 stopped (the next start goes on with it)",
    "audit verify": "0 whole, 1 broken or not read, 2 bad use",
    "config check": "0 sound, 1 something cannot run, 2 the file is not sound",
}


def teach(app: typer.Typer) -> None:
    """Give every command and group of the application its examples and exit codes, at the end of
    its help, and every command its whole first sentence in the list of its group."""
    for words, command in _commands(app):
        name = " ".join(words)
        examples = (EXAMPLES[name],) if name in EXAMPLES else GROUPS.get(name, ())
        if examples:
            command.epilog = _epilog(examples, EXITS.get(name, USUAL))
        if name in EXAMPLES and command.callback is not None:
            command.short_help = _first_sentence(command.callback.__doc__ or "")


def _commands(app: typer.Typer, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not words:
        yield words, app.registered_callback
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        yield (*words, name), command
    for group in app.registered_groups:
        below = group.typer_instance
        if below is None or not group.name:
            continue
        name = str(group.name)
        yield (*words, name), below.registered_callback or group
        yield from _commands(below, *words, name)


def _first_sentence(text: str) -> str:
    """The CLI library would cut it off at the end of a line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "."


def _epilog(examples: Sequence[str], exits: str) -> str:
    lines = "\n".join(f"    {one}" for one in examples)
    return f"Example:\n\n\b\n{lines}\n\nExit codes: {exits}."


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
app.add_typer(tasks_app, name="tasks")
app.add_typer(hooks_app, name="hooks")
app.add_typer(rehearsals_app, name="rehearsals")
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
        from sidecar.processes import installed_version

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
    from deploy.errors import StartError
    from deploy.preflight.settings import advice, checked_settings
    from deploy.supervise import Supervisor
    from deploy.supervisor_rules import plan
    from learner.ready import why_no_packages
    from sidecar.logs import configure_logging
    from sidecar.processes import missing_packages, raise_open_files

    raise_open_files()
    settings = checked_settings(context.obj)
    if lacking := missing_packages("control"):
        raise StartError(lacking)
    for one in advice(settings):
        note(f"warning: {one}")
    # They would end at once, five times, and take the proxy with them, which needs neither.
    lacks = {
        "learn": why_no_packages() if settings.learner.schedule != "manual" else "",
        "score": missing_packages("judge") if settings.judge.model else "",
    }
    for name, why in lacks.items():
        if why:
            note(f"warning: `sidecar {name}` is not started: {why}")
    configure_logging(settings.telemetry, "up")
    config = context.obj.resolve() if context.obj is not None else None
    supervisor = Supervisor(
        settings,
        config,
        announce=lambda line: say(f"sidecar {line}"),
        specs=plan(settings, config, without=[name for name, why in lacks.items() if why]),
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
    show(admin_client(context, project), output, "/status")


@app.command()
def progress(context: typer.Context, project: Project = None, output: Output = "text") -> None:
    """Whether the model got better, by version, with intervals, and what that has cost."""
    show(admin_client(context, project), output, "/progress")


app.command()(replay)


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
    body = {"to": to, "reason": reason}
    show(admin_client(context, project), output, "/rollback", method="POST", body=body)


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

    settings = settings_of(context, project)
    with open_store(settings) as database:
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
    if done.learner_paused:
        note(paused_words(project))
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

    from deploy.registry.lineage import render_lineage, trace_lineage

    settings = settings_of(context, project)
    with open_store(settings, upgrade=False) as database, database.read() as session:
        traced = trace_lineage(session, settings.line.name, adapter)
    say_either(output, asdict(traced), render_lineage(traced).split("\n"))


@app.command()
def dashboards(folder: Path) -> None:
    """Write the dashboard for Grafana and the alert rules for Prometheus to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((DOCS / "monitoring").iterdir()):
        say(str(copyfile(file, folder / file.name)))


@app.command()
def docs() -> None:
    """Print the folder of the pages that messages name, such as docs/runbook.md."""
    say(str(DOCS))


app.command()(doctor)
app.command()(forget)
teach(app)
