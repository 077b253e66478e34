"""Join the scores of a best-of-N request with its exchange to one scored group.

Scores and exchange arrive on two ways, in either order. Everything happens in the caller's write
transaction, so only one of selection and the scoring process makes the group; an exchange has at
most one group. Scores that cannot become a group are counted under `best_of`, and their exchange is
then treated like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from ingest.best_of.store import STAGE, BestOfScores, load_scores, remove_scores
from ingest.grouping.rules import Live
from ingest.grouping.selection import (
    BACKLOG,
    CHOSEN,
    RATE,
    RETRIED_TURN,
    TURN_DECIDED,
    Rules,
    group_id_of,
    judged_group,
)
from ingest.grouping.turns import turn_of
from ingest.judge_prompt.shown import shown_answer
from ingest.records import Group
from ingest.store.exchanges import NEW, StoredExchange, set_selection, turns_with
from ingest.store.groups import (
    keep_scores,
    load_group,
    mark_sampled,
    mark_scored,
    save_group,
)
from ingest.store.sessions import count_by_session
from sidecar.records import Exchange
from sidecar.store.database import count

SCORED = "scored"
ANSWERS_DIFFER = "answers_differ"
CAME_SECOND = "came_second"
LEFT_OUT = (NEW, BACKLOG, RATE)
"""Selections of exchanges that were left out only for their cost, or are not decided yet."""


def answers_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Hash answers by what the judge saw of them, in order. Pure."""
    shown = [shown_answer(message) for message in messages]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def settle_new(
    session: Session,
    batch: Sequence[StoredExchange],
    rules: Rules,
    *,
    live: Live,
    now: float,
) -> list[StoredExchange]:
    """Make the groups of those exchanges whose scores wait in the store.

    Returns: the other exchanges of the batch, for selection to decide.
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
    live: Live,
    now: float,
) -> bool:
    """Join scores and exchange, and remove the waiting scores.

    Returns: True when a group was made. Otherwise the reason is counted, and the exchange stays
        unchanged.
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
    live: Live,
    now: float,
) -> str:
    exchange = stored.exchange
    if _digest(exchange) != scores.answers_digest:
        return ANSWERS_DIFFER
    chosen = stored.selection == CHOSEN
    by_session = (
        {}
        if chosen
        else count_by_session(session, [stored.session_id], since=now - rules.session_window_s)
    )
    group = judged_group(
        exchange,
        stored.held_out,
        live_adapters=live.of(exchange.project),
        session_id=stored.session_id,
        in_session=by_session.get(stored.session_id, 0),
        rules=rules,
    )
    if isinstance(group, str):
        return group
    turn = turn_of(exchange)
    undecided = turn is not None and stored.selection in (NEW, BACKLOG)
    if turn is not None and undecided and turns_with(session, {turn}, selections=TURN_DECIDED):
        return RETRIED_TURN
    if not chosen and stored.selection not in LEFT_OUT:
        return CAME_SECOND  # left out for another reason, which is not decided again
    if chosen:
        if not _untouched(session, group):
            return CAME_SECOND
    elif not save_group(session, group, now=now):
        return CAME_SECOND
    else:
        _choose(session, stored)
    mark_sampled(session, group.group_id)
    judged = (scores.scores, scores.explanations, scores.judge_model, scores.rubric_hash)
    if rules.verified:  # score lets verifiers check it, and does not ask the judge again
        keep_scores(session, group.group_id, *judged)
        return SCORED
    marked = mark_scored(
        session,
        group.group_id,
        *judged,
        now,
    )
    return SCORED if marked else CAME_SECOND


def _digest(exchange: Exchange) -> str | None:
    try:
        return answers_digest([json.loads(choice.message) for choice in exchange.choices])
    except (ValueError, TypeError, AttributeError):  # not messages: nothing was judged of the kind
        return None


def _untouched(session: Session, group: Group) -> bool:
    """Return True when the group that selection made holds these answers and no candidate yet."""
    held = load_group(session, group_id_of(group.exchange_id))
    return held is not None and held.answers == group.answers


def _choose(session: Session, stored: StoredExchange) -> None:
    set_selection(session, [stored.exchange.exchange_id], CHOSEN)
    count(session, "selection", CHOSEN)
    if stored.selection != NEW:
        count(session, "selection", stored.selection, -1)
