"""Apply selection to exchanges, just stored and waiting, with what the store knows of them.

`consume` decides what it stores in the transaction that stores it, from the records that it has in
memory. `choose_new` decides what was stored before the first probe of vLLM. Each is one write
transaction: the reason on the exchange, its count, the new group and its
served answers are stored together or not at all. The counters of stage `selection` always add up to
the number of decided exchanges: one that leaves the backlog is subtracted from the backlog's count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import structlog
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session, aliased

from ingest.best_of import settle_new
from ingest.errors import UnreadableExchangesError
from ingest.grouping.features import (
    Features,
    features_of,
    is_held_out,
    near_key,
    opening_key,
    turn_of,
)
from ingest.grouping.same_prompt import (
    JOINED,
    NOTHING_ALIKE,
    JoinServed,
    SamePrompts,
    Sibling,
    place_of,
)
from ingest.grouping.selection import (
    BACKLOG,
    DAY_S,
    REHEARSAL,
    SHARE,
    STAGE,
    TURN_DECIDED,
    Caller,
    Decision,
    GroupKeys,
    Rules,
    Shares,
    StoreState,
    daily_demand,
    live_now,
    rules_now,
    select_exchanges,
)
from ingest.sampling.round import all_identical
from ingest.sessions.messages import Arrival, Family, Kin, Place
from ingest.sessions.rows import arrival_of
from ingest.sessions.search import RequestReader
from ingest.sessions.tree import TTL_S, SessionTree
from ingest.store import sessions as store
from ingest.store.exchanges import (
    NEW,
    StoredExchange,
    any_settled,
    load_by_selection,
    load_of_turns,
    newest_of,
    put_aside,
    read_pages,
    sessions_of,
    set_selection,
    spread_since,
    turns_with,
)
from ingest.store.groups import (
    CLAIMED,
    PENDING,
    SAMPLING,
    SCORED,
    append_answers,
    mark_sampled,
    save_group,
    set_aside,
)
from ingest.store.sessions import count_by_session
from sidecar.errors import UNREADABLE_JSON
from sidecar.lines import line_name
from sidecar.records import BASE, IMPORTED, Exchange
from sidecar.store.contents import keyring_of
from sidecar.store.database import Database, count
from sidecar.store.models import (
    AliasRow,
    ExchangeRow,
    FeedbackRow,
    GroupRow,
    SignalRow,
    TaskGroupRow,
)

# Find the exchanges of the same prompt as those of a batch, by an index.

NEWEST: Final = 32
"""Exchanges of one prompt and one state that are looked at, the newest: a prompt that every session
begins with has any number of them."""
LEFT_OUT: Final = ("rate", "backlog")
"""Values of `selection` of exchanges that were left out only for their cost."""
CHOSEN: Final = "chosen"


def find_same_prompts(
    session: Session,
    batch: Sequence[StoredExchange],
    *,
    join: JoinServed,
    size: int,
    live: Collection[str],
) -> SamePrompts:
    """Read what the store holds of the prompts of a batch; damaged exchanges are left out.

    size: of a group; no more exchanges of one prompt are read whole. live: adapters that serve.
    """
    if join == "off":
        return NOTHING_ALIKE
    ids = [one.exchange.exchange_id for one in batch if one.exchange.adapter in live]
    rows = session.execute(
        select(ExchangeRow.exchange_id, ExchangeRow.prompt_key, ExchangeRow.session_id).where(
            ExchangeRow.exchange_id.in_(ids), ExchangeRow.prompt_key.is_not(None)
        )
    ).all()
    keyed = [(name, key, session_id) for name, key, session_id in rows if key is not None]
    keys = {name: key for name, key, _ in keyed}
    places = {place_of(key, session_id, join) for _, key, session_id in keyed}
    left_out: dict[str, list[Sibling]] = {}
    open_groups: dict[tuple[str, str], str] = {}
    for key in sorted(_known_before(session, ids)):
        found = [
            seq
            for selection in LEFT_OUT
            for seq, name, session_id in _newest(session, key, selection)
            if name not in keys and place_of(key, session_id, join) in places
        ]
        left_out[key] = _siblings(session, sorted(found, reverse=True)[:size])
        sessions = {name: session_id for _, name, session_id in _newest(session, key, CHOSEN)}
        groups = session.execute(
            select(GroupRow.exchange_id, GroupRow.group_id)
            .where(GroupRow.exchange_id.in_(sorted(sessions)), GroupRow.status == SAMPLING)
            .order_by(GroupRow.seq)
        )
        for name, group_id in groups:
            open_groups[place_of(key, sessions[name], join)] = group_id
    return SamePrompts(keys=keys, left_out=left_out, open_groups=open_groups)


def _known_before(session: Session, exchange_ids: Sequence[str]) -> set[str]:
    """Return the keys of these exchanges that others have too, which are decided."""
    other = aliased(ExchangeRow)
    known = (
        select(other.seq)
        .where(
            other.prompt_key == ExchangeRow.prompt_key,
            other.prompt_key.is_not(None),
            other.selection.in_((*LEFT_OUT, CHOSEN)),
            other.seq != ExchangeRow.seq,
        )
        .exists()
    )
    found = session.scalars(
        select(ExchangeRow.prompt_key).where(ExchangeRow.exchange_id.in_(exchange_ids), known)
    )
    return {key for key in found if key is not None}


def _newest(session: Session, key: str, selection: str) -> list[tuple[int, str, str]]:
    """Return (seq, exchange id, session id) of the newest exchanges of a prompt in one state."""
    rows = session.execute(
        select(
            ExchangeRow.seq, ExchangeRow.exchange_id, ExchangeRow.session_id, ExchangeRow.held_out
        )
        .where(ExchangeRow.prompt_key == key, ExchangeRow.selection == selection)
        .order_by(ExchangeRow.seq.desc())
        .limit(NEWEST)
    )
    return [(seq, name, session_id) for seq, name, session_id, held_out in rows if not held_out]


def _siblings(session: Session, seqs: Sequence[int]) -> list[Sibling]:
    """Read these exchanges, the newest first."""
    if not seqs:
        return []
    ((stored, _),) = read_pages(session, [seqs])
    return [
        Sibling(exchange=one.exchange, session_id=one.session_id, selection=one.selection)
        for one in reversed(stored)
    ]


# Read what the store knows of the steps of a batch: their caps, and what tells of a spread.

EARLIER: Final = 32
"""Newest groups of an opening whose outcome counts: some days of it, so that what an adapter has
learned since soon shows."""
WITHOUT_SPREAD: Final = ("identical_answers", "no_spread", "within_noise")
"""Values of `answer_group.reason` of groups whose answers earned the same."""


def keys_of(session: Session, batch: Sequence[StoredExchange]) -> dict[str, GroupKeys]:
    """Return what the groups of a batch are counted by. In an encrypted store there are no digests
    of prompts, because who has a guess of one could test it."""
    sealed = bool(keyring_of(session))
    found = {}
    for one in batch:
        if one.held_out:
            continue  # never has a group
        project, request = one.exchange.project, _object(one.exchange.request)
        found[one.exchange.exchange_id] = GroupKeys(
            project=project,
            near=None if sealed else near_key(project, request),
            opening=None if sealed else opening_key(project, request),
        )
    return found


def counts_by_near(
    session: Session, keys: Collection[GroupKeys], rules: Rules, *, since: float
) -> dict[str, int]:
    """Count the groups since then of near-identical prompts, where there is a cap."""
    most, found = rules.max_groups_per_near_prompt, dict[str, int]()
    for name in sorted({one.near for one in keys if one.near is not None}) if most else ():
        of_prompt = select(GroupRow.seq).where(
            GroupRow.near_key == name, GroupRow.created_at >= since
        )
        some = of_prompt.limit(most).subquery()
        found[name] = session.scalar(select(func.count()).select_from(some)) or 0
    return found


def features_in(
    session: Session, batch: Sequence[StoredExchange], keys: Mapping[str, GroupKeys]
) -> dict[str, Features]:
    """Return the features of a batch by exchange id."""
    ids = [one.exchange.exchange_id for one in batch]
    signals: dict[str, set[str]] = {}
    for name, kind in session.execute(
        select(SignalRow.exchange_id, SignalRow.kind).where(SignalRow.exchange_id.in_(ids))
    ):
        signals.setdefault(name, set()).add(kind)
    negative = set(
        session.scalars(
            select(FeedbackRow.exchange_id).where(
                FeedbackRow.exchange_id.in_(ids), FeedbackRow.score < 0
            )
        )
    )
    sessions = sorted({one.session_id for one in batch})
    unhappy = set(
        session.scalars(
            select(FeedbackRow.session_id).where(
                FeedbackRow.session_id.in_(sessions),
                FeedbackRow.target_kind != "exchange",
                FeedbackRow.score < 0,
            )
        )
    )
    openings = {one.opening for one in keys.values()}
    earlier = {one: _earlier(session, one) for one in openings if one is not None}
    return {
        one.exchange.exchange_id: features_of(
            one.exchange,
            _object(one.exchange.request),
            signals=signals.get(one.exchange.exchange_id, ()),
            negative=one.exchange.exchange_id in negative or one.session_id in unhappy,
            earlier=earlier.get(keys[one.exchange.exchange_id].opening or "", (0, 0)),
        )
        for one in batch
        if one.exchange.exchange_id in keys
    }


def _earlier(session: Session, opening: str) -> tuple[int, int]:
    """Count the newest groups of an opening whose spread is known, and those that have one."""
    rows = session.execute(
        select(GroupRow.status, GroupRow.reason)
        .where(GroupRow.opening_key == opening)
        .order_by(GroupRow.seq.desc())
        .limit(EARLIER)
    ).all()
    spread = sum(status == "trained" for status, _ in rows)
    return spread + sum(reason in WITHOUT_SPREAD for _, reason in rows), spread


def _object(request: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(request, type=dict[str, Any])
    except UNREADABLE_JSON:
        return {}


# The sessions of the ingest process: the tree, and what the store has of it.

RESTORED = 20_000
"""Exchanges that are read after a restart, at most: ten seconds. The newest count."""
RESTORED_BYTES = 512 * 2**20
"""Requests that are read after a restart, at most. The newest count."""

PLACING_STAGE = "sessions"
UNREADABLE = "unreadable"
"""Counter row: damaged exchanges that a start left out; each start counts them again."""

log = structlog.get_logger()


class Sessions:
    """Places exchanges, and stores what a late one changes. For one thread."""

    def __init__(self, *, held_out_rate: float) -> None:
        """held_out_rate: share of sessions that are held out from training, 0..1."""
        self._reader = RequestReader()
        self._tree = SessionTree(is_held_out=lambda name: is_held_out(name, held_out_rate))
        self._moves: dict[str, Place] = {}
        """Exchanges that moved, until the store has it."""

    def restore(self, database: Database, *, now: float) -> int:
        """Remember the newest exchanges of the store. Damaged ones are left out and counted.

        Returns: how many are remembered.
        """
        found = damaged = 0
        with database.read() as session:
            for page, unreadable in store.newest_exchanges(
                session, since=now - TTL_S, limit=RESTORED, limit_bytes=RESTORED_BYTES
            ):
                for one in page:
                    # A clock that was fast for a while must not keep an exchange for ever.
                    stored_at = min(one.stored_at, now)
                    arrival = arrival_of(one.exchange, self._reader)
                    self._tree.restore(arrival, one.place, now=stored_at)
                found += len(page)
                damaged += unreadable
        if damaged:
            with database.write() as session:
                count(session, PLACING_STAGE, UNREADABLE, damaged)
        if found or damaged:
            log.info("sessions_restored", exchanges=found, unreadable=damaged)
        return found

    def read(self, exchange: Exchange) -> Arrival:
        """Read an exchange as `place` needs it."""
        return arrival_of(exchange, self._reader)

    def place(
        self, exchange: Exchange, *, now: float, arrival: Arrival | None = None
    ) -> tuple[Place, bool]:
        """Return the place of an exchange, and whether it is held out.

        arrival: what `read` returned, if the caller has it.
        """
        own, *moved = self._tree.place(arrival or self.read(exchange), now=now)
        for place in moved:
            self._moves[place.exchange_id] = place
        return own, own.held_out and not own.shares_opening

    @property
    def moved(self) -> bool:
        """`place` has moved exchanges, which is not stored yet."""
        return bool(self._moves)

    def kin(self, exchange_id: str) -> Kin | None:
        """Return who stands beside a placed exchange, after all moves so far; None when it is
        forgotten already."""
        return self._tree.kin(exchange_id)

    def regrouped(self) -> list[Family]:
        """Return the families that the moves of `save_moves` have changed."""
        return self._tree.regrouped() if self._moves else []

    def save_moves(self, session: Session) -> None:
        """Store the moves that `place` caused, in the caller's transaction."""
        store.save_moves(session, self._moves.values())

    def saved(self) -> None:
        """All placed exchanges are stored, or never will be, and `save_moves` after the last."""
        self._moves.clear()
        self._tree.forget_regrouped()


