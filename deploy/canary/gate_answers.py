"""Fresh answers for the gate: one prompt, all arms, in random order.

They are kept in memory until they are judged, so an outage of the judge costs vLLM no new samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from sqlalchemy.orm import Session

from deploy.canary import gate_store
from deploy.canary.gate_store import HeldOutPrompt, Judged, comparison_id, flaws_of, is_short
from deploy.evidence.quality import Quality
from deploy.records import Canary
from deploy.registry import proof_rule
from deploy.registry.proof_rule import has_anchor
from ingest.errors import AWAY, RequestRefusedError, SamplingError
from ingest.privacy.screen import Screen
from ingest.ruler.ruler import JudgeCall, Judgement
from ingest.vllm.sampler import Sampler, SampleRequest
from sidecar.lines import Line, public_model
from sidecar.replies.parts import answer_text
from sidecar.routing.table import upstream_model
from sidecar.settings import Canary as CanarySettings
from sidecar.store.database import Database

log = structlog.get_logger()

MOST_ANSWERS = 8
"""Answers that a judge is shown at once, as RULER's authors advise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What an adapter gave to a prompt: an answer, or an attempt at a whole task."""

    message: dict[str, Any]
    finish_reason: str | None
    nats: float | None = None
    """Mean negative log-probability of its tokens; None where it is not known."""
    tokens: int | None = None
    reward: float | None = None
    """How the attempt ended, 0..1 (`deploy.canary.exam`); None: not known, or an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Given):
    """The same, and the arm that gave it."""

    arm: str
    """One of "candidate", "champion" and "anchor"."""
    adapter: str


Ask = Callable[[Canary, HeldOutPrompt, str, int], Awaitable[Given]]
"""Has an adapter answer a prompt; the last is the number of the answer, from 0. Raises:
SamplingError."""


class ArmFailedError(SamplingError):
    """vLLM gave no usable answer of one arm, and of that alone."""

    def __init__(self, message: str, *, arm: str) -> None:
        super().__init__(message)
        self.arm = arm


def arms_of(canary: Canary, rules: CanarySettings) -> list[tuple[str, str]]:
    """Return (arm, adapter) of each answer to a prompt, at most `MOST_ANSWERS`."""
    anchored = has_anchor(canary, rules)
    asked = min(rules.gate_answers, MOST_ANSWERS // 3 + 1 if anchored else MOST_ANSWERS // 2)
    arms = [("candidate", canary.candidate), ("champion", canary.champion)] * asked
    if anchored:
        arms += [("anchor", canary.anchor)] * min(asked, MOST_ANSWERS - 2 * asked)
    return arms


class FreshAnswers:
    """Asks for answers and keeps them until they are judged."""

    def __init__(self, ask: Ask, rules: CanarySettings) -> None:
        self._ask = ask
        self._rules = rules
        self._kept: dict[str, list[Answered]] = {}

    async def get(self, canary: Canary, prompt: HeldOutPrompt) -> list[Answered]:
        """Return `gate_answers` answers of each arm, shuffled; fewer when a judge would see more
        than `MOST_ANSWERS`, of the anchor's above all.

        Raises: as `Sampler.sample`; ArmFailedError when the answers of one arm alone fail.
        """
        key = comparison_id(canary, prompt)
        if key not in self._kept:
            self._kept[key] = await self._sample_all(canary, prompt)
        return self._kept[key]

    def forget(self, canary: Canary, prompt: HeldOutPrompt) -> None:
        """Drop the answers to a prompt: they are judged, or never will be."""
        self._kept.pop(comparison_id(canary, prompt), None)

    async def _sample_all(self, canary: Canary, prompt: HeldOutPrompt) -> list[Answered]:
        asked = arms_of(canary, self._rules)
        random.Random(seed_of(canary, f"order\x00{prompt.exchange_id}")).shuffle(asked)
        asking = (self._given(canary, prompt, of, at) for at, (_, of) in enumerate(asked))
        sampled = await asyncio.gather(*asking, return_exceptions=True)
        errors = [one for one in sampled if isinstance(one, BaseException)]
        # An engine that is down or has lost an adapter causes the other errors: raise that one.
        for error in sorted(errors, key=lambda one: not isinstance(one, AWAY)):
            failed = {
                arm
                for (arm, _), one in zip(asked, sampled, strict=True)
                if isinstance(one, BaseException)
            }
            if (
                len(failed) == 1
                and isinstance(error, SamplingError)
                and not isinstance(error, AWAY)
            ):
                raise ArmFailedError(str(error), arm=failed.pop()) from error
            raise error
        return [
            Answered(
                arm=arm,
                adapter=adapter,
                message=one.message,
                finish_reason=one.finish_reason,
                nats=one.nats,
                tokens=one.tokens,
                reward=one.reward,
            )
            for (arm, adapter), one in zip(asked, sampled, strict=True)
            if isinstance(one, Given)
        ]

    async def _given(self, canary: Canary, prompt: HeldOutPrompt, adapter: str, at: int) -> Given:
        """Ask for one answer; once more after an error that may concern this one request alone."""
        try:
            return await self._ask(canary, prompt, adapter, at)
        except (*AWAY, RequestRefusedError):
            raise
        except SamplingError as error:
            log.info("gate_answer_asked_again", adapter=adapter, reason=str(error))
            return await self._ask(canary, prompt, adapter, at)


class NextAnswers:
    """Samples next answers to prompts, for `FreshAnswers`."""

    def __init__(self, sampler: Sampler, rules: CanarySettings) -> None:
        self._sampler = sampler
        self._rules = rules

    async def ask(self, canary: Canary, prompt: HeldOutPrompt, adapter: str, _number: int) -> Given:
        """Sample one answer."""
        asked = prompt.request.get("max_completion_tokens") or prompt.request.get("max_tokens")
        limit = self._rules.max_tokens
        answer = await self._sampler.sample(
            SampleRequest(
                upstream_model=upstream_model(public_model(canary.model), adapter),
                chat=prompt.request,
                temperature=1.0,
                max_tokens=min(asked, limit) if isinstance(asked, int) else limit,
            )
        )
        return Given(
            message=json.loads(answer.message),
            finish_reason=answer.finish_reason,
            nats=-sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else None,
            tokens=len(answer.token_ids),
        )


def as_rows(
    answered: Sequence[Answered],
    judgement: Judgement | None,
    *,
    screen: Screen,
    project: str,
    request: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Convert answers to the store's JSON; without scores when the judge gave none.

    request: what they answer.

    An answer that the project's privacy policy keeps out of the store is stored without what it
    says: its score counts all the same, since the judge saw it redacted. What the judge says about
    an answer is under the same policy: `privacy.hide` may show it more than may be stored.
    """
    stored = [_may_store(one.message, screen, project) for one in answered]
    scores = judgement.scores if judgement is not None else ()
    told = [
        words if _may_store({"content": words}, screen, project) else ""
        for words in (judgement.explanations if judgement is not None else ())
    ]
    apart = judgement.disagreement if judgement is not None else None
    return [
        {
            "arm": one.arm,
            "adapter": one.adapter,
            "content": (answer_text(one.message) or None) if stored[place] else None,
            "tool_calls": (one.message.get("tool_calls") or []) if stored[place] else [],
            **({} if stored[place] else {"left_out": "private"}),
            "finish_reason": one.finish_reason,
            "short": is_short(one.message, one.finish_reason),
            "nats": one.nats,
            "tokens": one.tokens,
            "flaws": sorted(flaws_of(one.message, one.finish_reason, request)),
            "score": scores[place] if scores else None,
            "disagreement": apart.by_answer[place] if apart is not None else None,
            "explanation": told[place] if told else None,
        }
        for place, one in enumerate(answered)
    ]


