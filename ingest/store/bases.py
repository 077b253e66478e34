"""Store requests and prompt ids as differences: choose the base, encode, and encode anew.

The base of an exchange is the one that it continues. One that continues none, or whose chain is
full, takes the opening of an earlier conversation of the same project, key and user that begins
with the same bytes: the system prompt and the tools are stored once for many of them. Bodies of
different users are never stored as differences of one another.

`base_id` stays as it is when a late exchange gives a row another parent or session. Before an
exchange is deleted, what stands on it must be encoded anew: `rebase_children` does it in one
transaction; `encode_children` and `store_children` do it with the work outside the write lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from sidecar.records import Exchange
from sidecar.store.arrays import pack_ids
from sidecar.store.content_cache import Content, ContentCache
from sidecar.store.contents import (
    MAX_CHAIN_BYTES,
    MAX_LINKS,
    PAGE,
    content_cache,
    keyring_of,
    load_contents,
    load_links,
)
from sidecar.store.frames import MAX_VALUE_BYTES, compress
from sidecar.store.keyring import Keyring, place_in
from sidecar.store.models import ExchangeRow

WRITTEN_CHAIN_BYTES = MAX_CHAIN_BYTES // 4
"""A longer chain is not written; it could not be decoded once and kept in the cache."""
Row = dict[str, Any]  # Any: what a column holds
OPENING_BYTES = 256
"""Requests that begin with the same bytes, this many, probably have the same system prompt."""
SUSPICIOUS = 6
"""A difference that is over a sixth of what it stands for is compared with the whole, compressed:
requests alone become a quarter to a sixth."""
WORTH = 0.8
"""A difference is stored when it is smaller than this share of the whole, compressed."""


def content_of(exchange: Exchange) -> Content:
    """Return what the store keeps as a difference.

    Raises: OverflowError for an id over 2**31, ValueError for a request over `MAX_VALUE_BYTES`.
    """
    if len(exchange.request) > MAX_VALUE_BYTES:
        raise ValueError(f"a request of {len(exchange.request)} bytes is too long to be stored")
    return Content(
        request=exchange.request,
        prompt_ids=pack_ids(exchange.prompt_token_ids),
        replies=b"".join(choice.message for choice in exchange.choices),
        reply_ids=b"".join(pack_ids(choice.token_ids) for choice in exchange.choices),
    )


def encode_contents(session: Session, rows: Sequence[tuple[Row, Content]]) -> None:
    """Set the columns of requests and prompt ids in rows that will be inserted, the oldest first.

    It needs no lock: `settle_bases` asks again whether the bases are there.
    """
    cache = content_cache(session)
    own = {row["exchange_id"] for row, _ in rows}
    named = (row.get("parent_id") for row, _ in rows)
    parents = {name for name in named if name is not None and name not in own}
    bases = {name: known for name in parents if (known := cache.get(name)) is not None}
    if missing := sorted(parents - bases.keys()):
        bases |= load_contents(session, missing, as_bases=True).found
    keyring = keyring_of(session)
    for row, content in rows:
        _encode_row(row, content, bases, cache, keyring)


def settle_bases(session: Session, rows: Sequence[tuple[Row, Content]]) -> None:
    """Store completely what was encoded with a base that is gone. Call it in the transaction that
    inserts the rows, and only for rows that it inserts."""
    bases = {row["base_id"] for row, _ in rows} - {row["exchange_id"] for row, _ in rows} - {None}
    present: set[str] = set()
    for page in _pages(sorted(bases)):
        # Locked: nobody may delete one before this transaction ends.
        there = select(ExchangeRow.exchange_id).where(ExchangeRow.exchange_id.in_(page))
        present.update(session.scalars(there.with_for_update(read=True, key_share=True)))
    cache = content_cache(session)
    for lost in bases - present:
        cache.drop(lost)
    keyring = keyring_of(session)
    for row, content in rows:
        if row["base_id"] in bases - present:
            row.update(
                sealed_columns(_whole(content), row["exchange_id"], content, keyring), base_id=None
            )


@dataclass(slots=True)
class Rebased:
    """Children of exchanges that will be deleted, encoded anew."""

    rows: dict[str, Row] = field(default_factory=dict)
    """Exchange id -> columns."""
    damaged: set[str] = field(default_factory=set)
    """Children that cannot be read, whether their base stays or goes."""
    locked: set[str] = field(default_factory=set)
    """Children that can be read with a key that is missing here, as long as their bases stay."""


def children_of(session: Session, gone: Collection[str]) -> list[str]:
    """Return the exchanges that stay and whose base is one of these, which will be deleted."""
    left = set(gone)
    found: list[str] = []
    for page in _pages(sorted(left)):
        rows = session.scalars(select(ExchangeRow.exchange_id).where(ExchangeRow.base_id.in_(page)))
        found += [one for one in rows if one not in left]
    return found


def encode_children(
    session: Session, gone: Collection[str], *, limit: int = PAGE, limit_bytes: int | None = None
) -> Rebased:
    """Encode children anew, on the first exchange of their chain that stays. It needs no lock.

    limit, limit_bytes: of children, and of their decoded bytes; one at least is encoded.
    """
    left = set(gone)
    rebased = Rebased()
    keyring = keyring_of(session)
    size = 0
    for page in _pages(children_of(session, left), min(PAGE, limit)):
        bases = {one: link.base_id for one, link in load_links(session, page).items()}
        below = {one: _first_that_stays(one, bases, left) for one in page}
        wanted = {*page, *(name for name in below.values() if name is not None)}
        contents = load_contents(session, sorted(wanted), as_bases=True)
        for child in page:
            if (content := contents.found.get(child)) is None:
                lost = rebased.locked if child in contents.locked else rebased.damaged
                lost.add(child)
                continue
            name = below[child]
            base = contents.found.get(name) if name is not None else None
            stored, differs = _encode(content, base)
            stored = sealed_columns(stored, child, content, keyring)
            rebased.rows[child] = {**stored, "base_id": name if differs else None}
            size += content.size
            if limit_bytes is not None and size >= limit_bytes:
                return rebased
        if len(rebased.rows) >= limit:
            break
    return rebased


def store_children(session: Session, rebased: Rebased, gone: Collection[str]) -> int:
    """Store children that `encode_children` encoded, in the caller's write transaction.

    One whose new base has gone meanwhile, or that has another base by now, stays as it is.
    Returns: how many were stored.
    """
    bases = {row["base_id"] for row in rebased.rows.values()} - {None}
    present: set[str] = set()
    for page in _pages(sorted(bases)):
        there = select(ExchangeRow.exchange_id).where(ExchangeRow.exchange_id.in_(page))
        present.update(session.scalars(there))
    done = 0
    for child, row in rebased.rows.items():
        if row["base_id"] is not None and row["base_id"] not in present:
            continue
        stored = session.scalars(
            update(ExchangeRow)
            .where(ExchangeRow.exchange_id == child, ExchangeRow.base_id.in_(gone))
            .values(**row)
            .returning(ExchangeRow.seq)
            .execution_options(synchronize_session=False)
        )
        done += len(stored.all())
    return done


def rebase_children(session: Session, gone: Collection[str], *, limit: int = PAGE) -> int:
    """Encode anew the exchanges that stay and whose base is one of these, which will be deleted.

    Call it in a write transaction, before they are deleted, until it returns 0. What is left then
    cannot be read, whether its base stays or goes.
    limit: of exchanges that are encoded. Returns: how many were.
    """
    done = store_children(session, encode_children(session, gone, limit=limit), gone)
    cache = content_cache(session)
    for one in gone:
        cache.drop(one)
    return done


def _first_that_stays(
    exchange_id: str, bases: Mapping[str, str | None], gone: Collection[str]
) -> str | None:
    name = bases.get(exchange_id)
    for _ in bases:  # damaged ids may lead in a circle
        if name not in gone:
            return name
        name = bases.get(name) if name is not None else None
    return None


def _encode_row(
    row: Row,
    content: Content,
    bases: Mapping[str, Content],
    cache: ContentCache,
    keyring: Keyring,
) -> None:
    exchange_id, parent = row["exchange_id"], row.get("parent_id")
    mark = b""
    base_id = parent
    base = bases.get(parent) or cache.get(parent) if parent is not None else None
    if base is None or not _has_room(base, content):
        mark = _mark(row, content)
        base_id = cache.opening(mark)
        base = cache.get(base_id) if base_id not in (None, exchange_id) else None
    if base is not None and not _has_room(base, content):
        base = None
    stored, differs = _encode(content, base)
    stored = sealed_columns(stored, exchange_id, content, keyring)
    row.update(stored, base_id=base_id if differs else None)
    if base is not None and differs:
        content = replace(content, links=base.links + 1, chain_bytes=base.chain_bytes + base.size)
    else:
        cache.set_opening(mark or _mark(row, content), exchange_id)
    cache.put(exchange_id, content)


def _has_room(base: Content, content: Content) -> bool:
    total = base.chain_bytes + base.size + content.size
    return base.links < MAX_LINKS and total <= WRITTEN_CHAIN_BYTES


def _encode(content: Content, base: Content | None) -> tuple[Row, bool]:
    """Return the columns, and whether they are a difference from the base."""
    if base is None:
        return _whole(content), False
    body = compress(content.request, base.request_base)
    ids = compress(content.prompt_ids, base.prompt_base) if content.prompt_ids else b""
    stored_bytes = len(body) + len(ids)
    if stored_bytes * SUSPICIOUS > len(content.request) + len(content.prompt_ids):
        whole = _whole(content)
        if stored_bytes > WORTH * sum(map(len, whole.values())):
            return whole, False
    return {"request_body": body, "prompt_token_ids": ids}, True


def _whole(content: Content) -> Row:
    ids = compress(content.prompt_ids) if content.prompt_ids else b""
    return {"request_body": compress(content.request), "prompt_token_ids": ids}


def sealed_columns(stored: Row, exchange_id: str, content: Content, keyring: Keyring) -> Row:
    """Return the columns of a request and its prompt encrypted, if there is a key."""
    if not keyring:
        return stored
    sizes = {"request_body": len(content.request), "prompt_token_ids": len(content.prompt_ids)}
    return {
        name: keyring.seal(value, place_in("exchange", name, exchange_id), size=sizes[name])
        for name, value in stored.items()
    }


def _mark(row: Row, content: Content) -> bytes:
    owner = (row["project"], row["key_id"], row["user"], row["surface"])
    digest = hashlib.sha256(repr(owner).encode("utf-8", "surrogatepass"))
    digest.update(content.request[:OPENING_BYTES])
    return digest.digest()


def _pages(exchange_ids: Sequence[str], size: int = PAGE) -> Iterator[Sequence[str]]:
    for start in range(0, len(exchange_ids), size):
        yield exchange_ids[start : start + size]
