"""Which budget is spent, and when it is renewed."""

from __future__ import annotations

from ingest.sampling.round import completion_tokens, spent_budget
from ingest.store.listing import day_of, next_midnight
from sidecar.settings import Groups
from support.ingest_kit import make_choice, make_exchange

NOON = 1_795_262_400.0  # 2026-11-21 12:00 UTC


def test_the_day_ends_at_midnight_utc() -> None:
    assert day_of(NOON) == "2026-11-21"
    assert next_midnight(NOON).isoformat() == "2026-11-22T00:00:00+00:00"
    assert next_midnight(NOON + 12 * 3600).isoformat() == "2026-11-23T00:00:00+00:00"


def test_a_budget_is_spent_at_its_limit_and_not_before() -> None:
    budgets = Groups(tokens_per_day=100)
    assert spent_budget(99, budgets, now=NOON) is None
    found = spent_budget(100, budgets, now=NOON)
    assert found is not None
    assert found.setting == "groups.tokens_per_day"
    assert found.until == next_midnight(NOON)


def test_the_tokens_of_an_answer_are_vllms_count_or_those_recorded() -> None:
    assert completion_tokens(make_exchange(completion_tokens=9)) == 9
    choices = (make_choice(), make_choice(index=1))  # three ids each
    assert completion_tokens(make_exchange(choices=choices)) == 6
