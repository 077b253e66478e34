"""Which budget is spent, and when it is renewed."""

from __future__ import annotations

from typing import Any

import pytest

from ingest.sampling.round import Spent, Usage, completion_tokens, first_spent
from ingest.store.listing import day_of, hour_of, next_hour, next_midnight
from sidecar.settings import Groups
from support.ingest_kit import make_choice, make_exchange

NOON = 1_795_262_400.0  # 2026-11-21 12:00 UTC


def spent(usage: Usage, **budgets: Any) -> Spent | None:
    return first_spent(usage, Groups(**budgets), now=NOON)


def test_the_day_ends_at_midnight_utc_and_the_hour_at_the_full_one() -> None:
    assert (day_of(NOON), hour_of(NOON)) == ("2026-11-21", "2026-11-21T12")
    assert (day_of(NOON - 0.1), hour_of(NOON - 0.1)) == ("2026-11-21", "2026-11-21T11")
    assert next_midnight(NOON).isoformat() == "2026-11-22T00:00:00+00:00"
    assert next_midnight(NOON + 12 * 3600).isoformat() == "2026-11-23T00:00:00+00:00"
    assert next_hour(NOON).isoformat() == "2026-11-21T13:00:00+00:00"
    assert next_hour(NOON - 0.1).isoformat() == "2026-11-21T12:00:00+00:00"


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("tokens_per_day", "sampled_today"),
        ("prompt_tokens_per_day", "prompts_today"),
    ],
)
def test_a_budget_is_spent_at_its_limit_and_not_before(setting: str, field: str) -> None:
    assert spent(Usage(**{field: 99}), **{setting: 100}) is None
    found = spent(Usage(**{field: 100}), **{setting: 100})
    assert found is not None
    assert found.setting == f"groups.{setting}"
    assert found.until == next_midnight(NOON)


def test_without_limits_only_the_one_of_the_day_holds() -> None:
    assert spent(Usage(prompts_today=10**9)) is None


def test_the_tokens_of_an_answer_are_vllms_count_or_those_recorded() -> None:
    assert completion_tokens(make_exchange(completion_tokens=9)) == 9
    choices = (make_choice(), make_choice(index=1))  # three ids each
    assert completion_tokens(make_exchange(choices=choices)) == 6
