"""A judge whose replies are kept: the same question is paid for once.

A question is the whole conversation with the judge: rubric, instructions, context, tools, answers
in the order shown, ids and nonce. Ids, nonce and order are drawn from the content by a secret
(`ContentSeeds`), so that the same group asks the same question again, and nobody who writes a
prompt can foresee them. Only replies with usable scores are kept: a judge that failed is
asked anew.

Within `ingest.ruler.judge.replies_kept_for` alone: elsewhere the judge is always asked (the probe,
estimates of noise, best of N). Verdicts on a judge's health must not count a kept reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingest.errors import JudgeReplyError
from ingest.judge_prompt.shown import shown_answer
from ingest.judges.replies import ReplyStore
from ingest.records import Group
from ingest.ruler.judge import Judge, JudgeReply, context_tokens_of, kept_for
from ingest.ruler.material import UnreadableGroupError, read_material
from ingest.ruler.reply import parse_reply
from ingest.ruler.ruler import SEED_BITS, merge_identical
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database

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


def open_kept(settings: JudgeSettings, database: Database) -> KeptReplies | None:
    """Open the kept replies as the settings say; None: none is to be kept."""
    if not settings.cache_bytes:
        return None
    store = ReplyStore(
        database, max_bytes=settings.cache_bytes, max_age_s=settings.cache_days * DAY_S
    )
    return KeptReplies(store)


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
                "json_schema": settings.json_schema,
                "params": settings.params,
            }
        )

    @property
    def model(self) -> str:
        return self._judge.model

    async def context_tokens(self) -> int | None:
        """See `SizedJudge.context_tokens`."""
        return await context_tokens_of(self._judge)

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        """See `Judge.complete`."""
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
