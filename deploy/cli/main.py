"""The `sidecar` command. Thin: it parses, asks the admin API or starts a process, and prints.

Exit codes: 0 done, 1 failed, 2 bad use; `canary wait`: 0 promoted, 1 rolled back, 3 inconclusive,
124 timed out. Errors are one line on stderr. What a command needs is imported by that command: a
rollback must not wait for libraries that it does not use.
"""

from __future__ import annotations

import deploy.cli.own_path  # noqa: F401 - before all others: it decides where they come from

# isort: split
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.groups import groups_app
from deploy.cli.keys import keys_app
from deploy.cli.output import Output, note, print_found, require_store, say, say_json
from deploy.errors import DeployError, UnknownCanaryError
from deploy.supervise.processes import MODULES
from ingest.errors import IngestError
from sidecar.errors import InvalidKeyError, SettingsError, StateLockError, StoreError

if TYPE_CHECKING:
    from deploy.admin.client import AdminClient
    from sidecar.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A sidecar in front of vLLM that learns from live agent traffic.",
)
canary_app = typer.Typer(no_args_is_help=True, help="The canary of a new adapter.")
adapters_app = typer.Typer(no_args_is_help=True, help="Adapter versions.")
config_app = typer.Typer(no_args_is_help=True, help="Settings.")
app.add_typer(canary_app, name="canary")
app.add_typer(adapters_app, name="adapters")
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
app.add_typer(groups_app, name="groups")

Canary = Annotated[str, typer.Argument(help="its id; the newest when left out")]
Reason = Annotated[str, typer.Option(help="why; kept in the audit")]
WAIT_EXITS = {"promoted": 0, "rolled_back": 1, "rejected": 1, "inconclusive": 3}
TIMED_OUT = 124


@app.callback()
def configure(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; default ./sidecar.toml if it is there")
    ] = None,
) -> None:
    context.obj = config


def _settings(context: typer.Context) -> Settings:
    from sidecar.settings import load_settings

    return load_settings(context.obj)


def _client(context: typer.Context) -> AdminClient:
    from deploy.admin.client import AdminClient

    return AdminClient(_settings(context))


@app.command()
def up(context: typer.Context) -> None:
    """Start every process of this machine and keep them alive until Ctrl-C."""
    from deploy.cli.settings_check import checked_settings
    from deploy.supervise.supervisor import Supervisor
    from sidecar.logs import configure_logging

    settings = checked_settings(context.obj)
    configure_logging(settings.telemetry, "up")
    config = context.obj.resolve() if context.obj is not None else None
    supervisor = Supervisor(settings, config, announce=lambda line: say(f"sidecar {line}"))
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
        int | None, typer.Option(help="processes that share the port; else proxy.workers")
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
    _run_process(context, "scoring")


@app.command()
def learn(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="one run now, then stop")] = False,
) -> None:
    """Run the learner on its schedule, or once now (exit 3: nothing to learn)."""
    _run_process(context, "learner", *(("--once",) if once else ()))


@app.command()
def control(context: typer.Context) -> None:
    """Run the canary controller and the admin API alone."""
    _run_process(context, "control")


@app.command()
def status(context: typer.Context, output: Output = "text") -> None:
    """What serves, what is on canary, what the learner does, where records stop."""
    print_found(_client(context).get("/status"), output)


@app.command()
def rollback(
    context: typer.Context,
    reason: Annotated[str, typer.Option(help="why; kept in the audit")],
    to: Annotated[str, typer.Option(help="version, `previous` or `base`")] = "previous",
    offline: Annotated[
        bool, typer.Option("--offline", help="write the store directly; control may be down")
    ] = False,
    output: Output = "text",
) -> None:
    """Give the traffic back to an older adapter. Takes effect on the next request."""
    if offline:
        with _without_collection():
            _roll_back_offline(context, to, reason, output)
        return
    print_found(_client(context).post("/rollback", body={"to": to, "reason": reason}), output)


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection, now and when the process ends.

    One short command makes no garbage that matters, and looking for it among all that is imported
    took a quarter of a rollback's time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _roll_back_offline(context: typer.Context, to: str, reason: str, output: str) -> None:
    from deploy.registry.rollback import rollback as roll_back
    from sidecar.records import BASE
    from sidecar.store.database import Database

    settings = _settings(context)
    require_store(settings.store.url)
    with closing(Database(settings.store.url)) as database:
        database.upgrade_if_behind()  # control, which else does it, may never have started
        done = roll_back(
            database,
            settings.serving.model,
            to=to,
            reason=reason,
            actor="sidecar rollback --offline",
            now=time.time(),
        )
    shown = {"from": done.before, "to": done.after, "changed": done.changed}
    print_found({**shown, "ended_canary": done.ended_canary}, output)
    if done.after != BASE:
        note(
            "vLLM was not asked: where it does not hold the adapter the base answers until "
            "`sidecar control` has loaded it"
        )


