"""The line of `sidecar status` about budgets: what is used of each limit. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

DOLLARS = "US dollars"


class Budget(msgspec.Struct):
    setting: str
    what: str
    used: float
    limit: float
    period: str


def budget_lines(budgets: Sequence[Budget]) -> Iterator[str]:
    """Yield what is used of the budgets that are set; nothing where none is."""
    shown = [
        f"{_of(one)} {'today' if one.period == 'day' else 'this hour'} ({one.setting})"
        for one in budgets
    ]
    if shown:
        yield f"Budgets (UTC): {'; '.join(shown)}."


def _of(one: Budget) -> str:
    if one.what != DOLLARS:
        return f"{one.used:,.0f} of {one.limit:,.0f} {one.what}"
    used = "under $0.01" if 0 < one.used < 0.01 else f"${one.used:,.2f}"
    limit = f"${one.limit:,.2f}" if one.limit >= 0.01 else f"${one.limit:g}"
    return f"{used} of {limit} for judges"