def as_moved(session: Session, found: Sequence[StoredExchange]) -> list[StoredExchange]:
    """Return exchanges as the store has them now: a later one of the same batch may have moved an
    earlier one to another session."""
    sessions = sessions_of(session, [stored.exchange.exchange_id for stored in found])
    return [
        replace(stored, place=replace(stored.place, session=name), held_out=held_out)
        for stored in found
        for name, held_out in (sessions[stored.exchange.exchange_id],)
    ]


# Count the groups that wait: how many exchanges may still be chosen depends on it.


def count_pending(
    session: Session, live_adapters: Collection[str], *, most: int | None = None
) -> int:
    """Count the groups that wait for candidates, the judge or the learner, or are being trained on.

    most: counting ends there, because groups of best-of-N requests may wait without limit; None:
        all are counted.

    live_adapters: a group at the learner counts only when one of these sampled it. A group of an
        older adapter may be too stale to be trained on, and must not keep fresh groups out. For
        the same reason a group does not count on which a training run failed.
    """
    return sum(pending_by_status(session, live_adapters, most=most).values())


def pending_by_status(
    session: Session, live_adapters: Collection[str], *, most: int | None = None
) -> dict[str, int]:
    """Count the same groups by their status; a status without one is left out."""
    some = select(GroupRow.status).where(*_waiting(live_adapters)).limit(most).subquery()
    statuses = (*PENDING, SCORED, CLAIMED)
    # Counted in one pass: a GROUP BY would sort what waits.
    row = session.execute(
        select(*(func.count().filter(some.c.status == status) for status in statuses)).select_from(
            some
        )
    ).one()
    return {status: number for status, number in zip(statuses, row, strict=True) if number}


