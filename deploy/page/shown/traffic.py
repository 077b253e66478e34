"""Do the guards see traffic: how much is captured, how far ingest is, what each arm got. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.admin.models import CanaryOut, StatusOut
from deploy.admin.out import FunnelOut, StageOut
from deploy.page.shown.times import length
from deploy.page.shown.words import share
from sidecar.plurals import counted

LOST, SKIPPED = "lost_", "skipped_"
_COUNTED = (
    ("replies", "replies"),
    ("errors", "failed"),
    ("cuts", "cut by the client"),
    ("short", "cut short or empty"),
)
"""Key of an arm's counts in the evidence -> how the page calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One line: is this guard fed?"""

    what: str
    figure: str
    good: bool | None
    """None: nothing to judge it by."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """One kind of reply, in both arms."""

    what: str
    candidate: str
    champion: str


def lost_captures(funnel: FunnelOut) -> int:
    """Captures lost since the store was made."""
    stage = _stage(funnel, "requests")
    return sum(number for why, number in stage.ended.items() if why.startswith(LOST))


def sights(funnel: FunnelOut, status: StatusOut, now: float, *, lost: int) -> list[Sight]:
    """lost: captures lost since the visitor looked; older losses are no news."""
    return [*_captures(_stage(funnel, "requests"), lost), _ingest(status, now)]


def _captures(stage: StageOut, lost_now: int) -> Iterator[Sight]:
    meant = stage.passed + sum(stage.ended.values())
    if not meant:
        yield Sight(what="Captured", figure="no request yet", good=None, note="")
        return
    lost = sum(number for why, number in stage.ended.items() if why.startswith(LOST))
    skipped = sum(number for why, number in stage.ended.items() if why.startswith(SKIPPED))
    yield Sight(
        what="Captured",
        figure=f"{share(stage.passed / meant)} of {counted(meant, 'request')}",
        good=lost_now == 0,
        note=f"{lost:,} lost, {skipped:,} left out on purpose, since the store was made",
    )


def _ingest(status: StatusOut, now: float) -> Sight:
    bus = status.bus
    if bus is None:
        return Sight(what="Ingest", figure="not heard of yet", good=None, note="")
    late = now - bus.at > 60.0
    if bus.lag is None:
        return Sight(what="Ingest", figure="cannot read the bus", good=False, note=bus.error)
    return Sight(
        what="Ingest",
        figure=f"{counted(bus.lag, 'record')} behind",
        good=not late,
        note=f"{length(now - bus.at)} ago" if late else "",
    )


def arm_rows(canary: CanaryOut | None, evidence: Mapping[str, Any]) -> list[ArmRow]:
    """What the two arms' users got in the present step; empty while there is no ramp."""
    if canary is None or canary.state != "ramping":
        return []
    step = evidence.get(f"step_{canary.step + 1}")
    if not isinstance(step, dict):
        return []
    arms = [step.get(name) for name in ("candidate", "champion")]
    found = [one if isinstance(one, dict) else {} for one in arms]
    return [
        ArmRow(what=what, candidate=_share(found[0], key), champion=_share(found[1], key))
        for key, what in _COUNTED
        if any(key in one for one in found)
    ]


def _share(arm: Mapping[str, Any], key: str) -> str:
    number, replies = arm.get(key), arm.get("replies")
    if not isinstance(number, int):
        return "not counted"
    if key == "replies" or not isinstance(replies, int) or replies <= 0:
        return f"{number:,}"
    return f"{number:,} ({number / replies:.1%})"


def _stage(funnel: FunnelOut, name: str) -> StageOut:
    return next(stage for stage in funnel.stages if stage.name == name)
