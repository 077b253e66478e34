"""The budgets of sampling, by day and by hour (UTC), and as a share of what users are served.

What is spent is kept in counter rows, so a restart renews no budget. The rule (`first_spent`) is
pure. Tokens are counted when a round is stored, so what is in flight comes on top of a budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import structlog
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.store.periods import day_of, hour_of, is_count, next_hour, next_midnight
from sidecar.records import Exchange
from sidecar.settings import Groups
from sidecar.store.database import count
from sidecar.store.models import CounterRow

DAY, HOUR = "sampling_tokens", "sampling_tokens_hour"
PROMPT_DAY, PROMPT_HOUR = "sampling_prompt_tokens", "sampling_prompt_hour"
SERVED = "served_tokens"
"""Stages of counter rows: (stage, day or hour) -> tokens. Ingest writes the last one."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of this day and this hour, UTC."""

    sampled_today: int = 0
    sampled_this_hour: int = 0
    prompts_today: int = 0
    """Prompt tokens, once for each candidate."""
    prompts_this_hour: int = 0
    served_today: int = 0
    """Completion tokens that users got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A budget that is spent."""

    setting: str
    why: str
    until: datetime | None
    """When it is renewed; None: when users are served more."""


def first_spent(usage: Usage, budgets: Groups, *, now: float) -> Spent | None:
    """Return a budget that is spent, of several the one renewed last; None when none is. Pure."""
    budget_uses = (
        ("tokens_per_day", usage.sampled_today, "candidate tokens today"),
        ("prompt_tokens_per_day", usage.prompts_today, "prompt tokens of candidates today"),
        ("tokens_per_hour", usage.sampled_this_hour, "candidate tokens this hour"),
        ("prompt_tokens_per_hour", usage.prompts_this_hour, "prompt tokens this hour"),
    )
    for name, used, what in budget_uses:
        limit: int = getattr(budgets, name)
        if limit and used >= limit:
            until = next_midnight(now) if name.endswith("day") else next_hour(now)
            setting = f"groups.{name}"
            return Spent(setting=setting, why=f"{setting} is spent: {used} {what}", until=until)
    share = budgets.max_share_of_served
    if share and usage.sampled_today >= share * usage.served_today:
        return Spent(
            setting="groups.max_share_of_served",
            why=f"groups.max_share_of_served is reached: {usage.sampled_today} candidate tokens "
            f"today, {usage.served_today} tokens of answers to users",
            until=None,
        )
    return None


def read_usage(session: Session, *, now: float) -> Usage:
    """Read what this day and this hour have used. A damaged number counts as 0."""
    day, hour = day_of(now), hour_of(now)
    fields = {
        (DAY, day): "sampled_today",
        (HOUR, hour): "sampled_this_hour",
        (PROMPT_DAY, day): "prompts_today",
        (PROMPT_HOUR, hour): "prompts_this_hour",
        (SERVED, day): "served_today",
    }
    rows = session.scalars(
        select(CounterRow).where(
            CounterRow.stage.in_([stage for stage, _ in fields]),
            CounterRow.reason.in_([day, hour]),
        )
    )
    found = {fields.get((row.stage, row.reason)): row.count for row in rows}
    return Usage(**{name: n for name, n in found.items() if name is not None and is_count(n)})


def spend_tokens(session: Session, *, sampled: int, prompts: int, now: float) -> None:
    """Count the tokens of candidates, in the caller's transaction.

    A damaged number begins again at 0: otherwise it would stay damaged, and there were no budget.
    """
    day, hour = day_of(now), hour_of(now)
    spent = {
        (DAY, day): sampled,
        (HOUR, hour): sampled,
        (PROMPT_DAY, day): prompts,
        (PROMPT_HOUR, hour): prompts,
    }
    for (stage, reason), tokens in spent.items():
        row = session.get(CounterRow, (stage, reason))
        if row is not None and not is_count(row.count):
            log.warning("counter_unreadable", stage=stage, reason=reason)
            row.count = 0
            session.flush()
        count(session, stage, reason, tokens)
    # Nobody reads an hour that is over, and there would be thousands.
    session.execute(
        delete(CounterRow).where(
            CounterRow.stage.in_([HOUR, PROMPT_HOUR]), CounterRow.reason < hour
        )
    )


def completion_tokens(exchange: Exchange) -> int:
    """Return the tokens that a user was answered with: vLLM's count, else those recorded."""
    if exchange.completion_tokens is not None:
        return exchange.completion_tokens
    return sum(len(choice.token_ids) for choice in exchange.choices)


def count_served(session: Session, tokens: int, *, now: float) -> None:
    """Count completion tokens that users got, in the caller's transaction."""
    if tokens:
        count(session, SERVED, day_of(now), tokens)
