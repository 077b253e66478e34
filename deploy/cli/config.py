"""`sidecar config`: write a first settings file, show the settings in force, check them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.context import settings_of
from deploy.cli.output import Output, group, note, say, say_json

if TYPE_CHECKING:
    from deploy.preflight.peers import Finding
    from sidecar.settings import Settings

config_app = group("Settings.")


@config_app.command("init")
def config_init(
    context: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(help="default: the file of --config, else ./sidecar.toml")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite a file that exists")] = False,
) -> None:
    """Write a settings file with a comment for each setting, readable by its owner only; with
    --force by the group too that could read it before."""
    from deploy.cli.files import new_file, replace_file
    from deploy.preflight.settings import first_settings

    target = path or context.obj or Path("sidecar.toml")
    text = first_settings()
    try:
        if force:
            replace_file(target, text, rights=0o770)
        else:
            with new_file(target) as file:
                file.write(text)
    except FileExistsError:
        note(f"{target} exists already and is left as it is; name another file, or use --force")
        raise typer.Exit(1) from None
    except OSError as error:
        note(
            f"{target} cannot be written ({error.strerror}); nothing was changed; name a file in "
            "a writable folder that has room"
        )
        raise typer.Exit(1) from error
    say(
        f"wrote {target}: set serving.upstreams, serving.model and, to learn, "
        "serving.base_model_path; ask `sidecar config check --online`, then run `sidecar up`"
    )


@config_app.command("show")
def config_show(context: typer.Context) -> None:
    """The settings in force; secrets are not shown."""
    from sidecar.settings import shown_settings

    say_json(shown_settings(settings_of(context)))


@config_app.command("check")
def config_check(
    context: typer.Context,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="also ask vLLM, judge (one paid call), verifiers; look at folders, ports, device",
        ),
    ] = False,
    learner: Annotated[
        bool,
        typer.Option(
            "--learner",
            help="look whether runs can train on this machine, also with learner.schedule = "
            '"manual"; without --online at nothing else',
        ),
    ] = False,
    output: Output = "text",
) -> None:
    """Read the settings and say whether they are sound. Starts and changes nothing."""
    from deploy.preflight.settings import advice, checked_settings, will_not_happen
    from learner.schedule.rule import shown_cron

    settings = checked_settings(context.obj)
    for one in advice(settings):
        note(f"warning: {one}")
    found = _findings(settings, online=online, learner=learner)
    fails = any(finding.level == "error" for finding in found)
    if output == "json":
        items = [{"level": one.level, "setting": one.setting, "text": one.text} for one in found]
        say_json({"sound": not fails, "online": online, "findings": items})
        raise typer.Exit(int(fails))
    if times := shown_cron(settings.learner, time.time()):
        note(f"to know: learner.cron runs next {times}")
    if not online and not learner:
        for one in will_not_happen(settings):
            note(f"to know: {one}")
        say("settings are sound")
        return
    for finding in found:
        say(f"{finding.level}: {finding.setting}: {finding.text}")
    if fails:
        note("these settings cannot run here")
        raise typer.Exit(1)
    say(f"settings are sound, and {'can run' if online else 'runs can train'} here")


def _findings(settings: Settings, *, online: bool, learner: bool) -> Sequence[Finding]:
    import asyncio

    from deploy.preflight.settings import learner_findings, preflight, runs_already

    if not online:
        return learner_findings(settings) if learner else ()
    note("asks vLLM, the judge and the verifiers, which may take a minute")
    running = runs_already(settings)
    return asyncio.run(preflight(settings, running=running, learner=learner))
