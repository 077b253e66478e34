"""`sidecar runs`: the training runs, where one is, and what each of its steps did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.context import Project, admin_client
from deploy.cli.listings.rows import runs_table
from deploy.cli.output import Output, found_lines, note, print_table, say, say_json
from deploy.cli.times import shown_length

runs_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Training runs and their optimiser steps."
)

Figures = Mapping[str, Any]
RunId = Annotated[str, typer.Argument(help="default: the newest run")]
LONG = ("settings", "metrics", "progress", "held", "deaths")
"""Fields of a run that are left out in text, or said in words."""
SILENT_S = 30.0
"""A run without a heartbeat for so long was killed (`learner.runs.runs.LEASE_S`)."""
WIDTH = 10
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "reward": ("reward_mean", "{:.3f}".format),
    "spread": ("reward_spread", "{:.3f}".format),
    "groups": ("groups", "{:,}".format),
    "answers": ("answers", "{:,}".format),
    "masked": ("masked_answers", "{:,}".format),
    "tokens/a": ("answer_tokens", "{:.1f}".format),
    "loss": ("loss", "{:+.5f}".format),
    "kl": ("approx_kl", "{:.5f}".format),
    "kl base": ("kl_base", "{:.5f}".format),
    "drift": ("drift", "{:.4f}".format),
    "entropy": ("entropy", "{:.3f}".format),
    "clipped": ("clip_share", "{:.2%}".format),
    "grad": ("grad_norm", "{:.3g}".format),
    "update": ("update_norm", "{:.3g}".format),
    "seconds": ("seconds", "{:.1f}".format),
    "tokens/s": ("tokens_per_s", "{:,.0f}".format),
    "memory": ("peak_memory_bytes", lambda size: f"{size / 1e6:,.0f} MB"),
}
"""Heading -> the figure below it, and how it is written."""
REWARD_NOTE = "reward: of each step's own groups, sampled before the run; it is no learning curve"


@runs_app.command("ls")
def runs_ls(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many, the newest first")] = 20,
    project: Project = None,
    output: Output = "text",
) -> None:
    """The newest runs, one line each; `runs show` has one with its counts and steps."""
    found = admin_client(context, project).get("/runs", limit=limit)
    print_table(found, output, runs_table)


@runs_app.command("show")
def runs_show(
    context: typer.Context, run_id: RunId = "", project: Project = None, output: Output = "text"
) -> None:
    """One run: where it is, what it took and left out, and each of its steps."""
    run, steps = _read(context, run_id, project)
    if output == "json":
        say_json({**run, "steps": steps})
        return
    for line in found_lines(_short(run), time.time()):
        say(line)
    for line in step_lines([one["figures"] for one in steps]):
        say(line)


@runs_app.command("plot")
def runs_plot(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="the PNG to write")],
    run_id: RunId = "",
    project: Project = None,
) -> None:
    """Draw the steps of a run as a PNG."""
    from learner.progress.plot import draw

    run, steps = _read(context, run_id, project)
    if not steps:
        note(f"run {run['run_id']} has no step yet")
        raise typer.Exit(1)
    try:
        draw([one["figures"] for one in steps], out, title=f"run {run['run_id']}")
    except ImportError:
        note("there is no plot: matplotlib is not installed (`pip install matplotlib`)")
        raise typer.Exit(1) from None
    say(f"wrote {out}")


def _read(
    context: typer.Context, run_id: str, project: str | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a run and its steps, the first first. Raises: AdminApiError; typer.Exit."""
    client = admin_client(context, project)
    if run_id:
        run = client.get("/runs", run_id)
    else:
        items = client.get("/runs", limit=1)["items"]
        if not items:
            note("the learner has not run yet")
            raise typer.Exit(1)
        run = items[0]
    steps: list[dict[str, Any]] = []
    place: dict[str, str] = {}
    while True:
        page = client.get("/runs", run["run_id"], "steps", limit=200, **place)
        steps += page["items"]
        for damaged in page["damaged"]:
            note(damaged)
        if page["next_cursor"] is None:
            return run, steps[::-1]
        place = {"cursor": page["next_cursor"]}


def _short(run: Figures) -> dict[str, Any]:
    kept = {key: value for key, value in run.items() if key not in LONG}
    killed = killed_words(run, time.time())
    finished = run.get("status") == "finished"  # its last phase would look like its present one
    words = {
        "progress": "" if finished else progress_words(run.get("progress")),
        "resumed": resumed_words(run.get("deaths")),
        "killed": killed,
    }
    return {**kept, **{key: said for key, said in words.items() if said}}


def progress_words(found: object) -> str:
    """Say where a run is; "" when nothing is known of it. found: JSON of the admin API. Pure."""
    if not isinstance(found, dict):
        return ""
    from learner.progress.estimate import Progress, words  # `--help` waits for no settings

    try:
        return words(Progress(**{key: value for key, value in found.items() if key != "at"}))
    except (TypeError, ValueError):  # of another version, or damaged
        return str(found.get("phase", ""))


def resumed_words(deaths: object) -> str:
    """Say where a run was resumed; "" when it never was. deaths: JSON of the admin API. Pure."""
    from learner.resume.rule import resumed_words as said

    return said(deaths).removeprefix("resumed ")


def killed_words(run: Figures, now: float) -> str:
    """Say that a run which has not ended stands still; "" when it does not. now: Unix seconds.

    One that left its work to the next start says so itself, by its reason.
    """
    beat = run.get("heartbeat_at")
    if run.get("reason"):
        return ""
    if run.get("status") != "running" or not isinstance(beat, int | float) or now - beat < SILENT_S:
        return ""
    return f"no sign of it for {shown_length(now - beat)}; the next start goes on with it"


def step_lines(steps: Sequence[Figures]) -> Iterator[str]:
    """Yield a table of a run's steps. Pure."""
    if not steps:
        yield "no step is done"
        return
    shown = [name for name, (key, _) in COLUMNS.items() if any(key in one for one in steps)]
    yield f"{'step':>5}" + "".join(f"{name:>{WIDTH}}" for name in shown)
    for one in steps:
        cells = (_cell(one.get(COLUMNS[name][0]), COLUMNS[name][1]) for name in shown)
        yield f"{one.get('step', '?'):>5}" + "".join(f"{text:>{WIDTH}}" for text in cells)
    if len(steps) > 1:
        yield REWARD_NOTE
    for out, alike in groupby(steps, lambda one: left_out_words(one.get("left_out"))):
        numbers = [one.get("step", "?") for one in alike]
        more = f"s {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f" {numbers[0]}"
        if out:
            yield f"step{more} left out: {out}"


def left_out_words(found: object) -> str:
    """Say what a step left out, by reason; "" when nothing. found: JSON of the admin API. Pure."""
    if not isinstance(found, dict):  # of an older version, or damaged
        return ""
    from sidecar.plurals import counted

    words = []
    for key, number in found.items():
        what, _, reason = key.partition(".")
        if what in ("answers", "groups") and isinstance(number, int):
            words.append(f"{counted(number, what.removesuffix('s'))} {reason}")
    return ", ".join(words)


def _cell(value: object, form: Callable[[Any], str]) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return form(value) if known else "-"
