"""Find the exchanges of the same prompt as those of a batch, by an index."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from ingest.errors import UnreadableExchangesError
from ingest.grouping.same_prompt import NOTHING_ALIKE, JoinServed, SamePrompts, Sibling, place_of
from ingest.store.exchanges import StoredExchange, load_by_seq
from ingest.store.groups import SAMPLING
from sidecar.store.models import ExchangeRow, GroupRow

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
    try:
        stored = load_by_seq(session, seqs)
    except UnreadableExchangesError as error:
        sound = [seq for seq in seqs if seq not in error.damage]
        stored = load_by_seq(session, sound) if sound else []
    return [
        Sibling(exchange=one.exchange, session_id=one.session_id, selection=one.selection)
        for one in reversed(stored)
    ]
