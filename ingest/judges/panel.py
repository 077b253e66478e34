"""Decide which judge makes a judgement, and go on to the next one when it is away.

A judgement is made by one judge from its first pass to its last, since the scores of two do not
compare. When a judge gives no answer, the whole judgement is made again by the next; its calls so
far are paid for and recorded, and none of its scores is used. So while the first judge is away no
group waits, none counts as failed, and none has scores of two judges.
"""

from __future__ import annotations

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
from ingest.judge_watch.state import JudgeSeen
from ingest.judges.breaker import Breaker
from ingest.judges.meter import Ticket
from ingest.ruler.judge import Found, Judge, JudgeReply

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
