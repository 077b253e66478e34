"""How long a decision about a candidate takes at a site's traffic, and how far the champion is from
the best so far, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deploy.records import Canary
from deploy.registry import canaries
from deploy.registry.canary_rule import MANY_GROUPS, SLOWEST
from deploy.registry.proof_rule import is_proven
from ingest.store.exchanges import first_since
from sidecar.lines import Line
from sidecar.records import BASE
from sidecar.routing.table import BUCKETS
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import CanaryRow, ExchangeRow
from sidecar.store.of_line import of_line

EXAMINED = 20_000
"""Newest exchanges of which the sessions are counted: some tenths of a second."""
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
LOOKED_AT = 20
"""Newest canaries among which one compared the champion with the anchor."""


def sessions_a_day(session: Session, line: Line, now: float) -> float:
    """Return the sessions (assignment keys) a day of a line, of the last week, or since the first
    exchange where that is less; of a day at least. now: Unix seconds.

    Where a week has more than `EXAMINED` exchanges, those of the newest ones are scaled by the
    week's number: by the hours that they cover, an evening would stand for the day.
    """
    row = ExchangeRow
    first, end = first_since(session, now - WEEK_S)
    oldest = session.scalar(
        select(row.stored_at).where(row.seq == select(func.min(row.seq)).scalar_subquery())
    )
    if not isinstance(oldest, float) or first == end:
        return 0.0
    covered_s = min(max(now - oldest, DAY_S), WEEK_S)
    begin = max(first, end - EXAMINED)
    own = select(func.count(row.session_key.distinct())).where(
        row.seq >= begin, row.public_model == line.model, of_line(row.project, line)
    )
    number = session.scalar(own) or 0
    return number * (end - first) / (end - begin) * DAY_S / covered_s


def steps_days(
    steps: tuple[int, ...], rules: CanarySettings, a_day: float, *, seen: int = 0
) -> list[float]:
    """Return the days that each step takes for its sessions, at so many sessions a day. Pure.

    steps: basis points. seen: sessions that the first of them has seen.
    """
    wanted = [max(0, rules.step_min_sessions - seen), *[rules.step_min_sessions] * len(steps)]
    return [
        lacking * BUCKETS / (one * a_day) if a_day > 0 else float("inf")
        for lacking, one in zip(wanted, steps, strict=False)
    ]


def pace(canary: Canary, evidence: Mapping[str, Any], rules: CanarySettings, a_day: float) -> str:
    """Say how long a canary takes yet. Pure. evidence: as its row has it; a_day: sessions."""
    if not canary.readable:
        return ""
    if a_day <= 0.0:
        return "No end can be told: there was no session in the last week."
    ramping = canary.phase == "ramping"
    steps = canary.steps[canary.step :] if ramping else canary.steps
    seen = _number(evidence, f"step_{canary.step + 1}", "sessions") if ramping else 0
    days = steps_days(steps, rules, a_day, seen=seen)
    traffic = f"at today's traffic ({a_day:.{int(a_day < 1.0)}f} sessions a day)"
    longest = SLOWEST * rules.step_max_s / DAY_S
    if max(days, default=0.0) > longest:
        return (
            f"No step can end {traffic}: one wants {rules.step_min_sessions} sessions, and ends "
            f"after {longest:g} days; lower canary.step_min_sessions."
        )
    ramp = sum(days)
    told = f"{_days(ramp)} {traffic} for its steps"
    groups = MANY_GROUPS - _number(evidence, "quality", "groups")
    if groups > 0 and not is_proven(canary.proven, rules):
        # A session gives a group when the candidate does not answer it.
        brings = min(24.0 * rules.groups_per_hour, a_day * (1.0 - steps[0] / BUCKETS))
        if brings > 0.0:
            whole = _days(max(ramp, groups / brings))
            told += f", {whole} in all for an equal candidate: it needs about {groups} more"
            told += f" judged groups, and new sessions bring {brings:.0f} a day"
    return f"{told[0].upper()}{told[1:]}."


def best_so_far(
    session: Session, model: str, champion: str, anchor: str, *, asked: bool = True
) -> str:
    """Say how far the champion is from the anchor, which is the best that was proven so far.

    asked: False where no canary asks the anchor.
    """
    if not asked or champion == anchor == BASE:
        return ""
    if champion == anchor:
        return f"The champion {champion} is the best so far (the anchor)."
    newest = (
        select(CanaryRow)
        .where(CanaryRow.model == model)
        .order_by(CanaryRow.created_at.desc())
        .limit(LOOKED_AT)
    )
    for row in session.scalars(newest):
        arm = "candidate" if (row.candidate, row.state) == (champion, "promoted") else "champion"
        if canaries.to_canary(row).anchor != anchor or getattr(row, arm) != champion:
            continue
        told = canaries.entry(row, "quality").get("to_anchor")
        found = told.get(arm) if isinstance(told, dict) else None
        if isinstance(found, list) and len(found) == 2 and found != [-1.0, 1.0]:
            return (
                f"The best so far is {anchor} (the anchor); the champion's difference to it is "
                f"{found[0]:+.3f} to {found[1]:+.3f}, by the groups of canary {row.canary_id}."
            )
    return f"The best so far is {anchor} (the anchor); the champion was not compared with it yet."


def _days(days: float) -> str:
    return "less than a day" if days < 1.0 else f"about {days:.0f} day{'s' if days >= 1.5 else ''}"


def _number(evidence: Mapping[str, Any], entry: str, name: str) -> int:
    found = evidence.get(entry)
    number = found.get(name) if isinstance(found, dict) else None
    return number if isinstance(number, int) else 0
