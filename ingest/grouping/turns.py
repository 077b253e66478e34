"""Turns of users: a request and the client's retries of it count once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidecar.records import Exchange

Turn = tuple[str, str]
"""(project, turn id)."""


def turn_of(exchange: Exchange) -> Turn | None:
    """Return the turn that an exchange shares with the client's retries; None when it has none."""
    return (exchange.project, exchange.turn_id) if exchange.turn_id else None


def last_of_each_turn(fit: Sequence[Exchange]) -> dict[Turn, str]:
    """Map each turn to the id of its exchange that began last."""
    last: dict[Turn, Exchange] = {}
    for exchange in fit:
        turn = turn_of(exchange)
        if turn is not None and (turn not in last or _begun(exchange) > _begun(last[turn])):
            last[turn] = exchange
    return {turn: exchange.exchange_id for turn, exchange in last.items()}


def _begun(exchange: Exchange) -> tuple[float, str]:
    return exchange.timings.started_at, exchange.exchange_id


def counts_elsewhere(
    exchange: Exchange, counting: Mapping[Turn, str], decided: frozenset[Turn]
) -> bool:
    """Return True when another exchange of the same turn counts."""
    turn = turn_of(exchange)
    return turn is not None and (turn in decided or counting[turn] != exchange.exchange_id)
