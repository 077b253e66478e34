"""`sidecar runs`: the training runs, where one is, and what each of its steps did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.context import Project, admin_client, show
from deploy.cli.output import GivenReason, Output, Reason, group, note, say

if TYPE_CHECKING:
    from deploy.admin.client import AdminClient

runs_app = group("Training runs and their optimiser steps.")

RunId = Annotated[str, typer.Argument(help="default: the newest run")]


@runs_app.command("ls")
def runs_ls(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many, the newest first")] = 20,
    project: Project = None,
    output: Output = "text",
) -> None:
    """The newest runs, one line each; `runs show` has one with its counts and steps."""
    show(admin_client(context, project), output, "/runs", params={"limit": limit})


@runs_app.command("show")
def runs_show(
    context: typer.Context, run_id: RunId = "", project: Project = None, output: Output = "text"
) -> None:
    """One run: where it is, what it took and left out, and each of its steps."""
    client = admin_client(context, project)
    show(client, output, "/runs", run_id or _newest(client))


@runs_app.command("plot")
def runs_plot(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="the PNG to write")],
    run_id: RunId = "",
    project: Project = None,
) -> None:
    """Draw the steps of a run as a PNG."""
    from learner.progress.export import draw

    client = admin_client(context, project)
    run = client.get("/runs", run_id or _newest(client))
    if not run["steps"]:
        note(f"run {run['run_id']} has no step yet")
        raise typer.Exit(1)
    try:
        draw([one["figures"] for one in run["steps"]], out, title=f"run {run['run_id']}")
    except ImportError:
        note("there is no plot: matplotlib is not installed (`pip install matplotlib`)")
        raise typer.Exit(1) from None
    say(f"wrote {out}")


def _newest(client: AdminClient) -> str:
    """Return the id of the newest run. Raises: AdminApiError; typer.Exit."""
    items = client.get("/runs", limit=1)["items"]
    if not items:
        note("the learner has not run yet")
        raise typer.Exit(1)
    return str(items[0]["run_id"])


# `sidecar learner`: steer the learner by hand, and see what the reward watch says of it.

learner_app = group("The learner, and what holds it.")


def _act(
    context: typer.Context, action: str, reason: str | None, project: str | None, output: str
) -> None:
    client = admin_client(context, project)
    # A pause never fails on a race; the others must know the state that they change.
    etag = None if action == "pause" else client.etag("/learner")
    body = {} if reason is None else {"reason": reason}
    show(client, output, "/learner", action, method="POST", body=body, etag=etag)


def _add_switch(action: str, doc: str) -> None:
    def switch(
        context: typer.Context,
        reason: Reason = None,
        project: Project = None,
        output: Output = "text",
    ) -> None:
        _act(context, action, reason, project, output)

    switch.__doc__ = doc
    learner_app.command(action)(switch)


_add_switch("pause", "Start no run until it is resumed.")
_add_switch("resume", "Follow the schedule again.")
_add_switch("run", "Start a run now, whatever the schedule says.")


@learner_app.command("override")
def learner_override(
    context: typer.Context, reason: GivenReason, project: Project = None, output: Output = "text"
) -> None:
    """Let runs go on though the reward watch holds them, while this champion serves."""
    _act(context, "override", reason, project, output)


@learner_app.command("watch")
def learner_watch(context: typer.Context, project: Project = None, output: Output = "text") -> None:
    """What the reward watch says of the champion, with the figures of each adapter."""
    show(admin_client(context, project), output, "/watch")
