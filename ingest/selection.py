"""Which exchanges become groups, and why the others do not. Pure, and without chance.

The share that `rate` leaves in is chosen by a hash of the exchange's id: the same exchange gets the
same answer in every process and after every restart. What an exchange is comes first, then how
much is wanted; only `backlog` is looked at again, when there is room.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ingest.chat_request import masking_field
from ingest.exchangeable import LogprobsMode, served_answers
from ingest.held_out import share_of
from ingest.records import Group
from sidecar.records import Exchange

CHOSEN = "chosen"
BACKLOG = "backlog"
REASON_LENGTH = 64
"""Of the columns that hold a reason."""
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading bytes that an agent sent may come to; the last for brackets without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the operator wants; the settings of the same names."""

    size: int
    rate: float
    max_groups_per_session: int
    max_pending_groups: int
    logprobs_mode: LogprobsMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How things stand in the store when a batch is decided."""

    live_adapters: frozenset[str]
    """Champion and canary; what is learned about another comes too late."""
    pending_groups: int
    """Groups that wait for candidates or for the judge."""
    groups_by_session: Mapping[str, int]
    """Groups that a session ever had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of one exchange."""

    exchange_id: str
    reason: str
    """"chosen", or why it was not."""
    group: Group | None
    """The new group with its served answers; None when it was not chosen."""


def select(
    batch: Sequence[tuple[Exchange, bool]], standing: Standing, rules: Rules
) -> list[Decision]:
    """Decide a batch in the order given; each exchange takes a place from those after it.

    batch: exchanges, each with whether its session is held out.
    """
    pending = standing.pending_groups
    by_session = dict(standing.groups_by_session)
    decisions = []
    for exchange, held_out in batch:
        request = _object(exchange.request)
        in_session = by_session.get(exchange.session_key, 0)
        reason = _why_unfit(exchange, request, held_out, standing.live_adapters)
        reason = reason or _why_unwanted(exchange, in_session, pending, rules)
        group = None
        if reason is None:
            group = _make_group(exchange, request or {}, rules)
            pending += 1
            by_session[exchange.session_key] = in_session + 1
        decisions.append(
            Decision(
                exchange_id=exchange.exchange_id,
                reason=(reason or CHOSEN)[:REASON_LENGTH],
                group=group,
            )
        )
    return decisions


def group_id_of(exchange_id: str) -> str:
    """An exchange has at most one group, of this id: choosing it twice changes nothing."""
    return "g-" + hashlib.sha256(exchange_id.encode()).hexdigest()[:24]


def _why_unfit(
    exchange: Exchange,
    request: Mapping[str, Any] | None,
    held_out: bool,
    live_adapters: frozenset[str],
) -> str | None:
    """What the exchange is: nothing could be learned from it, or must not be."""
    if held_out:
        return "held_out"
    if exchange.outcome != "ok" or exchange.status != 200:
        return "outcome"
    if exchange.untrainable_reason is not None:
        return f"untrainable:{exchange.untrainable_reason}"
    if not exchange.prompt_token_ids:
        return "untrainable:no_prompt_token_ids"
    if request is None:
        return "untrainable:request_not_json"
    masked_by = masking_field(request)
    if masked_by is not None:
        return f"untrainable:masked_by_{masked_by}"
    if not any(_says_something(choice.message) for choice in exchange.choices):
        return "empty_answer"
    return None if exchange.adapter in live_adapters else "stale_adapter"


def _why_unwanted(exchange: Exchange, in_session: int, pending: int, rules: Rules) -> str | None:
    """How much is wanted: a fit exchange of which there is enough."""
    if share_of(f"rate\x00{exchange.exchange_id}") >= rules.rate:
        return "rate"
    if in_session >= rules.max_groups_per_session:
        return "session_cap"
    return BACKLOG if pending >= rules.max_pending_groups else None


def _make_group(exchange: Exchange, request: Mapping[str, Any], rules: Rules) -> Group:
    return Group(
        group_id=group_id_of(exchange.exchange_id),
        exchange_id=exchange.exchange_id,
        session_key=exchange.session_key,
        adapter=exchange.adapter,
        request=exchange.request,
        prompt_token_ids=exchange.prompt_token_ids,
        answers=served_answers(exchange, request, mode=rules.logprobs_mode, limit=rules.size),
    )


def _says_something(message: bytes) -> bool:
    said = _object(message) or {}
    return any(said.get(part) for part in ("content", "tool_calls", "reasoning"))


def _object(data: bytes) -> Mapping[str, Any] | None:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except NOT_JSON:
        return None
