"""What happened since the visitor last looked, each with its reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from deploy.admin.models import AuditOut
from deploy.page.shown.words import percent, short
from deploy.registry.audit import CONTROL
from sidecar.lines import Line, learner_of, line_of_adapter

AWAY_S = 15 * 60.0
"""A visitor who looks again within this has not been away."""
KEPT_S = 90 * 86_400
"""How long the cookie keeps the last visit."""
_TIME, _NUMBER = r"([0-9]{1,12}\.[0-9]{1,17})", r"([0-9]{1,15})"
_COOKIE = re.compile("_".join((_TIME, _TIME, _NUMBER, _NUMBER)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """When the visitor looked, and what had been lost then."""

    before: float = 0.0
    """The end of the visit before this one; 0: there was none."""
    last: float = 0.0
    """The newest look."""
    lost_before: int = 0
    lost_last: int = 0
    """Captures lost since the store was made, as the proxies had told at those times."""

    def again(self, now: float, lost: int) -> Looked:
        """A look now. After some time away it begins a new visit."""
        if self.last <= 0.0:
            return Looked(before=0.0, last=now, lost_before=lost, lost_last=lost)
        if now - self.last > AWAY_S:
            return Looked(before=self.last, last=now, lost_before=self.lost_last, lost_last=lost)
        return Looked(before=self.before, last=now, lost_before=self.lost_before, lost_last=lost)

    def seen(self, now: float, lost: int) -> Looked:
        """All of it has been seen."""
        return Looked(before=now, last=now, lost_before=lost, lost_last=lost)

    def cookie(self) -> str:
        """Both times are exact: rounded up, a look would be in the future, and what happened right
        behind it would count as seen; rounded down, what was seen would be news again."""
        return f"{self.before!r}_{self.last!r}_{self.lost_before}_{self.lost_last}"


def read_looked(cookie: str | None, now: float) -> Looked:
    """Read the cookie, which anybody may have written."""
    found = _COOKIE.fullmatch(cookie or "")
    if found is None:
        return Looked()
    before, last = float(found[1]), float(found[2])
    if max(before, last) > now:
        return Looked()
    return Looked(before=before, last=last, lost_before=int(found[3]), lost_last=int(found[4]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that an operator wants to know of."""

    at: float
    kind: str
    """good, bad or plain."""
    text: str
    reason: str
    by: str


def changes(rows: Iterable[AuditOut], candidates: Mapping[str, str], since: float) -> list[Change]:
    """Return promotions, rollbacks, rejections and the like since then, the newest first.

    rows: the newest first. candidates: canary id -> its candidate.
    """
    found = [row for row in rows if row.at > since]
    # Written right behind the end of the canary: where that one is listed, the rollback is too.
    undone = {row.before.get("canary") for row in found if row.action == "rollback"}
    return [one for row in found for one in _of(row, candidates, undone)]


def is_of_line(row: AuditOut, line: Line, candidates: Mapping[str, str]) -> bool:
    """Return True if an audit row is about a line of adapters, or about no line.

    candidates: canary id -> its candidate, of the line.
    """
    subject = row.subject
    if row.action.startswith("canary."):
        return subject in candidates
    if row.action.startswith("adapter."):
        return line_of_adapter(subject) == line.name
    if row.action == "rollback" or row.action.startswith("alias."):
        return subject == line.name
    if row.action.startswith("learner."):
        return subject == learner_of(line.name)
    return True


def _of(
    row: AuditOut, candidates: Mapping[str, str], undone: Container[object]
) -> Iterator[Change]:
    """undone: ids of canaries that a rollback ended."""
    candidate = short(candidates.get(row.subject, row.subject))
    texts = {
        "canary.promoted": ("good", f"{candidate} was promoted"),
        "canary.inconclusive": ("bad", f"the trial of {candidate} ended without a result"),
        "canary.paused": ("plain", f"the trial of {candidate} was paused"),
        "canary.resumed": ("plain", f"the trial of {candidate} went on"),
        "canary.queued": ("plain", f"{candidate} waits for its trial"),
        "canary.withdrawn": ("plain", f"{candidate} left the queue without a trial"),
        "canary.step_skipped": ("plain", f"a step of the trial of {candidate} was skipped"),
        "canary.taken_out": ("bad", f"a proxy took {candidate} out of traffic"),
        "adapter.registered": ("plain", f"{short(row.subject)} was made"),
        "adapter.retired": ("plain", f"{short(row.subject)} was retired without a trial"),
        "adapter.altered": ("bad", f"the files of {short(row.subject)} were altered"),
        "adapter.sound": ("plain", f"the files of {short(row.subject)} were restored"),
        "learner.pause": ("plain", "the learner was paused"),
        "learner.resume": ("plain", "the learner went on"),
        "learner.override": ("plain", "an operator let the held learner go on"),
    }
    if row.action == "canary.rolled_back":
        gave = row.before.get("weight_bp")
        had = row.before.get("phase") == "ramping"
        at = f" at {percent(gave)}" if had and isinstance(gave, int) else ""
        text = f"{candidate} was rolled back{at}" if had else f"{candidate} was rejected"
        kind = "bad"
        if row.subject in undone or row.actor != CONTROL:  # no verdict on the candidate
            who = "the rollback" if row.subject in undone else row.actor
            kind, text = "plain", f"the trial of {candidate}{at} was ended by {who}"
    elif row.action == "rollback":
        before, after = short(row.before.get("champion")), short(row.after.get("champion"))
        kind, text = "bad", f"rollback from {before} to {after}"
    elif row.action in texts:
        kind, text = texts[row.action]
    else:
        return
    yield Change(at=row.at, kind=kind, text=text, reason=row.reason, by=row.actor)


def differences(row: AuditOut) -> str:
    """What an audit row changed: `phase: gating → ramping; weight: 0% → 20%`."""
    found = []
    for name, value in row.after.items():
        before = row.before.get(name)
        if before == value or name == "canary_id":
            continue
        label = name.removesuffix("_bp").replace("_", " ")
        was = "" if before is None else f"{_said(name, before)} → "
        found.append(f"{label}: {was}{_said(name, value)}")
    return "; ".join(found)


def names_in(value: object) -> list[str]:
    """Return the names of adapters of an audit row, which keeps several as one text."""
    if isinstance(value, str):
        return value.split(", ")
    return list(map(str, value)) if isinstance(value, list) else []


def _said(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if name.endswith("_bp") and isinstance(value, int | float):
        return percent(value)
    return ", ".join(map(short, names_in(value))) or str(value)
