"""Store requests and prompt ids as differences: choose the base, encode, and encode anew.

The base of an exchange is the one that it continues. One that continues none, or whose chain is
full, takes the opening of an earlier conversation of the same project, key and user that begins
with the same bytes: the system prompt and the tools are stored once for many of them. Bodies of
different users are never stored as differences of one another.

`base_id` stays as it is when a late exchange gives a row another parent or session. Before an
exchange is deleted, what stands on it must be encoded anew, the others on one of them, so that what
they share is still stored once: `encode_children` and `store_children` do it a few at a time, with
the work outside the write lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from sidecar.records import Exchange
from sidecar.store.codec import MAX_VALUE_BYTES, compress, pack_ids
from sidecar.store.contents import (
    MAX_CHAIN_BYTES,
    MAX_LINKS,
    PAGE,
    Content,
    ContentCache,
    content_cache,
    keyring_of,
    load_contents,
    load_links,
)
from sidecar.store.keyring import Keyring, place_in
from sidecar.store.models import ExchangeRow

WRITTEN_CHAIN_BYTES = MAX_CHAIN_BYTES // 4
"""A longer chain is not written; it could not be decoded once and kept in the cache."""
GROWTH_BYTES = WRITTEN_CHAIN_BYTES // MAX_LINKS
"""Decoded bytes by which a chain may grow when an exchange gets another base."""
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
    """Exchange id -> columns, an heir before those that stand on it. One that cannot be read,
    whether its base stays or goes, only loses its base."""
    heirs: frozenset[str] = frozenset()
    """Bases of rows that were children of the same exchanges."""
    locked: set[str] = field(default_factory=set)
    """Children that can be read with a key that is missing here, as long as their bases stay."""


Heirs = dict[str, str]
"""The lowest exchange of a chain that will be deleted -> the child that others are stored on."""


def children_of(session: Session, gone: Collection[str], *, limit: int) -> dict[str, str]:
    """Return exchanges that stay and whose base is one of these, which will be deleted, by id."""
    found: dict[str, str] = {}
    for page in _pages(sorted(gone)):
        rows = session.execute(
            select(ExchangeRow.exchange_id, ExchangeRow.base_id)
            .where(ExchangeRow.base_id.in_(page), ExchangeRow.exchange_id.not_in(gone))
            .limit(limit - len(found))
        )
        found |= {row.exchange_id: row.base_id for row in rows}
        if len(found) >= limit:
            break
    return found


def encode_children(
    session: Session,
    gone: Collection[str],
    heirs: Heirs,
    *,
    limit: int = PAGE,
    limit_bytes: int | None = None,
) -> Rebased:
    """Encode children anew. It needs no lock.

    One child is the heir: it is stored on the first exchange of its chain that stays, or complete,
    and the others on the heir or on that exchange, whichever takes less. It is the youngest child,
    because retention deletes it last.
    heirs: of earlier calls for the same exchanges; new ones are added.
    limit, limit_bytes: of children, and of their decoded bytes; one at least is encoded.
    """
    left = set(gone)
    found = children_of(session, left, limit=limit)
    youngest = [_youngest_child(session, base, left) for base in sorted(set(found.values()))]
    children = list(dict.fromkeys([*(one for one in youngest if one is not None), *found]))[:limit]
    bases = {
        one: link.base_id for one, link in load_links(session, [*children, *heirs.values()]).items()
    }
    for lowest, heir in list(heirs.items()):
        if heir not in bases or bases[heir] in left:  # it has gone, or was not stored
            del heirs[lowest]
    ends = {one: _ends(one, bases, left) for one in children}
    names = {*children, *heirs.values(), *(stays for _, stays in ends.values())}
    contents = load_contents(session, sorted(one for one in names if one), as_bases=True)
    known = dict(contents.found)
    keyring = keyring_of(session)
    rebased = Rebased()
    size = 0
    for child in children:
        if (content := contents.found.get(child)) is None:
            if child in contents.locked:
                rebased.locked.add(child)
            else:
                rebased.rows[child] = {"base_id": None}
            continue
        lowest, stays = ends[child]
        heir = heirs.get(lowest, child)
        if heir not in known:
            heir = child
        heirs[lowest] = heir
        wanted = [known[stays]] if stays in known else []
        if heir != child and _may_inherit(known[heir], content):
            wanted.insert(0, known[heir])
        stored, base = _encode_shortest(content, wanted)
        if heir == child:
            known[child] = _on(base, content)
        name = None if base is None else heir if base is known[heir] else stays
        stored = sealed_columns(stored, child, content, keyring)
        rebased.rows[child] = {**stored, "base_id": name}
        size += content.size
        if limit_bytes is not None and size >= limit_bytes:
            break
    rebased.heirs = frozenset(heirs.values())
    return rebased


def store_children(session: Session, rebased: Rebased, gone: Collection[str]) -> int:
    """Store children that `encode_children` encoded, in the caller's write transaction.

    One whose new base has gone meanwhile, or that has another base by now, stays as it is; and one
    whose heir does, so that bases never lead in a circle.
    Returns: how many were stored.
    """
    bases = {row["base_id"] for row in rebased.rows.values()} - {None}
    there: dict[str, str | None] = {}
    for page in _pages(sorted(bases)):
        found = select(ExchangeRow.exchange_id, ExchangeRow.base_id)
        rows = session.execute(found.where(ExchangeRow.exchange_id.in_(page)))
        there |= {row.exchange_id: row.base_id for row in rows}
    cache = content_cache(session)
    done = 0
    for child, row in rebased.rows.items():
        base = row["base_id"]
        if base is not None and base not in there:
            continue
        if base in rebased.heirs and there[base] in gone:
            continue
        stored = session.scalars(
            update(ExchangeRow)
            .where(ExchangeRow.exchange_id == child, ExchangeRow.base_id.in_(gone))
            .values(**row)
            .returning(ExchangeRow.seq)
            .execution_options(synchronize_session=False)
        )
        if stored.all():
            done += 1
            there[child] = base
            cache.drop(child)  # it has another chain now
    return done


def _youngest_child(session: Session, base: str, gone: Collection[str]) -> str | None:
    return session.scalar(
        select(ExchangeRow.exchange_id)
        .where(ExchangeRow.base_id == base, ExchangeRow.exchange_id.not_in(gone))
        .order_by(ExchangeRow.seq.desc())
        .limit(1)
    )


def _ends(
    exchange_id: str, bases: Mapping[str, str | None], gone: Collection[str]
) -> tuple[str, str | None]:
    """Return the lowest exchange of the chain below that goes, and the first one that stays."""
    lowest, name = "", bases.get(exchange_id)
    for _ in bases:  # damaged ids may lead in a circle
        if name is None or name not in gone:
            return lowest, name
        lowest, name = name, bases.get(name)
    return lowest, None


def _may_inherit(heir: Content, content: Content) -> bool:
    """Whether an exchange may be stored on the heir. Its chain gets no more links; those above it
    get longer chains with it, so its own may grow by little, and what is read has room for more
    than is written."""
    grows = heir.chain_bytes + heir.size - content.chain_bytes
    return _has_room(heir, content) and heir.links < content.links and grows <= GROWTH_BYTES


def _encode_shortest(content: Content, bases: Sequence[Content]) -> tuple[Row, Content | None]:
    """Encode as a difference from the base with which it takes least; None: it is complete."""
    found = [
        (stored, base) for base in bases for stored, differs in (_encode(content, base),) if differs
    ]
    if not found:
        return _whole(content), None
    return min(found, key=lambda one: sum(map(len, one[0].values())))


def _on(base: Content | None, content: Content) -> Content:
    """Return a content with the length of its chain."""
    if base is None:
        return replace(content, links=0, chain_bytes=0)
    return replace(content, links=base.links + 1, chain_bytes=base.chain_bytes + base.size)


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
        content = _on(base, content)
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
