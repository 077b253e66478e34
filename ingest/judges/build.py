"""Decide which judge makes a judgement, and go on to the next one when it is away.

A judgement is made by one judge from its first pass to its last, since the scores of two do not
compare. When a judge gives no answer, the whole judgement is made again by the next; its calls so
far are paid for and recorded, and none of its scores is used. So while the first judge is away no
group waits, none counts as failed, and none has scores of two judges.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeReplyError,
    JudgeTooLongError,
    JudgeUnavailableError,
    JudgeWithheldError,
)
from ingest.judge_watch import JudgeSeen
from ingest.judges.limited import Breaker, LimitedJudge, Limits
from ingest.judges.replies import CachedJudge, ContentSeeds, KeptReplies, open_kept
from ingest.judges.spending import Ledger, Meter, MeteredJudge, Ticket
from ingest.records import Group
from ingest.ruler.judge import Found, Judge, JudgeReply, LiteLlmJudge
from ingest.ruler.judging import LONGEST_LIMIT_S
from ingest.ruler.outage import LONGEST_STAY_S, Pause, PausingJudge
from ingest.ruler.ruler import SEED_BITS
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database

PERMANENT = (JudgeRejectedError, JudgeGarbledError)
"""Failures that an operator has to end."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One judge of a panel."""

    model: str
    breaker: Breaker
    """Shared by all panels of a process."""
    seat: Callable[[Ticket], Judge]
    """Makes the judge for one judgement."""