def pending_by_caller(
    session: Session, live_adapters: Collection[str], *, most: int
) -> Counter[Caller]:
    """Count the same groups by who asked, up to `most` of them."""
    some = select(GroupRow.exchange_id).where(*_waiting(live_adapters)).limit(most).subquery()
    columns = (ExchangeRow.project, ExchangeRow.key_id, ExchangeRow.user)
    of_group = ExchangeRow.exchange_id == some.c.exchange_id
    return Counter(Caller(*row) for row in session.execute(select(*columns).join(some, of_group)))


def _waiting(live_adapters: Collection[str]) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    waits = GroupRow.status.in_(PENDING)
    at_learner = GroupRow.status.in_((SCORED, CLAIMED)) & (GroupRow.learn_attempts == 0)
    for_learner = at_learner & GroupRow.adapter.in_(live_adapters)
    # The statuses stand alone too: SQLite searches no index for the terms of an OR.
    alive = GroupRow.status.in_((*PENDING, SCORED, CLAIMED))
    return alive, waits | for_learner


TRAINED = "trained"
IN_TASK = "in_task_group"
"""Reason of an exchange whose session is learned from as a whole."""
LOOKED_AT = 2_048
"""Exchanges by which the shares of callers are decided, spread over the last day, and newest ones
of the backlog: some ten milliseconds, under the write lock."""


