"""Apply selection to exchanges: those just stored, those stored earlier, and the backlog when there
is room.

`consume` decides what it stores in the transaction that stores it, from the records that it has in
memory. `choose_new` decides what was stored before the first probe of vLLM. Each is one write
transaction: the reason on the exchange, its count, the new group and its
served answers are stored together or not at all. The counters of stage `selection` always add up to
the number of decided exchanges: one that leaves the backlog is subtracted from the backlog's count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
from sqlalchemy.orm import Session

from ingest.best_of.groups import settle_new
from ingest.errors import UnreadableExchangesError
from ingest.grouping.rules import live_now, rules_now
from ingest.grouping.same_prompt import JOINED
from ingest.grouping.selection import (
    BACKLOG,
    STAGE,
    TURN_DECIDED,
    Decision,
    Rules,
    Standing,
    select,
)
from ingest.grouping.shares import DAY_S, SHARE, Caller, Shares, daily_demand
from ingest.grouping.turns import turn_of
from ingest.intake.pending import count_pending, pending_by_caller
from ingest.intake.same_prompt import find_same_prompts
from ingest.intake.standing import counts_by_keys, features_in, keys_of
from ingest.sampling.candidates import all_identical
from ingest.store.exchanges import (
    NEW,
    Settled,
    StoredExchange,
    any_settled,
    load_by_selection,
    load_of_turns,
    newest_of,
    put_aside,
    set_selection,
    spread_since,
    turns_with,
)
from ingest.store.groups import (
    append_answers,
    mark_sampled,
    save_group,
    set_aside,
)
from ingest.store.sessions import count_by_session
from sidecar.store.database import Database, count

UNREADABLE = "unreadable"
LOOKED_AT = 2_048
"""Exchanges by which the shares of callers are decided, spread over the last day, and newest ones
of the backlog: some ten milliseconds, under the write lock."""

log = structlog.get_logger()


def choose_new(database: Database, rules: Rules, *, model: str, limit: int, now: float) -> int:
    """Decide up to `limit` new exchanges that were stored `rules.settle_s` ago, the oldest first.

    now: Unix seconds.
    Returns: the number of exchanges decided.
    """
    settled = _settled(rules.settle_s, now)
    with database.read() as session:
        if not any_settled(session, NEW, settled):
            return 0  # usual between two requests: take no write lock
    with database.write() as session:
        batch = _readable(
            session,
            NEW,
            lambda: load_by_selection(session, NEW, limit=limit, settled=settled),
        )
        decide(session, batch, rules, model=model, now=now)
    return len(batch)


def recent_demand(
    session: Session, *, now: float
) -> tuple[dict[Caller, float], list[tuple[int, Caller]]]:
    """Return the exchanges a day of each caller, and some of the backlog (number and caller).

    Both are of the whole last day: a flood of one caller fills the newest ones. Each look meets
    other exchanges, so whoever asked waits a few looks at most.
    """
    seen, each = spread_since(session, now - DAY_S, limit=LOOKED_AT, begin=now * 0.618 % 1.0)
    asked = ((caller, at) for _, caller, at, _ in seen if isinstance(at, float))
    waiting = [(seq, caller) for seq, caller, _, state in seen if state == BACKLOG]
    return daily_demand(asked, now=now, each=each), waiting


def _settled(settle_s: float, now: float) -> Settled:
    def settled(stored_at: object) -> bool:
        if not isinstance(stored_at, float):
            return True  # damaged: whoever reads it says so
        # A time to come was written by a clock that was fast: nothing waits for it.
        return stored_at <= now - settle_s or stored_at > now

    return settled


def choose_backlog(database: Database, rules: Rules, *, model: str, now: float) -> int:
    """Decide the backlog again if there is room, the newest first, for it is the least stale, and
    of each caller what its share of the places has room for.

    now: Unix seconds.
    Returns: the number of exchanges decided.
    """
    with database.write() as session:
        most = rules.max_pending_groups
        live = live_now(session, model, rules).all
        room = most - count_pending(session, live, most=most)
        waiting = newest_of(session, BACKLOG, limit=LOOKED_AT) if room > 0 else []
        if not waiting:
            return 0  # usual: nobody's demand is read
        demand, of_the_day = recent_demand(session, now=now)
        shares = Shares(most, pending_by_caller(session, live, most=most), demand)
        seqs: list[int] = []
        for seq, caller in sorted({*waiting, *of_the_day}, reverse=True):
            if len(seqs) < room and shares.has_room(caller):
                shares.take(caller)
                seqs.append(seq)
        batch = _readable(
            session,
            BACKLOG,
            lambda: load_by_selection(session, BACKLOG, limit=room, newest_first=True, of=seqs),
        )
        decide(session, batch, rules, model=model, now=now)
    return len(batch)


def _readable(
    session: Session, left: str, load: Callable[[], list[StoredExchange]]
) -> list[StoredExchange]:
    """Load exchanges of one selection state; damaged ones are counted and leave that state."""
    while True:
        try:
            return load()
        except UnreadableExchangesError as error:
            for seq, why in error.damage.items():
                log.error("exchange_unreadable", seq=seq, why=why)
            put_aside(session, error.damage, UNREADABLE)
            count(session, STAGE, UNREADABLE, len(error.damage))
            if left != NEW:
                count(session, STAGE, left, -len(error.damage))


def decide(
    session: Session, batch: Sequence[StoredExchange], rules: Rules, *, model: str, now: float
) -> None:
    """Decide exchanges of the store, in the caller's write transaction. now: Unix seconds."""
    if not batch:
        return
    turns = {turn for stored in batch if (turn := turn_of(stored.exchange)) is not None}
    # A retry that arrives while its original waits in the backlog replaces it.
    held = {stored.exchange.exchange_id for stored in batch}
    waiting = _readable(session, BACKLOG, lambda: load_of_turns(session, turns, selection=BACKLOG))
    batch = [*batch, *(one for one in waiting if one.exchange.exchange_id not in held)]
    rules = rules_now(session, rules)
    live = live_now(session, model, rules)
    batch = settle_new(session, batch, rules, live=live, now=now)
    if not batch:
        return
    keys = keys_of(session, batch)
    since = now - rules.session_window_s
    pending = count_pending(session, live.all, most=rules.max_pending_groups)
    # Until a fifth of the places is taken, nobody can hold more than that.
    crowded = SHARE * rules.max_pending_groups < pending + len(batch) and (
        pending < rules.max_pending_groups
    )
    standing = Standing(
        keys=keys,
        groups_by_key=counts_by_keys(session, keys.values(), rules, since=since),
        features=features_in(session, batch, keys) if rules.choose == "prefer" else {},
        live_adapters=live.shared,
        own_live=live.own,
        pending_groups=pending,
        held_places=pending_by_caller(session, live.all, most=pending) if crowded else {},
        demand=recent_demand(session, now=now)[0] if crowded else {},
        groups_by_session=count_by_session(
            session,
            [stored.session_id for stored in batch],
            since=since,
        ),
        sessions={stored.exchange.exchange_id: stored.session_id for stored in batch},
        decided_turns=frozenset(turns_with(session, turns, selections=TURN_DECIDED)),
        alike=find_same_prompts(
            session, batch, join=rules.join_served, size=rules.size, live=live.all
        ),
    )
    before = {stored.exchange.exchange_id: stored.selection for stored in batch}
    pairs = [(stored.exchange, stored.held_out) for stored in batch]
    moves: dict[tuple[str, str], list[str]] = {}
    for decision in select(pairs, standing, rules):
        move = (before[decision.exchange_id], decision.reason)
        moves.setdefault(move, []).append(decision.exchange_id)
        _apply(session, decision, rules, now=now)
        for sibling in decision.siblings:
            moved = moves.setdefault((sibling.selection, JOINED), [])
            moved.append(sibling.exchange.exchange_id)
        log.debug("exchange_decided", exchange_id=decision.exchange_id, reason=decision.reason)
    for (left, reason), exchange_ids in moves.items():
        _move(session, exchange_ids, left, reason)


def _apply(session: Session, decision: Decision, rules: Rules, *, now: float) -> None:
    """Store the group of a decision, or the answers that it gives to one."""
    if decision.joins is not None:
        group_id, answers = decision.joins
        count(
            session, "served", JOINED, append_answers(session, group_id, answers, size=rules.size)
        )
    if decision.group is None:
        return
    group = decision.group
    if save_group(session, group, now=now, chosen=decision.chosen) and decision.complete:
        if all_identical(group.answers):
            set_aside(session, group.group_id, "identical_answers")
        else:
            mark_sampled(session, group.group_id)


def _move(session: Session, exchange_ids: Sequence[str], left: str, reason: str) -> None:
    if left == reason:
        return
    set_selection(session, exchange_ids, reason)
    count(session, STAGE, reason, len(exchange_ids))
    if left != NEW:
        count(session, STAGE, left, -len(exchange_ids))
