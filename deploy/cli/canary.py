"""`sidecar canary`: see a canary, steer it by hand, follow it, or wait for its end."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.context import Project, admin_client, show
from deploy.cli.output import Output, Reason, group, note, say, say_either, say_json
from deploy.errors import DeployError, UnknownCanaryError
from deploy.records import version_of
from deploy.text import iso
from sidecar.processes import INTERRUPTED

if TYPE_CHECKING:
    from deploy.admin.client import AdminClient


# Look at a canary until it has ended, and say in lines what has changed between two looks.

Json = Mapping[str, Any]

EXITS = {"promoted": 0, "rolled_back": 1, "rejected": 1, "inconclusive": 3, "withdrawn": 3}
"""State of a canary that has ended -> exit code."""
EVERY_S = 1.0
QUIET_S = 60.0
"""Time after which a canary without a change is told again."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def looks(
    client: AdminClient,
    canary: str,
    timeout_s: float | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Json]:
    """Yield the canary each second. The last one has ended, unless the time was over before.

    canary: its id. timeout_s: None: without an end. One that has ended is seen with 0 too.
    """
    deadline = None if timeout_s is None else clock() + timeout_s
    while True:
        found = client.get("/canaries", canary)
        yield found
        if has_ended(found):
            return
        left = math.inf if deadline is None else deadline - clock()
        if left <= 0:
            return
        sleep(min(EVERY_S, left))


def has_ended(canary: Json) -> bool:
    return canary.get("state") in EXITS


class Changes:
    """Decides which looks are told: those that differ from the last one that was, and one in
    QUIET_S. A reason whose numbers alone have moved ("12 of 50 exchanges") is no change: it would
    be told each second."""

    def __init__(self) -> None:
        self._told: tuple[Any, ...] | None = None
        self._at = 0.0

    def is_told(self, canary: Json, now: float) -> bool:
        """now: seconds of any clock that only moves forward."""
        seen = (
            *(canary.get(name) for name in ("state", "paused", "step", "weight_bp")),
            _NUMBER.sub("0", str(canary.get("reason") or "")),
        )
        if seen == self._told and now - self._at < QUIET_S:
            return False
        self._told, self._at = seen, now
        return True


def progress_line(canary: Json, at: float) -> str:
    """Say where a canary is. at: Unix seconds. Pure."""
    parts = [str(canary.get("state", "-")) + (" (paused)" if canary.get("paused") else "")]
    steps, step, weight_bp = (canary.get(name) for name in ("steps", "step", "weight_bp"))
    if canary.get("state") == "ramping" and isinstance(step, int) and isinstance(steps, list):
        parts.append(f"step {step + 1} of {len(steps)}")
    if isinstance(weight_bp, int) and not has_ended(canary):
        parts.append(f"{weight_bp / 100:g}% of the sessions")
    why = f": {canary['reason']}" if canary.get("reason") else ""
    name = version_of(str(canary.get("candidate", "-")))
    return f"{iso(int(at))}  {name}  {', '.join(parts)}{why}"


@contextmanager
def interrupt_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in the body, and print nothing by itself."""
    # Only the main thread may set a handler; Python delivers the signal to no other thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


canary_app = group("The canary of a new adapter.")
CanaryId = Annotated[str, typer.Argument(help="its id; default: the newest")]
NEEDS_ETAG = ("resume", "promote", "skip-step")
NEWEST = 20
"""Canaries among which the newest one is looked for that is or was tried: others may wait."""
NOT_ASKED = 4
TIMED_OUT = 124


def _newest_canary(client: AdminClient) -> str:
    items = client.get("/canaries", limit=NEWEST)["items"]
    if not items:
        raise UnknownCanaryError("no adapter has been on canary yet: see `sidecar doctor`")
    tried = (one for one in items if one.get("state") not in ("queued", "withdrawn"))
    return str(next(tried, items[0])["canary_id"])


@canary_app.command("get")
def canary_get(
    context: typer.Context, canary: CanaryId = "", project: Project = None, output: Output = "text"
) -> None:
    """The newest canary, or the one named."""
    client = admin_client(context, project)
    show(client, output, "/canaries", canary or _newest_canary(client))


@canary_app.command("start")
def canary_start(
    context: typer.Context,
    version: str,
    reason: Reason = None,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Try a version, also again: such as v7, one that ended inconclusive or was aborted.

    While another canary runs it is queued, in the place of the one that waits.
    Not the champion, and no version whose files are banned (`sidecar adapters ls` says so)."""
    body = {"version": version} if reason is None else {"version": version, "reason": reason}
    client = admin_client(context, project)
    show(client, output, "/canaries", method="POST", body=body)
    with suppress(DeployError):  # the canary has begun: nothing that only advises may fail
        judge = client.get("/status").get("gate_judge")
        if judge is not None and not judge.get("model"):
            note("no judge is set: it waits at its gate; name one in judge.model, restart control")