def choose_new(database: Database, rules: Rules, *, model: str, limit: int, now: float) -> int:
    """Decide up to `limit` new exchanges that were stored `rules.settle_s` ago, the oldest first.

    now: Unix seconds.
    Returns: the number of exchanges decided.
    """

    def settled(stored_at: float) -> bool:
        # A time to come was written by a clock that was fast: nothing waits for it.
        return not now - rules.settle_s < stored_at <= now

    with database.read() as session:
        if not any_settled(session, NEW, settled):
            return 0  # usual between two requests: take no write lock
    with database.write() as session:
        load = partial(load_by_selection, session, NEW, limit=limit, settled=settled)
        batch = _readable(session, NEW, load)
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
    asked = ((caller, at) for _, caller, at, state in seen if state != REHEARSAL)
    waiting = [(seq, caller) for seq, caller, _, state in seen if state == BACKLOG]
    return daily_demand(asked, now=now, each=each), waiting


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
        load = partial(load_by_selection, session, BACKLOG, limit=room, newest_first=True, of=seqs)
        batch = _not_learned_from(session, _readable(session, BACKLOG, load))
        decide(session, batch, rules, model=model, now=now)
    return len(batch)


def _not_learned_from(session: Session, batch: Sequence[StoredExchange]) -> list[StoredExchange]:
    """Leave out the steps of sessions that a run learns from as a whole, or did: each step is
    learned from once."""
    names = [one.exchange.exchange_id for one in batch]
    learned = set(
        session.scalars(
            select(ExchangeRow.exchange_id)
            .join(TaskGroupRow, TaskGroupRow.group_id == ExchangeRow.task_group_id)
            .where(ExchangeRow.exchange_id.in_(names), TaskGroupRow.status.in_((CLAIMED, TRAINED)))
        )
    )
    _move(session, sorted(learned), BACKLOG, IN_TASK)
    return [one for one in batch if one.exchange.exchange_id not in learned]


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
    store_state = StoreState(
        keys=keys,
        groups_by_near=counts_by_near(session, keys.values(), rules, since=since),
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
    pairs = [
        (_of_champion(session, stored.exchange, model, rules), stored.held_out) for stored in batch
    ]
    moves: dict[tuple[str, str], list[str]] = {}
    for decision in select_exchanges(pairs, store_state, rules):
        move = (before[decision.exchange_id], decision.reason)
        moves.setdefault(move, []).append(decision.exchange_id)
        _apply(session, decision, rules, now=now)
        for sibling in decision.siblings:
            moved = moves.setdefault((sibling.selection, JOINED), [])
            moved.append(sibling.exchange.exchange_id)
        log.debug("exchange_decided", exchange_id=decision.exchange_id, reason=decision.reason)
    for (left, reason), exchange_ids in moves.items():
        _move(session, exchange_ids, left, reason)


def _of_champion(session: Session, exchange: Exchange, model: str, rules: Rules) -> Exchange:
    """Return an exchange as selection reads it: one that was imported is answered by the champion
    of now, whichever was the champion when it came."""
    if exchange.origin != IMPORTED:
        return exchange
    own = exchange.project if exchange.project in rules.own_adapters else None
    alias = session.get(AliasRow, (line_name(model, own), "champion"))
    return msgspec.structs.replace(exchange, adapter=alias.adapter if alias is not None else BASE)


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
