"""Replies of judges in the store, so that what was paid for once is not bought again.

A reply is found by a digest of everything that it depends on. The digest is keyed with a secret of
the store, so that it confirms to nobody what was asked. Each reply belongs to the exchange that it
judges and goes with it, by `sidecar forget` or retention; the oldest go when all together are over
their limit of bytes or too old. A reply that cannot be read or stored costs a call, nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.errors import JudgeReplyError
from ingest.judge_prompt import shown_answer
from ingest.records import Group
from ingest.ruler.judge import Judge, JudgeReply, context_tokens_of, kept_for
from ingest.ruler.prompt import UnreadableGroupError, parse_reply, read_material
from ingest.ruler.ruler import SEED_BITS, merge_identical
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.contents import keyring_of
from sidecar.store.database import Database, count, get_flag, insert_into, set_flag
from sidecar.store.keyring import Keyring, place_in
from sidecar.store.models import ExchangeRow, JudgeReplyRow
from sidecar.store.traces import mark_replaced

STAGE = "judge_cache"
"""Counter rows: (stage, what became of a reply) -> replies."""
STORED, EVICTED, EXPIRED = "stored", "evicted", "expired"
DAMAGED, NOT_READ, NOT_STORED = "damaged", "not_read", "not_stored"
NO_EXCHANGE = ""
"""`exchange_id` of what belongs to no exchange of the store: the groups of a calibration. Nobody
knows whose text they hold, so every `sidecar forget` deletes these replies."""
GONE_AT_ONCE = 100
"""Most rows that one transaction evicts for their size, and again for their age."""
SECRET_FLAG = "judge_replay_secret"
SECRET_BYTES = 32
_ROW_BYTES = 300
"""About what a row takes besides its reply: digest, ids, numbers and four indexes."""

log = structlog.get_logger()


class _Stored(msgspec.Struct):
    """What is kept of a reply, as JSON."""

    text: str
    cut: bool


class ReplyStore:
    """Kept replies. Each method blocks, and no error of the store leaves it."""

    def __init__(
        self,
        database: Database,
        *,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._secret = b""
        self._lock = threading.Lock()
        self._uncounted: Counter[str] = Counter()
        """What could not be counted in the store when it happened."""

    def secret(self) -> bytes:
        """Return the secret that digests and orders are drawn from, all processes of the store the
        same. While the store cannot be read or written it is one of this process alone."""
        with self._lock:
            if not self._secret:
                self._secret = self._shared_secret() or secrets.token_bytes(SECRET_BYTES)
            return self._secret

    def find(self, digest: str) -> JudgeReply | None:
        """Return a kept reply, as free of cost; None when there is none that can be used."""
        began = time.monotonic()
        try:
            with self._database.read() as session:
                row = session.execute(
                    select(JudgeReplyRow.reply, JudgeReplyRow.at).where(
                        JudgeReplyRow.digest == digest
                    )
                ).one_or_none()
                if row is None or not self._is_young(row.at):
                    return None
                stored = _opened(keyring_of(session), digest, row.reply)
        except StoreError as error:
            self._missed(NOT_READ, error)
            return None
        except ValueError as error:
            self._missed(DAMAGED, error)
            return None
        return JudgeReply(
            text=stored.text,
            cut=stored.cut,
            prompt_tokens=0,
            completion_tokens=0,
            cost_usd=0.0,
            seconds=time.monotonic() - began,
            cached=True,
        )

    def keep(self, digest: str, exchange_id: str, reply: JudgeReply) -> None:
        """Keep a reply for its exchange; not when that was deleted meanwhile, and not one that is
        larger than all may be together."""
        with self._lock:
            uncounted, self._uncounted = self._uncounted, Counter()
        try:
            # Alone: the running sum of bytes is read, then written.
            with self._database.write() as session:
                for what, number in uncounted.items():
                    count(session, STAGE, what, number)
                self._keep(session, digest, exchange_id, reply)
        except StoreError as error:
            with self._lock:
                self._uncounted += uncounted
            self._missed(NOT_STORED, error)

    def skip(self) -> None:
        """Count a reply that is not kept because the store is slow."""
        with self._lock:
            self._uncounted[NOT_STORED] += 1

    def _keep(self, session: Session, digest: str, exchange_id: str, reply: JudgeReply) -> None:
        if exchange_id != NO_EXCHANGE:
            known = select(ExchangeRow.seq).where(ExchangeRow.exchange_id == exchange_id)
            if session.scalar(known) is None:
                return
        said = msgspec.json.encode(_Stored(text=reply.text, cut=reply.cut)).decode()
        sealed = keyring_of(session).seal_text(said, reply_place(digest))
        size = len(sealed.encode()) + _ROW_BYTES
        if size > self._max_bytes:
            return
        newest = select(JudgeReplyRow.written_bytes + JudgeReplyRow.size_bytes)
        by_place = newest.order_by(JudgeReplyRow.written_bytes.desc()).limit(1)
        written = session.scalar(by_place) or 0
        now = self._clock()
        session.execute(delete(JudgeReplyRow).where(JudgeReplyRow.digest == digest))  # old, damaged
        session.execute(
            insert_into(session, JudgeReplyRow).values(
                digest=digest,
                exchange_id=exchange_id,
                at=now,
                written_bytes=written,
                size_bytes=size,
                reply=sealed,
            )
        )
        count(session, STAGE, STORED)
        evict(session, written + size - self._max_bytes, before=now - self._max_age_s)

    def _is_young(self, at: float) -> bool:
        """True for a time within the limit of age; False for one to come."""
        now = self._clock()
        return now - self._max_age_s < at <= now + self._max_age_s

    def _missed(self, what: str, error: Exception) -> None:
        with self._lock:
            first = not self._uncounted[what]
            self._uncounted[what] += 1
        if first:
            log.warning("judge_reply_missed", what=what, error=str(error))

    def _shared_secret(self) -> bytes | None:
        place = place_in("flag", "value", SECRET_FLAG)
        try:
            with self._database.write() as session:
                keyring = keyring_of(session)
                try:
                    found = bytes.fromhex(
                        keyring.open_text(get_flag(session, SECRET_FLAG) or "", place)
                    )
                except ValueError:  # damaged, or its key is gone: what it drew is not found again
                    found = b""
                if len(found) != SECRET_BYTES:
                    found = secrets.token_bytes(SECRET_BYTES)
                    sealed = keyring.seal_text(found.hex(), place)
                    set_flag(session, SECRET_FLAG, sealed, now=self._clock())
                return found
        except StoreError as error:
            log.warning("judge_secret_not_shared", error=str(error))
            return None


def evict(session: Session, over: int, *, before: float) -> None:
    """Delete the oldest replies: those that begin before `over` in the running sum of bytes, and
    those of before a time. A bounded number: the next call goes on."""
    row = JudgeReplyRow
    for what, old, order in (
        (EVICTED, row.written_bytes < over, row.written_bytes),
        (EXPIRED, row.at < before, row.at),
    ):
        oldest = select(row.seq).where(old).order_by(order).limit(GONE_AT_ONCE)
        gone = session.scalars(delete(row).where(row.seq.in_(oldest)).returning(row.seq)).all()
        count(session, STAGE, what, len(gone))
        if gone:
            mark_replaced(session)


def reply_place(digest: str) -> bytes:
    return place_in("judge_reply", "reply", digest)


def _opened(keyring: Keyring, digest: str, stored: str) -> _Stored:
    """Raises: ValueError when it is damaged."""
    try:
        return msgspec.json.decode(
            keyring.open_text(stored, reply_place(digest)).encode(), type=_Stored
        )
    except msgspec.MsgspecError as error:
        raise ValueError(f"the stored reply is damaged: {error}") from None


# A judge whose replies are kept: the same question is paid for once.

DAY_S = 86_400.0
PROMPT_WAIT_S = 1.0
"""Longest wait for the store to keep a reply: a judgement then goes on without it."""
MOST_LATE = 2
"""Writes that may take longer at once. Beyond it no reply is kept: a locked store holds each of
them for 15 s, in a thread of which the process has few."""
CLOSE_WAIT_S = 5.0
"""Longest wait for replies that are still being stored when the process ends."""


class KeptReplies:
    """What the judges of one process share: the kept replies, and the writing of new ones."""

    def __init__(self, store: ReplyStore) -> None:
        self.store = store
        self._late: set[asyncio.Task[None]] = set()
        """Writes that take long."""

    async def find(self, question: Sequence[bytes]) -> tuple[str, JudgeReply | None]:
        """Return the digest of a question, and its kept reply."""
        return await asyncio.to_thread(self._find, question)

    def _find(self, question: Sequence[bytes]) -> tuple[str, JudgeReply | None]:
        digest = keyed_digest(self.store.secret(), b"question", *question).hex()
        return digest, self.store.find(digest)

    async def keep(self, digest: str, exchange_id: str, reply: JudgeReply) -> None:
        """Keep a reply. A caller that is cancelled does not end that."""
        if len(self._late) >= MOST_LATE:
            self.store.skip()
            return
        task = asyncio.create_task(asyncio.to_thread(self.store.keep, digest, exchange_id, reply))
        try:
            await asyncio.wait({task}, timeout=PROMPT_WAIT_S)
        finally:
            if not task.done():
                self._late.add(task)
                task.add_done_callback(self._late.discard)

    async def aclose(self) -> None:
        """Wait a little for replies that are still being stored."""
        if self._late:
            await asyncio.wait(set(self._late), timeout=CLOSE_WAIT_S)


CACHE_BYTES = 64 * 2**20
"""Size of the replies that are kept in the store; beyond it the oldest go."""
CACHE_DAYS = 7.0
"""An older reply is not used: a provider may have changed the model behind the name."""


def open_kept(database: Database) -> KeptReplies:
    return KeptReplies(ReplyStore(database, max_bytes=CACHE_BYTES, max_age_s=CACHE_DAYS * DAY_S))


class CachedJudge:
    """Asks a judge what it was not asked before."""

    def __init__(
        self,
        judge: Judge,
        settings: JudgeSettings,
        kept: KeptReplies,
        *,
        on_replay: Callable[[], None] = lambda: None,
    ) -> None:
        """settings: those of this judge; what affects its replies is part of the question.
        on_replay: called for each kept reply that is given."""
        self._on_replay = on_replay
        self._judge = judge
        self._kept = kept
        self._asked = _canonical(
            {
                "model": settings.model,
                "api_base": settings.api_base,
                "params": settings.params,
            }
        )

    @property
    def model(self) -> str:
        return self._judge.model

    async def context_tokens(self) -> int | None:
        return await context_tokens_of(self._judge)

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        exchange_id = kept_for()
        if exchange_id is None:
            return await self._judge.complete(messages, schema)
        question = (self._asked, _canonical([dict(one) for one in messages]), _canonical(schema))
        digest, found = await self._kept.find(question)
        if found is not None and is_usable(found, schema):
            self._on_replay()
            return found
        reply = await self._judge.complete(messages, schema)
        if is_usable(reply, schema):
            await self._kept.keep(digest, exchange_id, reply)
        return reply


class ContentSeeds:
    """Draws the seed of a group's prompts from its content."""

    def __init__(self, store: ReplyStore) -> None:
        self._store = store

    def __call__(self, group: Group | None) -> int:
        """Return a seed of `SEED_BITS` bits, the same for the same conversation, tools and answers;
        by chance without a group. Blocks.

        Without the store's secret nobody can tell it from chance.
        """
        if group is None:
            return secrets.randbits(SEED_BITS)
        try:
            material = read_material(group)
            shown = [shown_answer(one) for one in merge_identical(material.answers)[0]]
            content = _canonical([material.context, material.tools, shown])
        except (UnreadableGroupError, TypeError, ValueError, AttributeError, RecursionError):
            content = group.request  # it is set aside: no judge sees it
        digest = keyed_digest(self._store.secret(), b"seed", content)
        return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def keyed_digest(secret: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of parts, each with its length, so that no two lists are alike."""
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def is_usable(reply: JudgeReply, schema: Mapping[str, Any]) -> bool:
    """Return True when a reply has scores for all ids of its schema, as `reply_schema` made it."""
    ids = schema["properties"]["scores"]["items"]["properties"]["id"]["enum"]
    try:
        parse_reply(reply.text, ids, range(len(ids)))
    except JudgeReplyError:
        return False
    return True


def _canonical(value: Any) -> bytes:  # Any: JSON
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