def _add_action(action: str, doc: str) -> None:
    def act(
        context: typer.Context,
        canary: CanaryId = "",
        reason: Reason = None,
        project: Project = None,
        output: Output = "text",
    ) -> None:
        client = admin_client(context, project)
        name = canary or _newest_canary(client)
        # Pause and abort never fail on a race; the others must know the state that they change.
        etag = client.etag("/canaries", name) if action in NEEDS_ETAG else None
        body = {} if reason is None else {"reason": reason}
        show(client, output, "/canaries", name, action, method="POST", body=body, etag=etag)

    act.__doc__ = doc
    canary_app.command(action)(act)


_add_action("pause", "Hold the canary at its present share of the traffic.")
_add_action("resume", "Continue a paused canary.")
_add_action("promote", "Make the candidate champion now, by hand.")
_add_action(
    "abort", "End the canary; the champion keeps the traffic. A queued one leaves the queue."
)
_add_action(
    "skip-step",
    "End the present step of the ramp now, whatever it has lasted and seen.\n\n"
    "The guards go on, and a promotion still needs its evidence.",
)


@canary_app.command("wait")
def canary_wait(
    context: typer.Context,
    canary: CanaryId = "",
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds")] = 3600.0,
    output: Output = "text",
    project: Project = None,
) -> None:
    """Wait for a canary to end; the exit code says how. 4: no admin API, or no such canary."""

    def tell(found: Mapping[str, Any]) -> None:
        if has_ended(found):
            said = f"{found.get('canary_id')}: {found['state']}: {found.get('reason') or ''}"
            say_either(output, found, [said])

    _follow(context, canary, timeout_s, project, tell)


@canary_app.command("watch")
def canary_watch(
    context: typer.Context,
    canary: CanaryId = "",
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", help="seconds; default: until it ends")
    ] = None,
    output: Output = "text",
    project: Project = None,
) -> None:
    """Follow a canary until it ends: a line for each change, and one a minute without any.

    The exit code is that of `sidecar canary wait`; Ctrl-C ends it with 130, and the canary goes
    on. With `-o json` each line is an object, `seen_at` says when."""
    changes = Changes()

    def tell(found: Mapping[str, Any]) -> None:
        if not changes.is_told(found, time.monotonic()):
            return
        now = time.time()
        if output == "json":
            say_json({"seen_at": now, **found}, indent=None)
        else:
            say(progress_line(found, now))

    try:
        with interrupt_raises():
            _follow(context, canary, timeout_s, project, tell)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _follow(
    context: typer.Context,
    canary: str,
    timeout_s: float | None,
    project: str | None,
    tell: Callable[[Mapping[str, Any]], None],
) -> None:
    """Tell each look at a canary until it ends. Raises: typer.Exit, with the code that says how."""
    try:
        client = admin_client(context, project)
        name = canary or _newest_canary(client)
        for found in looks(client, name, timeout_s):
            tell(found)
            if has_ended(found):
                raise typer.Exit(EXITS[found["state"]])
    except DeployError as error:  # exit 1 would say that the canary was rolled back
        note(str(error))
        raise typer.Exit(NOT_ASKED) from error
    note(f"canary {name} has not ended after {timeout_s:g} s; `sidecar canary get` says why")
    raise typer.Exit(TIMED_OUT)