def storable_calls(calls: Sequence[JudgeCall], *, screen: Screen, project: str) -> list[JudgeCall]:
    """Leave out the judge's replies that the project's privacy policy keeps out of the store."""
    return [
        call
        if _may_store({"content": f"{call.reply.text}\n{call.error}"}, screen, project)
        else replace(
            call,
            reply=replace(call.reply, text=""),
            error=None if call.ok else "left out: private",
        )
        for call in calls
    ]


def _may_store(message: dict[str, Any], screen: Screen, project: str) -> bool:
    return screen.answer(json.dumps(message).encode(), project=project).may_store


def seed_of(canary: Canary, purpose: str) -> int:
    """Derive a seed from the canary's random salt, so that an author of prompts cannot guess it."""
    digest = hashlib.sha256(f"{canary.salt}\x00{purpose}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 2**29


# Which prompts candidate, champion and anchor answer next, and in which order they count.

SPARE_PROMPTS = 2
"""Most prompts that the gate tries, as a multiple of those that it wants: some are set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A prompt that was drawn and has not ended."""

    place: int
    prompt: HeldOutPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What can be compared."""

    sessions: int = 0
    """Sessions that take part, compared or not."""
    missing: tuple[HeldOutPrompt, ...] = ()
    """Prompts that may be drawn now."""
    drawn: int = 0
    """Largest place in the store."""
    quality: Quality = field(default_factory=Quality)
    """What the groups say that may be counted; of the gate alone."""


class Drawing:
    """Remembers what was drawn for one canary. After a restart it is drawn again, at later places:
    a kill does not depend on an answer."""

    def __init__(
        self,
        database: Database,
        rules: CanarySettings,
        *,
        parallel: int,
        clock: Callable[[], float],
        line: Line,
        whole_tasks: bool = False,
    ) -> None:
        """line: of the canaries. whole_tasks: the prompt of a session is always its first one, with
        which its task begins."""
        self._line = line
        self._whole_tasks = whole_tasks
        self._database = database
        self._rules = rules
        self._parallel = parallel
        self._clock = clock
        self._drawn: dict[str, Drawn] = {}
        """By comparison id."""
        self._drawn_for = ""
        """Id of the canary."""
        self._judged = Judged(rules)

    def _counted(self, canary: Canary) -> tuple[str, ...]:
        """Return the ids of the canaries whose sessions are not judged again."""
        return (*proof_rule.tries_of(canary, self._rules), canary.canary_id)

    def is_for(self, canary: Canary) -> bool:
        return self._drawn_for == canary.canary_id

    def draw(self, canary: Canary, prompts: Prompts) -> list[Drawn]:
        """Return what was drawn and has not ended; if all has, draw the next ones."""
        if not self.is_for(canary):
            self._drawn, self._drawn_for = {}, canary.canary_id
        if not self._drawn:
            for number, prompt in enumerate(prompts.missing[: self._parallel], start=1):
                name = comparison_id(canary, prompt)
                self._drawn[name] = Drawn(place=prompts.drawn + number, prompt=prompt)
        return list(self._drawn.values())

    def place_of(self, name: str) -> int:
        """Return the place of a comparison; 0 when it was not drawn."""
        drawn = self._drawn.get(name)
        return drawn.place if drawn is not None else 0

    def end(self, name: str) -> None:
        """Note that a comparison is stored."""
        self._drawn.pop(name, None)

    def open_from(self, canary: Canary) -> int:
        """Return the first place that may not be counted yet. Reads the store.

        Places below it have ended and are stored, or will never be. Prompts that are drawn while
        this is read get places beyond those in the store: of these one may be stored before an
        earlier one, so none is counted.
        """
        with self._database.read() as session:
            beyond = gate_store.drawn(session, canary.canary_id) + 1
        # After the store was read: what is open no more now was stored before.
        drawn = list(self._drawn.values()) if self.is_for(canary) else []
        return min([beyond, *(one.place for one in drawn)])

    def for_gate(self, canary: Canary) -> Prompts:
        """Return the held-out prompts that the gate still lacks, and what its groups say so far.
        Reads the store."""
        open_from = self.open_from(canary)
        with self._database.read() as session:
            quality = self._judged.read(session, canary, open_from=open_from)
            wanted = proof_rule.gate_prompts(quality, self._rules)
            limit = SPARE_PROMPTS * wanted
            done = gate_store.compared_sessions(session, self._counted(canary))
            left = limit - gate_store.made(session, canary.canary_id)
            missing = self._held_out(session, canary, done, left)
            if (more := left - len(missing)) > 0:  # rather those that go on than none
                known = done | {prompt.session_id for prompt in missing}
                missing += self._held_out(session, canary, known, more, settled=False)
            judged = gate_store.comparisons(session, canary.canary_id)
            drawn = gate_store.drawn(session, canary.canary_id)
        quick = self._rules.promote_on == "quick"
        telling = [
            one
            for one in judged
            if one.difference is not None or (one.fault == "candidate" and not quick)
        ]
        room = min(left, wanted - self._judged.carried - len(telling))
        return Prompts(
            sessions=len(done) + len(missing),
            missing=tuple(missing[: max(0, room)]),
            drawn=drawn,
            quality=quality,
        )

    def for_shadow(self, canary: Canary) -> Prompts:
        """Return the prompts that the ramp may draw now: held-out ones, then those of users'
        sessions since the canary began. Reads the store."""
        rules = self._rules
        if proof_rule.is_proven(canary.proven, rules) and not self._is_wanted(canary):
            return Prompts()
        hours = max(0.0, self._clock() - canary.created_at) / 3_600.0
        allowed = min(rules.max_groups, rules.gate_prompts + int(rules.groups_per_hour * hours))
        with self._database.read() as session:
            room = min(self._parallel, allowed - gate_store.made(session, canary.canary_id))
            if room <= 0:
                return Prompts()
            done = gate_store.compared_sessions(session, self._counted(canary))
            missing = self._held_out(session, canary, done, room)
            if len(missing) < room:
                missing += gate_store.live_prompts(
                    session,
                    canary,
                    self._line,
                    after=canary.created_at if canary.tried_since is None else canary.tried_since,
                    until=self._clock() - gate_store.SETTLED_S,
                    limit=room - len(missing),
                    known=done | {prompt.session_id for prompt in missing},
                    first=self._whole_tasks,
                )
            drawn = gate_store.drawn(session, canary.canary_id)
        return Prompts(sessions=len(done) + len(missing), missing=tuple(missing), drawn=drawn)

    def _held_out(
        self,
        session: Session,
        canary: Canary,
        known: Collection[str],
        limit: int,
        *,
        settled: bool = True,
    ) -> list[HeldOutPrompt]:
        """Draw prompts of held-out sessions. settled: False takes those that go on as well."""
        if limit <= 0:
            return []
        return gate_store.held_out_prompts(
            session,
            self._line,
            limit=limit,
            known=known,
            without=canary.candidate,
            salt=canary.salt,
            first=self._whole_tasks,
            until=self._clock() - gate_store.SETTLED_S if settled else None,
        )

    def _is_wanted(self, canary: Canary) -> bool:
        """Return True when a promotion waits for groups although its claims are proven."""
        open_from = self.open_from(canary)
        with self._database.read() as session:
            quality = self._judged.read(session, canary, open_from=open_from)
        lacking = proof_rule.lacking(quality, canary.proven, self._rules)
        return (lacking or proof_rule.flaw_suspicion(quality, self._rules)) is not None
