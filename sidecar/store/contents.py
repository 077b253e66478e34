"""Read what exchanges say: their requests and prompt ids, stored as differences from others.

`exchange.base_id` names the exchange that a row is the difference from: mostly the one before it in
its conversation, whose request it repeats. The base is what that one's request and replies say, and
its prompt and completion ids. Null: the row is complete in itself. A base has a base in turn; the
writer begins anew before a chain has more than `MAX_LINKS` bases or `MAX_CHAIN_BYTES`.

A chain is found by one query of ids, and its rows are read in bulk by id. Decoded bases are kept in
a cache, so that the turns of a session, and a batch of them, decode each base once. A damaged row
costs itself and the rows that have it below them, each named by its own damage.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sidecar.store.codec import decompress, decompress_array
from sidecar.store.keyring import NO_KEYS, Keyring, MissingKeyError, place_in
from sidecar.store.models import AnswerRow, ChoiceRow, ExchangeRow

# Decoded exchanges in memory, because others are stored as their difference from them.

MAX_BYTES = 64 * 2**20
"""Some 5,000 exchanges of ordinary length."""
_ENTRY_BYTES = 400
"""What an entry takes besides its bytes."""
MAX_OPENINGS = 4096
MAX_OPENING_USES = 64
"""Conversations whose beginning is stored as the difference from that of one other: so many rows at
most must be written anew before that one is deleted."""


@dataclass(frozen=True, slots=True)
class Content:
    """The part of an exchange that the next one repeats."""

    request: bytes
    prompt_ids: bytes
    """Packed."""
    replies: bytes | None
    """The messages of all choices; None: not read."""
    reply_ids: bytes | None
    """The token ids of all choices, packed; None: not read."""
    links: int = 0
    """Number of bases below it."""
    chain_bytes: int = 0
    """Decoded bytes of these bases."""

    @property
    def size(self) -> int:
        """Decoded bytes."""
        replies, reply_ids = self.replies or b"", self.reply_ids or b""
        return len(self.request) + len(self.prompt_ids) + len(replies) + len(reply_ids)

    @property
    def request_base(self) -> bytes:
        """What the request of the next exchange repeats."""
        return self.request + (self.replies or b"")

    @property
    def prompt_base(self) -> bytes:
        """What the prompt of the next exchange repeats."""
        return self.prompt_ids + (self.reply_ids or b"")


class ContentCache:
    """Contents by exchange id; the least recently used are dropped first. Thread-safe.

    An exchange may be here that is no longer in the store, or never was, because its transaction
    failed. Ids are never used twice, so its content is right all the same; who stores a difference
    from it asks the store first whether it is there.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._contents: dict[str, Content] = {}
        self._openings: dict[bytes, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def get(self, exchange_id: str) -> Content | None:
        """Return a content, with its replies; None when it is not here."""
        with self._lock:
            content = self._contents.pop(exchange_id, None)
            if content is not None:
                self._contents[exchange_id] = content  # now the most recently used
            return content

    def put(self, exchange_id: str, content: Content) -> None:
        """Keep a content. One without its replies is no base, and one over the limit too large."""
        size = content.size + _ENTRY_BYTES
        if content.replies is None or content.reply_ids is None or size > self._max_bytes:
            return
        with self._lock:
            known = self._contents.pop(exchange_id, None)
            self._bytes += size - (0 if known is None else known.size + _ENTRY_BYTES)
            self._contents[exchange_id] = content
            while self._bytes > self._max_bytes:
                oldest = self._contents.pop(next(iter(self._contents)))
                self._bytes -= oldest.size + _ENTRY_BYTES

    def drop(self, exchange_id: str) -> None:
        """Forget a content that was deleted."""
        with self._lock:
            known = self._contents.pop(exchange_id, None)
            if known is not None:
                self._bytes -= known.size + _ENTRY_BYTES

    def opening(self, mark: bytes) -> str | None:
        """Return the exchange that the next opening of this mark may repeat; count the use."""
        with self._lock:
            exchange_id, uses = self._openings.pop(mark, ("", MAX_OPENING_USES))
            if uses >= MAX_OPENING_USES:
                return None
            self._openings[mark] = (exchange_id, uses + 1)
            return exchange_id

    def set_opening(self, mark: bytes, exchange_id: str) -> None:
        """Let following conversations of this mark repeat this exchange."""
        with self._lock:
            self._openings.pop(mark, None)
            self._openings[mark] = (exchange_id, 0)
            if len(self._openings) > MAX_OPENINGS:
                del self._openings[next(iter(self._openings))]


MAX_LINKS: Final = 32
"""Bases below an exchange."""
MAX_CHAIN_BYTES: Final = 64 * 2**20
"""Decoded bytes of the bases below an exchange."""
PAGE: Final = 500
"""Ids in one query."""
FETCHED_BYTES: Final = 8 * 2**20
"""Stored bytes that are fetched at once; a single chain is fetched whole."""
_DAMAGE = (zlib.error, ValueError, TypeError)
_ROW = ExchangeRow


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of some exchanges, by id."""

    found: dict[str, Content] = field(default_factory=dict)
    damage: dict[str, str] = field(default_factory=dict)
    """What is wrong with those that cannot be read."""
    locked: set[str] = field(default_factory=set)
    """Those of them that are encrypted, or stand on what is, with a key that is missing."""

    def __getitem__(self, exchange_id: str) -> Content:
        """Raises: ValueError when the exchange is damaged or not there."""
        if (content := self.found.get(exchange_id)) is None:
            raise ValueError(self.damage.get(exchange_id, f"there is no exchange {exchange_id}"))
        return content


class Link(NamedTuple):
    """A row of a chain that is not fetched yet."""

    base_id: str | None
    stored_bytes: int


class _Stored(NamedTuple):
    """A row as it is stored."""

    base_id: str | None
    request_body: bytes
    prompt_token_ids: bytes


Reply = tuple[int, bytes, bytes]
"""Index, message body and token ids of a choice, as they are stored."""


def load_contents(
    session: Session, exchange_ids: Iterable[str], *, as_bases: bool = False
) -> Contents:
    """Read the contents of these exchanges. An id that is not in the store is left out.

    as_bases: read their replies too.
    """
    wanted = list(dict.fromkeys(exchange_ids))
    cache = content_cache(session)
    contents = Contents()
    links = load_links(session, wanted)
    reading = _Reading(session, cache, contents, as_bases)
    for group, needed in _groups([one for one in wanted if one in links], links, cache):
        reading.read(group, needed)
    return contents


def content_cache(session: Session) -> ContentCache:
    """Return the cache of the session's transaction, or a new one when it has none."""
    cache = session.info.get(ContentCache)
    return cache if isinstance(cache, ContentCache) else ContentCache()


def keyring_of(session: Session) -> Keyring:
    """Return the keys of the session's store."""
    keyring = session.info.get(Keyring)
    return keyring if isinstance(keyring, Keyring) else NO_KEYS


def reply_place(exchange_id: str, index: int, column: str) -> bytes:
    """Return the place of a column of `choice`, for its encryption."""
    return place_in("choice", column, exchange_id, index)


def answer_place(group_id: str, index: int, column: str) -> bytes:
    """Return the place of a column of `answer`, for its encryption."""
    return place_in("answer", column, group_id, index)


def opened_reply(session: Session, row: ChoiceRow | AnswerRow, column: str) -> bytes:
    """Decrypt `message_body` or `token_ids` of an answer. Raises: ValueError."""
    if isinstance(row, ChoiceRow):
        place = reply_place(row.exchange_id, row.index, column)
    else:
        place = answer_place(row.group_id, row.index, column)
    return keyring_of(session).open(getattr(row, column), place)


def load_links(session: Session, exchange_ids: Sequence[str]) -> dict[str, Link]:
    """Find these exchanges and all that is below them, without reading what they say."""
    stored_bytes = func.length(_ROW.request_body) + func.length(_ROW.prompt_token_ids)
    columns = (_ROW.exchange_id, _ROW.base_id, stored_bytes.label("stored_bytes"))
    links: dict[str, Link] = {}
    for page in _pages(exchange_ids):
        chain = select(*columns).where(_ROW.exchange_id.in_(page)).cte("chain", recursive=True)
        below = select(*columns).join(chain, _ROW.exchange_id == chain.c.base_id)
        for exchange_id, base_id, size in session.execute(select(chain.union(below))):
            links[exchange_id] = Link(base_id, size)
    return links


def _groups(
    exchange_ids: Sequence[str], links: Mapping[str, Link], cache: ContentCache
) -> Iterator[tuple[list[str], list[str]]]:
    """Divide the exchanges so that what is fetched for a group is bounded in bytes.

    Yields: the group, and what must be fetched for it: it and all below that is not in the cache.
    """
    group: list[str] = []
    needed: dict[str, None] = {}
    total = 0
    for exchange_id in exchange_ids:
        new = _not_known(exchange_id, links, needed, cache)
        size = sum(links[one].stored_bytes for one in new)
        if group and total + size > FETCHED_BYTES:
            yield group, list(needed)
            group, needed, total = [], {}, 0
            new = _not_known(exchange_id, links, needed, cache)
            size = sum(links[one].stored_bytes for one in new)
        group.append(exchange_id)
        needed.update(dict.fromkeys(new))
        total += size
    if group:
        yield group, list(needed)


def _not_known(
    exchange_id: str, links: Mapping[str, Link], needed: Collection[str], cache: ContentCache
) -> list[str]:
    """The exchange and what is below it, down to what is needed anyway or in the cache."""
    found: list[str] = []
    one: str | None = exchange_id
    while one is not None and one in links and one not in needed:
        found.append(one)
        one = links[one].base_id
        # Damaged ids may lead in a circle.
        if len(found) > 2 * MAX_LINKS or (one is not None and cache.get(one) is not None):
            break
    return found


class _Reading:
    """Reads one group of exchanges."""

    def __init__(
        self,
        session: Session,
        cache: ContentCache,
        contents: Contents,
        as_bases: bool,
    ) -> None:
        self._as_bases = as_bases
        self._session, self._cache = session, cache
        self._keyring = keyring_of(session)
        self._contents = contents
        self._rows: dict[str, _Stored] = {}
        self._replies: dict[str, list[Reply]] = {}

    def read(self, group: Sequence[str], needed: Sequence[str]) -> None:
        """Add the contents of the group, or their damage."""
        self._rows.clear()
        self._replies.clear()
        self._fetch(needed)
        for exchange_id in group:
            self._decode(exchange_id)

    def _fetch(self, exchange_ids: Sequence[str]) -> None:
        columns = (_ROW.exchange_id, _ROW.base_id, _ROW.request_body, _ROW.prompt_token_ids)
        for page in _pages(exchange_ids):
            found = self._session.execute(select(*columns).where(_ROW.exchange_id.in_(page)))
            for exchange_id, base_id, body, ids in found:
                self._rows[exchange_id] = _Stored(base_id, body, ids)
        bases = set(exchange_ids)
        if not self._as_bases:
            bases &= {row.base_id for row in self._rows.values()}
        self._replies |= {base: [] for base in bases}
        for page in _pages(sorted(bases)):
            for exchange_id, index, body, ids in self._session.execute(
                select(
                    ChoiceRow.exchange_id,
                    ChoiceRow.index,
                    ChoiceRow.message_body,
                    ChoiceRow.token_ids,
                )
                .where(ChoiceRow.exchange_id.in_(page))
                .order_by(ChoiceRow.exchange_id, ChoiceRow.index)
            ):
                self._replies[exchange_id].append((index, body, ids))

    def _decode(self, exchange_id: str) -> None:
        """Decode a chain from the lowest exchange that is not known yet."""
        path: list[str] = []
        one: str | None = exchange_id
        below: Content | None = None
        while one is not None and (not path or (below := self._cache.get(one)) is None):
            path.append(one)
            if (why := self._contents.damage.get(one)) is None and len(path) > 2 * MAX_LINKS:
                why = "its bases lead in a circle"
            if why is None and one not in self._rows:
                self._fetch([one])  # it was in the cache when the group was fetched
                why = None if one in self._rows else f"its base {one} is missing"
            if why is not None:
                self._spoil(path, why, locked=one in self._contents.locked)
                return
            one = self._rows[one].base_id
        while path:
            one = path[-1]
            try:
                content = _decoded(self._opened(one), below)
            except _DAMAGE as error:
                self._spoil(path, _say(error), locked=isinstance(error, MissingKeyError))
                return
            if one in self._replies:
                try:
                    content = _with_replies(content, self._opened_replies(one))
                except _DAMAGE as error:
                    if not self._as_bases:
                        self._contents.found[one] = content
                        path.pop()
                    locked = isinstance(error, MissingKeyError)
                    self._spoil(path, f"a reply of {one}: {_say(error)}", locked=locked)
                    return
                self._cache.put(one, content)
            path.pop()
            below = content
        assert below is not None
        self._contents.found[exchange_id] = below

    def _opened(self, exchange_id: str) -> _Stored:
        """Raises: ValueError when the row does not decrypt."""
        row, open_ = self._rows[exchange_id], self._keyring.open
        return _Stored(
            row.base_id,
            open_(row.request_body, place_in("exchange", "request_body", exchange_id)),
            open_(row.prompt_token_ids, place_in("exchange", "prompt_token_ids", exchange_id)),
        )

    def _opened_replies(self, exchange_id: str) -> Iterator[tuple[bytes, bytes]]:
        """Raises: ValueError when a reply does not decrypt."""
        for index, body, ids in self._replies[exchange_id]:
            yield (
                self._keyring.open(body, reply_place(exchange_id, index, "message_body")),
                self._keyring.open(ids, reply_place(exchange_id, index, "token_ids")),
            )

    def _spoil(self, path: Sequence[str], why: str, *, locked: bool) -> None:
        """Name the damage of the last of the path, and of all that have it below them."""
        for exchange_id in reversed(path):
            self._contents.damage[exchange_id] = why
            if locked:
                self._contents.locked.add(exchange_id)
            if not why.startswith("its base"):
                why = f"its base {exchange_id}: {why}"


def _decoded(row: _Stored, below: Content | None) -> Content:
    """Raises: one of `_DAMAGE`."""
    _, request_body, prompt_token_ids = row
    if below is None:
        return Content(decompress(request_body), decompress_array(prompt_token_ids), None, None)
    chain_bytes = below.chain_bytes + below.size
    room = max(0, MAX_CHAIN_BYTES - chain_bytes)
    return Content(
        decompress(request_body, below.request_base, limit=room),
        decompress_array(prompt_token_ids, below.prompt_base, limit=room),
        None,
        None,
        below.links + 1,
        chain_bytes,
    )


def _with_replies(content: Content, replies: Iterable[tuple[bytes, bytes]]) -> Content:
    """Raises: one of `_DAMAGE`."""
    choices = [(decompress(body), decompress_array(ids)) for body, ids in replies]
    return replace(
        content,
        replies=b"".join(body for body, _ in choices),
        reply_ids=b"".join(ids for _, ids in choices),
    )


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _pages(exchange_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(exchange_ids), PAGE):
        yield exchange_ids[start : start + PAGE]
