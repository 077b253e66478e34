"""`sidecar runs`: the training runs, where one is, and what each of its steps did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from deploy.cli.context import Project, admin_client
from deploy.cli.output import (
    GivenReason,
    Output,
    Reason,
    found_lines,
    note,
    print_found,
    print_table,
    runs_table,
    say,
    say_json,
    shown_length,
    shown_time,
)
from deploy.records import LEARNER_AWAY_S
from sidecar.records import BASE
from sidecar.visible import counted

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
    from learner.progress.export import draw

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
    from learner.progress.watch import (
        Progress,
        words,  # `--help` waits for no settings
    )

    try:
        return words(Progress(**{key: value for key, value in found.items() if key != "at"}))
    except (TypeError, ValueError):  # of another version, or damaged
        return str(found.get("phase", ""))


def resumed_words(deaths: object) -> str:
    """Say where a run was resumed; "" when it never was. deaths: JSON of the admin API. Pure."""
    from learner.resume import resumed_words as said

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
    from sidecar.visible import counted

    words = []
    for key, number in found.items():
        what, _, reason = key.partition(".")
        if what in ("answers", "groups") and isinstance(number, int):
            words.append(f"{counted(number, what.removesuffix('s'))} {reason}")
    return ", ".join(words)


def _cell(value: object, form: Callable[[Any], str]) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return form(value) if known else "-"


# `sidecar learner`: steer the learner by hand, and see what the reward watch says of it.

learner_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The learner, and what holds it."
)


def _act(
    context: typer.Context, action: str, reason: str | None, project: str | None, output: str
) -> Mapping[str, Any]:
    client = admin_client(context, project)
    # A pause never fails on a race; the others must know the state that they change.
    etag = None if action == "pause" else client.etag("/learner")
    body = {} if reason is None else {"reason": reason}
    found: Mapping[str, Any] = client.post("/learner", action, body=body, etag=etag)
    # What the schedule said last was decided before this.
    dated = ("schedule",) if output == "text" else ()
    print_found({key: value for key, value in found.items() if key not in dated}, output)
    return found


@learner_app.command("pause")
def learner_pause(
    context: typer.Context, reason: Reason = None, project: Project = None, output: Output = "text"
) -> None:
    """Start no run until it is resumed."""
    _act(context, "pause", reason, project, output)


@learner_app.command("resume")
def learner_resume(
    context: typer.Context, reason: Reason = None, project: Project = None, output: Output = "text"
) -> None:
    """Follow the schedule again."""
    _act(context, "resume", reason, project, output)


@learner_app.command("run")
def learner_run(
    context: typer.Context, reason: Reason = None, project: Project = None, output: Output = "text"
) -> None:
    """Start a run now, whatever the schedule says."""
    found = _act(context, "run", reason, project, output)
    if away := away_words(found, time.time()):
        note(away)


@learner_app.command("override")
def learner_override(
    context: typer.Context, reason: GivenReason, project: Project = None, output: Output = "text"
) -> None:
    """Let runs go on though the reward watch holds them, while this champion serves."""
    _act(context, "override", reason, project, output)


@learner_app.command("watch")
def learner_watch(context: typer.Context, project: Project = None, output: Output = "text") -> None:
    """What the reward watch says of the champion, with the figures of each adapter."""
    found = admin_client(context, project).get("/watch")
    if output == "json":
        say_json(found)
        return
    for line in watch_lines(found):
        say(line)


def away_words(learner: Mapping[str, Any], now: float) -> str:
    """Say that no `sidecar learn` will see the request to run; "" when one was heard of. Pure.

    learner: JSON of the admin API. now: Unix seconds.
    """
    told, run = learner.get("schedule"), learner.get("last_run")
    if run is not None and run["ended_at"] is None and now - run["heartbeat_at"] < SILENT_S:
        return ""
    if told is not None and now - told["at"] <= LEARNER_AWAY_S:
        return ""
    heard = "yet" if told is None else f"for {shown_length(now - told['at'])}"
    return (
        f"no `sidecar learn` has been heard of {heard}: the run begins when one is started "
        "(`sidecar up` does that too); `sidecar learn --once` trains now"
    )


KINDS = ("refusal", "clarifying", "invalid_call", "repetition", "empty", "cut")


def watch_lines(found: Mapping[str, Any]) -> Iterator[str]:  # Any: JSON of the admin API
    """Yield the text of what the admin API says of the watch. Pure."""
    if found["held"]:
        yield f"The reward watch holds the learner; {found['champion']} is champion."
    else:
        yield f"The reward watch does not hold the learner; {found['champion']} is champion."
    for one in found["findings"]:
        waived = " (waived)" if one["check"] in found["waived"] else ""
        yield f"  {one['check']}{waived}: {one['text']}"
    for name in found["damaged"]:
        yield f"  What was stored of {name} is damaged and is made anew from its answers."
    names = ("answers", *KINDS, "tokens", "groups", "length corr", "signals", "feedback")
    rows = [[*names, "adapter"]]
    for one in found["adapters"]:
        shares = [_share(one["shares"].get(kind)) for kind in KINDS]
        numbers = [
            f"{one['answers']:,}",
            *shares,
            _number(one["mean_tokens"], ".0f"),
            f"{one['groups']:,}",
            _number(one["length_correlation"], "+.2f"),
            _share(one["signals_share"]),
            _number(one["feedback_mean"], "+.2f"),
        ]
        lost = " (damaged, and its answers are deleted)" if one["lost"] else ""
        rows.append([*numbers, f"{one['adapter']}{lost}"])
    widths = [max(len(row[k]) for row in rows) for k in range(len(names))]
    for *figures, adapter in rows:
        shown = map(str.rjust, figures, widths)
        yield "  ".join(["", *shown, adapter])
    for check, why in found["unknown"].items():
        yield f"Not checked: {check}: {why}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# The line of `sidecar status` about budgets: what is used of each limit. Pure.

DOLLARS = "US dollars"


class Budget(msgspec.Struct):
    setting: str
    what: str
    used: float
    limit: float
    period: str


def budget_lines(budgets: Sequence[Budget]) -> Iterator[str]:
    """Yield what is used of the budgets that are set; nothing where none is."""
    shown = [
        f"{_of(one)} {'today' if one.period == 'day' else 'this hour'} ({one.setting})"
        for one in budgets
    ]
    if shown:
        yield f"Budgets (UTC): {'; '.join(shown)}."


def _of(one: Budget) -> str:
    if one.what != DOLLARS:
        return f"{one.used:,.0f} of {one.limit:,.0f} {one.what}"
    used = "under $0.01" if 0 < one.used < 0.01 else f"${one.used:,.2f}"
    limit = f"${one.limit:,.2f}" if one.limit >= 0.01 else f"${one.limit:g}"
    return f"{used} of {limit} for judges"


# The sentences of `sidecar status` about the other lines of adapters. Pure.


class OneLine(msgspec.Struct):
    project: str | None
    champion: str
    canary: str | None
    canary_weight_bp: int
    learner_paused: bool


def other_lines(lines: Sequence[OneLine], project: str | None) -> Iterator[str]:
    """Say of each line of adapters but that of `project` what answers it."""
    for one in lines:
        if one.project == project:
            continue
        whose = "All other projects" if one.project is None else f"Project {one.project}"
        text = f"{whose}: {name_of(one.champion)}"
        if one.canary is not None:
            text += f", and the canary {one.canary} for {percent(one.canary_weight_bp)}"
        paused = "; its learner is paused" if one.learner_paused else ""
        more = "" if one.project is None else f" (`sidecar status --project {one.project}`)"
        yield f"{text}{paused}{more}."


def name_of(adapter: str) -> str:
    return "the base model" if adapter == BASE else adapter


def percent(basis_points: int) -> str:
    return f"{basis_points / 100:g}%"


# The lines of `sidecar status` about verifiers: last good, last error, who waits. Pure.


class Verifier(msgspec.Struct):
    """One of `verifiers` of `GET /admin/v1/status`."""

    name: str
    kind: str
    fails: bool
    good_at: float | None
    error_at: float | None
    error: str
    waiting: int


def verifier_lines(verifiers: Sequence[Verifier], now: float) -> Iterator[str]:
    """Yield a line for each verifier. now: Unix seconds."""
    for one in verifiers:
        good = "never" if one.good_at is None else shown_time(one.good_at, now)
        said = f"FAILS: {one.error}" if one.fails else "works"
        if one.good_at is None and one.error_at is None:
            said = "has not been tried yet"
        groups = counted(one.waiting, "group waits", "groups wait")
        waits = f" {groups} for it." if one.waiting else ""
        yield f"Verifier {one.name} ({one.kind}): {said}. Last good: {good}.{waits}"
        if one.error_at is not None and not one.fails:
            yield f"  Last error {shown_time(one.error_at, now)}: {one.error}"
