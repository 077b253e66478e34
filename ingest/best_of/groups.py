"""From the scores of a best-of-N request and its exchange to a scored group, made once.

Scores and exchange come by two ways, in either order. All of it happens in the caller's write
transaction, so of selection and the scoring process only one makes the group; an exchange has one
group at most in any case. What cannot become a group is counted under `best_of`, and the exchange
goes the way of every other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from ingest.best_of.store import BestOfScores, load_scores, remove_scores
from ingest.grouping.selection import (
    BACKLOG,
    CHOSEN,
    RATE,
    RETRIED_TURN,
    TURN_DECIDED,
    Rules,
    group_id_of,
    judged_group,
    turn_of,
)
from ingest.records import Group
from ingest.ruler.prompt import shown_answer
from ingest.store.exchanges import NEW, StoredExchange, set_selection, turns_with
from ingest.store.groups import (
    count_by_session,
    load_group,
    mark_sampled,
    mark_scored,
    save_group,
)
from sidecar.records import Exchange
from sidecar.store.database import count

STAGE = "best_of"
SCORED = "scored"
ANSWERS_DIFFER = "answers_differ"
CAME_SECOND = "came_second"
LEFT_OUT = (NEW, BACKLOG, RATE)
"""Selections of exchanges that only their cost kept out, or that nobody has looked at."""


def answers_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Name answers by what the judge saw of them, in order. Pure.

    A whole reply says null where a stream says "", so the two are taken as one.
    """
    shown = [
        {**shown_answer(message), "content": message.get("content") or ""} for message in messages
    ]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def settle_new(
    session: Session,
    batch: Sequence[StoredExchange],
    rules: Rules,
    *,
    live: frozenset[str],
    now: float,
) -> list[StoredExchange]:
    """Make the groups of those exchanges that have scores waiting.

    Returns: the others of the batch, for selection to decide.
    """
    waiting = load_scores(session, [stored.exchange.exchange_id for stored in batch])
    return [
        stored
        for stored in batch
        if (scores := waiting.get(stored.exchange.exchange_id)) is None
        or not settle(session, stored, scores, rules, live=live, now=now)
    ]


def settle(
    session: Session,
    stored: StoredExchange,
    scores: BestOfScores,
    rules: Rules,
    *,
    live: frozenset[str],
    now: float,
) -> bool:
    """Join scores and exchange, and take the scores out of the waiting ones.

    Returns: whether a group came of it. Otherwise the reason is counted, and nothing is changed
    about the exchange.
    """
    remove_scores(session, scores.exchange_id)
    reason = _settle(session, stored, scores, rules, live=live, now=now)
    count(session, STAGE, reason)
    return reason == SCORED


def _settle(
    session: Session,
    stored: StoredExchange,
    scores: BestOfScores,
    rules: Rules,
    *,
    live: frozenset[str],
    now: float,
) -> str:
    exchange = stored.exchange
    if _digest(exchange) != scores.answers_digest:
        return ANSWERS_DIFFER
    chosen = stored.selection == CHOSEN
    by_session = {} if chosen else count_by_session(session, [exchange.session_key])
    group = judged_group(
        exchange,
        stored.held_out,
        live_adapters=live,
        in_session=by_session.get(exchange.session_key, 0),
        rules=rules,
    )
    if isinstance(group, str):
        return group
    turn = turn_of(exchange)
    undecided = turn is not None and stored.selection in (NEW, BACKLOG)
    if turn is not None and undecided and turns_with(session, {turn}, selections=TURN_DECIDED):
        return RETRIED_TURN
    if not chosen and stored.selection not in LEFT_OUT:
        return CAME_SECOND  # left out for a reason that no longer holds; it is not gone back to
    if chosen:
        if not _untouched(session, group):
            return CAME_SECOND
    elif not save_group(session, group, now=now):
        return CAME_SECOND
    else:
        _choose(session, stored)
    mark_sampled(session, group.group_id)
    marked = mark_scored(
        session,
        group.group_id,
        scores.scores,
        scores.explanations,
        scores.judge_model,
        scores.rubric_hash,
        now,
    )
    return SCORED if marked else CAME_SECOND


def _digest(exchange: Exchange) -> str | None:
    try:
        return answers_digest([json.loads(choice.message) for choice in exchange.choices])
    except (ValueError, TypeError, AttributeError):  # not messages: nothing was judged of the kind
        return None


def _untouched(session: Session, group: Group) -> bool:
    """Whether the group that selection made holds these answers and no candidate yet."""
    held = load_group(session, group_id_of(group.exchange_id))
    return held is not None and held.answers == group.answers


def _choose(session: Session, stored: StoredExchange) -> None:
    set_selection(session, [stored.exchange.exchange_id], CHOSEN)
    count(session, "selection", CHOSEN)
    if stored.selection != NEW:
        count(session, "selection", stored.selection, -1)
