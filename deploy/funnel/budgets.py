"""The budgets of sampling and of judges that have a limit, with what is used of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ingest.judge_watch.costs import NANO
from ingest.judges.spending import Spending
from ingest.sampling.budget import Usage
from sidecar.settings import Groups, Judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One budget of this day or this hour, UTC."""

    setting: str
    what: str
    """`candidate tokens`, `prompt tokens of candidates`, `tokens of judges` or `US dollars`."""
    used: float
    limit: float
    period: str
    """`day` or `hour`."""


def budgets_of(usage: Usage, groups: Groups, spending: Spending, judge: Judge) -> list[Budget]:
    """Return the budgets that are set, those of sampling first."""
    candidates, prompts = "candidate tokens", "prompt tokens of candidates"
    every = (
        ("groups.tokens_per_day", candidates, usage.sampled_today, groups.tokens_per_day),
        ("groups.tokens_per_hour", candidates, usage.sampled_this_hour, groups.tokens_per_hour),
        (
            "groups.prompt_tokens_per_day",
            prompts,
            usage.prompts_today,
            groups.prompt_tokens_per_day,
        ),
        (
            "groups.prompt_tokens_per_hour",
            prompts,
            usage.prompts_this_hour,
            groups.prompt_tokens_per_hour,
        ),
        ("judge.budget", "US dollars", spending.nano_usd_today / NANO, judge.budget),
        (
            "judge.budget_per_hour",
            "US dollars",
            spending.nano_usd_this_hour / NANO,
            judge.budget_per_hour,
        ),
        ("judge.budget_tokens", "tokens of judges", spending.tokens_today, judge.budget_tokens),
    )
    return [
        Budget(
            setting=setting,
            what=what,
            used=used,
            limit=limit,
            period="hour" if setting.endswith("hour") else "day",
        )
        for setting, what, used, limit in every
        if limit
    ]
