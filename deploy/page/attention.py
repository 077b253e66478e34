"""What needs an operator: each with what is seen and what to do. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.admin.models import AuditOut, CanaryOut, StatusOut
from deploy.page.text import APPROVAL, STANDS, champion_of, clock, length, percent, short
from deploy.records import LEARNER_AWAY_S
from ingest.judge_watch import advice_on
from sidecar.hiding import hide_in_url
from sidecar.visible import counted

LATE_S = 60.0
"""Ingest looks at the bus every few seconds; a report that is older has no ingest behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One thing to look at."""

    level: str
    """`act`: something stands or is lost; `look`: it goes on, and a person should know."""
    what: str
    why: str
    to_do: str
    link: str = ""
    """A page with more; empty: none."""
    of_line: bool = True
    """The page is about the line of adapters that is looked at; False: `link` is whole."""

    @property
    def key(self) -> str:
        """Stays while the same thing needs somebody, also when its numbers change: the browser
        finds the card again by it."""
        same = re.sub(r"(?<=\bfor )[0-9]+ \w+|^[0-9,]+ \w+", "", self.what)
        return hashlib.sha256(same.encode(errors="replace")).hexdigest()[:12]


def needs(
    status: StatusOut,
    newest: CanaryOut | None,
    *,
    lost: int,
    now: float,
    paused: AuditOut | None = None,
) -> list[Need]:
    """Return what needs an operator, what stands first.

    newest: the newest canary, active or ended. lost: captures lost since the visitor looked.
    paused: the newest pause of the learner; None: it is older than the audit rows at hand.
    """
    found = [
        *_canary(status, newest),
        *_engine(status),
        *_ingest(status, now),
        *_judge(status, now),
        *_learner(status, paused, now),
        *_watch(status),
        *_other_lines(status),
        *_control(status),
        *_outside(status),
        *_losses(status, lost),
    ]
    return sorted(found, key=lambda one: one.level != "act")


def _canary(status: StatusOut, newest: CanaryOut | None) -> Iterator[Need]:
    canary = status.canary
    if canary is not None and canary.paused:
        yield Need(
            level="act",
            what=f"The trial of {short(canary.candidate)} is paused at {percent(canary.weight_bp)}",
            why=canary.reason or "",
            to_do="Resume or abort it: it decides nothing by itself.",
            link=f"/canaries/{canary.canary_id}",
        )
    elif canary is not None:
        yield from _held(canary)
    if canary is None and newest is not None and newest.state == "inconclusive":
        yield Need(
            level="look",
            what=f"The trial of {short(newest.candidate)} ended without a result",
            why=newest.reason or "",
            to_do="The champion stayed. More traffic or more held-out prompts would tell.",
            link=f"/canaries/{newest.canary_id}",
        )


def _held(canary: CanaryOut) -> Iterator[Need]:
    """Yield what holds a trial until a person or another service does something."""
    reason, name = canary.reason or "", short(canary.candidate)
    link = f"/canaries/{canary.canary_id}"
    approval = canary.approval
    if approval is not None and approval.answer != "allow" and reason.startswith(APPROVAL):
        yield Need(
            level="look" if approval.answer == "asked" else "act",
            what=f"The {approval.before} of {name} waits for the approval service",
            why=reason,
            to_do="Look at the service, and at [approval] in the settings; it is asked again."
            if approval.answer == "error"
            else "It goes on when the service allows it; a denial ends the trial.",
            link=link,
        )
    silent = {one.name for one in canary.metrics if one.outcome == "error"}
    has_card = any(f" stands: metric {one} " in reason for one in silent)
    if STANDS.match(reason) and not has_card:
        yield Need(
            level="act",
            what=f"The ramp of {name} stands at {percent(canary.weight_bp)}",
            why=reason,
            to_do="It goes on when that is over. Abort it if users should not have it meanwhile.",
            link=link,
        )


def _other_lines(status: StatusOut) -> Iterator[Need]:
    """Yield the paused trials of other lines, which nobody sees who looks at this one."""
    for line in status.lines:
        if line.project == status.project or line.canary is None or not line.canary_paused:
            continue
        whose = "all other projects" if line.project is None else line.project
        yield Need(
            level="act",
            what=f"The trial of {short(line.canary)} of {whose} is paused at "
            f"{percent(line.canary_weight_bp)}",
            why="",
            to_do="Resume or abort it: it decides nothing by itself.",
            link="/" if line.project is None else f"/project/{line.project}/",
            of_line=False,
        )


def _engine(status: StatusOut) -> Iterator[Need]:
    replicas = status.engine.replicas
    champion, missing = champion_of(status)
    for url, replica in replicas.items():
        shown = hide_in_url(url)
        if replica.away is not None:
            yield Need(
                level="act",
                what=f"vLLM at {shown} does not answer",
                why=replica.away,
                to_do="The other replicas answer its users."
                if len(replicas) > 1 and status.engine.away is None
                else "No replica answers: start vLLM again. A rollback works all the same.",
            )
        for name, why in replica.refused.items():
            yield Need(
                level="act",
                what=f"vLLM at {shown} does not serve {short(name)}",
                why=why,
                to_do="Correct vLLM's flags or the adapter, or roll back: users get the base model."
                if name == champion and missing
                else "Correct vLLM's flags or the adapter; another version answers meanwhile.",
                link="/adapters",
            )


def _ingest(status: StatusOut, now: float) -> Iterator[Need]:
    bus = status.bus
    if bus is None:
        if status.exchanges:
            yield Need(
                level="act",
                what="Nothing is known of ingest",
                why="it has not looked at the bus since this store was opened",
                to_do="Start `sidecar ingest`; its log says why it ended.",
            )
        return
    if now - bus.at > LATE_S:
        yield Need(
            level="act",
            what=f"Ingest has not been heard of for {length(now - bus.at)}",
            why=f"it looked at the bus last at {clock(bus.at, now)} UTC",
            to_do="Start `sidecar ingest`; records wait and are not lost meanwhile.",
        )
    elif bus.error:
        yield Need(
            level="act",
            what="Ingest cannot read the bus",
            why=bus.error,
            to_do="Start the brokers or make the file readable; records wait meanwhile.",
        )


def _judge(status: StatusOut, now: float) -> Iterator[Need]:
    judge = status.judge
    if judge is not None and judge.state in ("away", "rejected", "no_credit", "spent"):
        since = f" since {clock(judge.since, now)} UTC"
        to_do = (words := advice_on(judge.error))[:1].upper() + words[1:]
        what, to_do = {
            "away": (f"The judge gives no scores{since}", f"{to_do}; it is asked again and again."),
            "rejected": (
                f"The judge rejects every question{since}",
                f"{to_do}.",
            ),
            "no_credit": (f"The judge's account has no credit{since}", f"{to_do}."),
            "spent": (
                "The judge's budget is spent",
                "Wait, or raise the budget that is named and restart score and control.",
            ),
        }[judge.state]
        yield Need(
            level="act", what=what, why=judge.error, to_do=f"{to_do} {_waits(judge.waiting)}"
        )
    noise = status.judge_noise
    if noise is not None and noise.drift:
        yield Need(
            level="look",
            what="The judge is not as it was",
            why=noise.drift,
            to_do="`sidecar judge noise` has the figures.",
        )
    gate = status.gate_judge
    if gate is not None and gate.warning:
        yield Need(
            level="look",
            what="The gate's judge also gives the reward",
            why=gate.warning,
            to_do="Name another one in [gate_judge].",
        )
    for one in status.verifiers:
        if one.fails:
            yield Need(
                level="act",
                what=f"The verifier {one.name} fails",
                why=one.error,
                to_do=_waits(one.waiting),
            )
    if status.pile_up is not None:
        yield Need(
            level="look",
            what="No new group begins",
            why=status.pile_up.why,
            to_do=f"{status.pile_up.to_do[:1].upper()}{status.pile_up.to_do[1:]}.",
            link="/funnel",
        )
    if status.sampling is not None:
        yield Need(
            level="look",
            what="No further answers are sampled",
            why=status.sampling.why,
            to_do="They are again when this is over.",
        )


def _waits(groups: int) -> str:
    return f"{counted(groups, 'group waits', 'groups wait')} for it."


def _learner(status: StatusOut, paused: AuditOut | None, now: float) -> Iterator[Need]:
    learner, run = status.learner, status.learner.last_run
    if learner.paused:
        yield Need(
            level="look",
            what="The learner is paused",
            why="an operator paused it, or a rollback did"
            if paused is None
            else f"since {clock(paused.at, now)} UTC, by {paused.actor}: {paused.reason}",
            to_do="Resume it when its next run should start.",
            link="/runs",
        )
    told = learner.schedule
    running = run is not None and run.ended_at is None
    if told is not None and now - told.at > LEARNER_AWAY_S and not running:
        yield Need(
            level="act",
            what=f"The learner has not been heard of for {length(now - told.at)}",
            why=f"it told of its schedule last at {clock(told.at, now)} UTC",
            to_do="Start `sidecar learn`; groups wait and are not lost meanwhile.",
            link="/runs",
        )
    if run is not None and run.status in ("failed", "held"):
        held = run.status == "held"
        yield Need(
            level="act",
            what="The reward watch holds the learner" if held else "The newest run failed",
            why=run.reason or "",
            to_do="`sidecar learner watch` has the figures."
            if held
            else "The runbook has the error among its symptoms; the groups wait.",
            link=f"/runs/{run.run_id}",
        )


def _watch(status: StatusOut) -> Iterator[Need]:
    """Say that a run would be held, before one is tried."""
    run = status.learner.last_run
    if status.watch_holds and (run is None or run.status != "held"):
        yield Need(
            level="look",
            what="The reward watch would hold a run that began now",
            why=status.watch_holds,
            to_do="`sidecar learner watch` has the figures.",
        )


def _control(status: StatusOut) -> Iterator[Need]:
    for name, loop in status.control.items():
        if loop.failures:
            yield Need(
                level="act",
                what=f"Control's loop {name} fails",
                why=loop.error or "",
                to_do=f"It failed {counted(loop.failures, 'time')} in a row, and is tried again.",
            )


def _outside(status: StatusOut) -> Iterator[Need]:
    for one in status.hooks:
        if one.tries:
            yield Need(
                level="look",
                what=f"The web hook {one.name} does not take events",
                why=one.error,
                to_do="It is tried again; `sidecar hooks test` tries it now.",
            )
    for metric in () if status.canary is None else status.canary.metrics:
        if metric.outcome == "error":
            yield Need(
                level="look" if metric.mode == "dry_run" else "act",
                what=f"The metric {metric.name} gives no answer",
                why=metric.why,
                to_do="The ramp stands while it is so: an error rolls nothing back."
                if metric.errors >= metric.errs_at and metric.mode != "dry_run"
                else "It is asked again.",
            )


def _losses(status: StatusOut, lost: int) -> Iterator[Need]:
    if lost > 0:
        yield Need(
            level="look",
            what=f"{counted(lost, 'capture')} lost since you last looked",
            why="agents got their answers; the records of them are gone",
            to_do="The funnel has the reasons.",
            link="/funnel",
        )
    if status.dead_letters:
        yield Need(
            level="look",
            what=f"{counted(status.dead_letters, 'record')} could not be stored",
            why="they are kept whole as dead letters",
            to_do="See the runbook.",
            link="/funnel",
        )