class Panel:
    """Judges in the order in which they are asked. As a `Judge`, each call is one judgement."""

    def __init__(
        self, members: Sequence[Member], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._members = tuple(members)
        self._clock = clock
        self._away: set[str] = set()
        """Members whose failure was logged, and that gave no judgement since."""

    @property
    def model(self) -> str:
        """Model name of the first judge."""
        return self._members[0].model

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        """See `Judge.complete`."""
        return await self.by_one(lambda judge: judge.complete(messages, schema))

    async def by_one(self, ask: Callable[[Judge], Awaitable[Found]]) -> Found:
        """See `JudgePanel.by_one`. Raises also: JudgeWithheldError, for which no other is asked."""
        failures: dict[str, JudgeUnavailableError] = {}
        for member in self._members:
            # A single judge is always asked: its callers wait by themselves while it is away.
            if len(self._members) > 1 and not member.breaker.admits(self._clock()):
                continue
            try:
                found = await self._ask(member, ask)
            except JudgeWithheldError:
                raise
            except JudgeBusyError as error:
                if member.breaker.is_closed:
                    raise  # a short limit: the callers wait for its end
                failures[member.model] = error
            except JudgeUnavailableError as error:
                failures[member.model] = error
            else:
                if member.model in self._away:
                    self._away.discard(member.model)
                    log.info("judge_fallback_over", back=member.model)
                return found
            if member is not self._members[-1] and member.model not in self._away:
                self._away.add(member.model)
                log.warning("judge_fallback", away=member.model, error=str(failures[member.model]))
        raise self._nobody(failures)

    def seen(self) -> tuple[JudgeSeen, ...]:
        """See `JudgePanel.seen`."""
        return tuple(one.breaker.seen(one.model) for one in self._members)

    async def _ask(self, member: Member, ask: Callable[[Judge], Awaitable[Found]]) -> Found:
        breaker = member.breaker
        tried, ticket = breaker.begin(self._clock()), Ticket()
        try:
            found = await ask(member.seat(ticket))
        except JudgeWithheldError:
            raise  # by our own limits: it says nothing about the judge
        except JudgeBusyError as error:
            breaker.limited(
                self._clock(), str(error), tried=tried, retry_after_s=error.retry_after_s
            )
            raise
        except JudgeUnavailableError as error:
            breaker.failed(self._clock(), str(error), tried=tried, reason=error.reason)
            raise
        except (JudgeRefusalError, JudgeReplyError) as error:
            if not isinstance(error, JudgeTooLongError) or error.asked:
                breaker.answered()
            raise
        else:
            if ticket.begun or not ticket.replayed:  # kept replies say nothing about the judge
                breaker.answered()
            return found
        finally:
            breaker.end(tried=tried)

    def _nobody(self, failures: Mapping[str, JudgeUnavailableError]) -> JudgeUnavailableError:
        """Return the error of a judgement that no judge made. Of judges that were not asked now it
        has the kind of the last error alone: its words may quote another user's prompt."""
        if len(self._members) == 1:
            return next(iter(failures.values()))
        said = "; ".join(
            f"{one.model}: {failures.get(one.model, one.reason)}"
            for one in self.seen()
            if one.error
        )
        asked_all = len(failures) == len(self._members)
        if asked_all and all(isinstance(one, JudgeNoCreditError) for one in failures.values()):
            return JudgeNoCreditError(f"no judge's account has credit: {said}")
        if asked_all and all(isinstance(one, PERMANENT) for one in failures.values()):
            return JudgeRejectedError(f"every judge rejects the question: {said}")
        return JudgeUnavailableError(f"no judge answers: {said}")


# Make the judges of one process from its settings: the only place that composes them.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Provider:
    """One judge and what all in the process that ask it share."""

    settings: JudgeSettings
    kept: KeptReplies | None
    asked: LiteLlmJudge
    meter: Meter
    limits: Limits
    pause: Pause
    breaker: Breaker

    def seat(self, ticket: Ticket, *, longest_stay_s: float, longest_s: float) -> Judge:
        """Make the judge for one judgement."""
        metered = MeteredJudge(self.asked, self.meter, ticket)
        limited = LimitedJudge(
            metered,
            self.limits,
            ticket,
            longest_s=longest_s,
            longest_begun_s=max(longest_s, LONGEST_LIMIT_S if longest_stay_s else 0.0),
        )
        patient = PausingJudge(limited, self.pause, longest_stay_s=longest_stay_s)
        if self.kept is None:
            return patient
        return CachedJudge(patient, self.settings, self.kept, on_replay=ticket.note_replay)


class ProcessJudges:
    """The judges of one section of the settings, for all in a process that ask them."""

    def __init__(
        self,
        settings: JudgeSettings,
        database: Database,
        *,
        hurry_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """database: keeps what all processes have spent. hurry_s: how long a user waits."""
        self._ledger = Ledger(database, settings, clock=clock)
        self._kept = open_kept(settings, database)
        self._providers = [_open(one, self._ledger, self._kept) for one in each_judge(settings)]
        self.draw_seed: Callable[[Group | None], int] = (
            ContentSeeds(self._kept.store)
            if self._kept is not None
            else lambda _: secrets.randbits(SEED_BITS)
        )
        """Draws the seed of a group from its content; by chance, when no reply is kept."""
        self._clock = clock
        self.patient: Judge = self._panel(LONGEST_STAY_S, LONGEST_STAY_S)
        """For groups and the gate: a short pause is waited for."""
        self.hurried: Judge = self._panel(0.0, hurry_s)
        """For best of N: a user waits, so it never waits for a pause."""

    def _panel(self, longest_stay_s: float, longest_s: float) -> Panel:
        def member(one: _Provider) -> Member:
            return Member(
                model=one.asked.model,
                breaker=one.breaker,
                seat=lambda ticket: one.seat(
                    ticket, longest_stay_s=longest_stay_s, longest_s=longest_s
                ),
            )

        return Panel([member(one) for one in self._providers], clock=self._clock)

    async def aclose(self) -> None:
        """Store what is noted, and close the connections; see `LiteLlmJudge.aclose`."""
        if self._kept is not None:
            await self._kept.aclose()
        await self._ledger.aclose()
        for one in self._providers:
            await one.asked.aclose()


def each_judge(settings: JudgeSettings) -> list[JudgeSettings]:
    """Return the settings of each judge, in the order in which they are asked."""
    others = (
        settings.model_copy(update={name: getattr(one, name) for name in type(one).model_fields})
        for one in settings.fallbacks
    )
    return [one.model_copy(update={"fallbacks": ()}) for one in (settings, *others)]


def _open(settings: JudgeSettings, ledger: Ledger, kept: KeptReplies | None) -> _Provider:
    meter, limits, breaker = Meter(settings, ledger), Limits(settings), Breaker()
    return _Provider(
        settings=settings,
        kept=kept,
        asked=LiteLlmJudge(
            settings, on_send=limits.sent, on_paid=meter.paid, on_without=breaker.takes_no
        ),
        meter=meter,
        limits=limits,
        pause=Pause(),
        breaker=breaker,
    )
