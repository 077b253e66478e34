"""What the judges have cost, and the budgets of it. The rule (`first_spent`) is pure.

Money is counted in nano-dollars, whole numbers that lose nothing when millions of calls are added
up. It is kept in counter rows, which all processes share, so a restart renews no budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import structlog
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.judge_watch.costs import NANO
from ingest.store.periods import day_of, hour_of, is_count, next_hour, next_midnight
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import insert_into
from sidecar.store.models import CounterRow

DAY, HOUR, TOKENS = "judge_spent", "judge_spent_hour", "judge_tokens"
"""Stages of counter rows: (stage, day or hour) -> nano-dollars, nano-dollars, tokens."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What something costs, or may cost."""

    nano_usd: int = 0
    tokens: int = 0
    """Tokens of prompt and reply together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What this day and this hour (UTC) have cost, with what calls in flight may cost."""

    nano_usd_today: int = 0
    nano_usd_this_hour: int = 0
    tokens_today: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentBudget:
    """A budget that is spent."""

    setting: str
    why: str
    """What was spent of what, and until when, for people."""
    until: datetime
    """When it is renewed."""


def nano_usd(dollars: float) -> int:
    """Return US dollars as nano-dollars."""
    return round(dollars * NANO)


def first_spent(spending: Spending, budget: JudgeSettings, *, now: float) -> SpentBudget | None:
    """Return a budget that is spent, of several the one renewed last; None when none is. Pure."""
    budgets = (
        ("budget", spending.nano_usd_today, nano_usd(budget.budget), "today"),
        ("budget_tokens", spending.tokens_today, budget.budget_tokens, "today"),
        ("budget_per_hour", spending.nano_usd_this_hour, nano_usd(budget.budget_per_hour), ""),
    )
    for name, used, limit, when in budgets:
        if limit and used >= limit:
            until = next_midnight(now) if when else next_hour(now)
            amounts = (
                f"{used:,} of {limit:,} tokens"
                if name == "budget_tokens"
                else f"{shown_usd(used)} of {shown_usd(limit)}"
            )
            return SpentBudget(
                setting=f"judge.{name}",
                why=f"judge.{name} is spent: {amounts} {when or 'this hour'}, until "
                f"{until:%Y-%m-%d %H:%M} UTC",
                until=until,
            )
    return None


def shown_usd(nano: int) -> str:
    """Return nano-dollars as people write dollars; more digits below a cent."""
    dollars = nano / NANO
    return f"${dollars:,.2f}" if dollars >= 0.01 or not nano else f"${dollars:.6f}"


def rows_of(amount: Amount, budget: JudgeSettings, *, now: float) -> dict[tuple[str, str], int]:
    """Return what an amount adds to the counters, at a time in Unix seconds."""
    day = day_of(now)
    rows = {(DAY, day): amount.nano_usd, (TOKENS, day): amount.tokens}
    if budget.budget_per_hour:
        rows[(HOUR, hour_of(now))] = amount.nano_usd
    return rows


def read_spending(
    session: Session, *, now: float, unwritten: Mapping[tuple[str, str], int] | None = None
) -> Spending:
    """Read what this day and this hour have cost. A damaged number counts as 0.

    unwritten: counts that are still to be added.
    """
    day, hour = day_of(now), hour_of(now)
    found = {
        (row.stage, row.reason): row.count
        for row in session.scalars(
            select(CounterRow).where(
                CounterRow.stage.in_([DAY, HOUR, TOKENS]), CounterRow.reason.in_([day, hour])
            )
        )
        if is_count(row.count)
    }

    def total(key: tuple[str, str]) -> int:
        return found.get(key, 0) + (unwritten or {}).get(key, 0)

    return Spending(
        nano_usd_today=total((DAY, day)),
        nano_usd_this_hour=total((HOUR, hour)),
        tokens_today=total((TOKENS, day)),
    )


def lock_rows(session: Session, *, now: float) -> None:
    """Have the counters of this day to oneself until the transaction ends.

    Damaged numbers begin again at 0 (one would stay damaged when something is added, and there
    were no budget), and the hours that are over are dropped.
    """
    hour = hour_of(now)
    today = insert_into(session, CounterRow).values(stage=DAY, reason=day_of(now), count=0)
    session.execute(today.on_conflict_do_nothing(index_elements=["stage", "reason"]))
    rows = session.scalars(
        select(CounterRow)
        .where(
            CounterRow.stage.in_([DAY, HOUR, TOKENS]), CounterRow.reason.in_([day_of(now), hour])
        )
        .order_by(CounterRow.stage)
        .with_for_update()  # processes that ask at once see one another's reservations
    )
    for row in rows:
        if not is_count(row.count):
            log.warning("counter_unreadable", stage=row.stage, reason=row.reason)
            row.count = 0
    session.flush()
    session.execute(delete(CounterRow).where(CounterRow.stage == HOUR, CounterRow.reason < hour))