@app.command()
def lineage(context: typer.Context, adapter: str, output: Output = "text") -> None:
    """What an adapter learned from: parents, runs, groups, exchanges, scores, settings."""
    from deploy.registry.lineage import render_lineage, trace_lineage
    from sidecar.store.database import Database

    settings = _settings(context)
    require_store(settings.store.url)
    with Database(settings.store.url).read() as session:
        traced = trace_lineage(session, settings.serving.model, adapter)
    if output == "json":
        say_json(asdict(traced))
        return
    for line in render_lineage(traced).split("\n"):
        say(line)


@app.command()
def audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many, the newest first")] = 20,
    output: Output = "text",
) -> None:
    """Who changed what, when, from which address and why."""
    print_found(_client(context).get("/audit", limit=limit), output)


@adapters_app.command("ls")
def adapters_ls(context: typer.Context, output: Output = "text") -> None:
    """Every version, newest first."""
    print_found(_client(context).get("/adapters"), output)


@adapters_app.command("show")
def adapters_show(context: typer.Context, version: str, output: Output = "text") -> None:
    """One version."""
    print_found(_client(context).get("/adapters", version), output)


def _newest_canary(client: AdminClient) -> dict[str, Any]:
    items = client.get("/canaries", limit=1)["items"]
    if not items:
        raise UnknownCanaryError(
            "no adapter has been on canary yet; `sidecar learn --once` makes one"
        )
    return dict(items[0])


@canary_app.command("get")
def canary_get(context: typer.Context, canary: Canary = "", output: Output = "text") -> None:
    """The newest canary, or the one named."""
    client = _client(context)
    found = client.get("/canaries", canary) if canary else _newest_canary(client)
    print_found(found, output)


def _act(context: typer.Context, action: str, canary: str, reason: str, output: str) -> None:
    client = _client(context)
    name = canary or str(_newest_canary(client)["canary_id"])
    # Pause and abort never fail on a race; the others must know what they change.
    etag = client.etag("/canaries", name) if action in {"resume", "promote"} else None
    print_found(client.post("/canaries", name, action, body={"reason": reason}, etag=etag), output)


@canary_app.command("pause")
def canary_pause(
    context: typer.Context, canary: Canary = "", reason: Reason = "", output: Output = "text"
) -> None:
    """Hold the canary where it is."""
    _act(context, "pause", canary, reason, output)


@canary_app.command("resume")
def canary_resume(
    context: typer.Context, canary: Canary = "", reason: Reason = "", output: Output = "text"
) -> None:
    """Go on with a paused canary."""
    _act(context, "resume", canary, reason, output)


@canary_app.command("promote")
def canary_promote(
    context: typer.Context, canary: Canary = "", reason: Reason = "", output: Output = "text"
) -> None:
    """Make the candidate champion now, by hand."""
    _act(context, "promote", canary, reason, output)


@canary_app.command("abort")
def canary_abort(
    context: typer.Context, canary: Canary = "", reason: Reason = "", output: Output = "text"
) -> None:
    """End the canary; the champion keeps the traffic."""
    _act(context, "abort", canary, reason, output)


@canary_app.command("wait")
def canary_wait(
    context: typer.Context,
    canary: Canary = "",
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds")] = 3600.0,
) -> None:
    """Wait for a canary to end: exit 0 promoted, 1 rolled back, 3 inconclusive, 124 timed out."""
    client = _client(context)
    name = canary or str(_newest_canary(client)["canary_id"])
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = client.get("/canaries", name)
        if found["state"] in WAIT_EXITS:
            say(f"{name}: {found['state']}: {found.get('reason') or ''}")
            raise typer.Exit(WAIT_EXITS[found["state"]])
        time.sleep(1.0)
    raise typer.Exit(TIMED_OUT)


@config_app.command("show")
def config_show(context: typer.Context) -> None:
    """The settings in force; secrets are not shown."""
    from sidecar.settings import shown_settings

    say_json(shown_settings(_settings(context)))


@config_app.command("check")
def config_check(context: typer.Context) -> None:
    """Read the settings and say whether they are sound."""
    from deploy.cli.settings_check import checked_settings

    checked_settings(context.obj)
    say("settings are sound")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the `sidecar` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any("\ud800" <= character <= "\udfff" for one in arguments for character in one):
        note("an argument holds bytes that are no UTF-8; type it again")
        return 2
    if isinstance(sys.stdout, TextIOWrapper):
        # A key is printed once: a terminal without its characters must not lose it.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(args=arguments)
    except SystemExit as done:  # how the CLI library ends, also after a wrong use (2)
        return done.code if isinstance(done.code, int) else 1
    except (SettingsError, InvalidKeyError) as error:
        note(str(error))
        return 2
    except (DeployError, IngestError, StateLockError, StoreError) as error:
        note(str(error))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
