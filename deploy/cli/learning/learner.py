"""`sidecar learner`: steer the learner by hand, and see what the reward watch says of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from deploy.cli.context import Project, admin_client
from deploy.cli.learning.runs import SILENT_S
from deploy.cli.output import GivenReason, Output, Reason, note, print_found, say, say_json
from deploy.cli.times import shown_length
from deploy.records import LEARNER_AWAY_S

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
