"""Make the judges of one process from its settings: the only place that composes them.

From the caller inwards: the panel, which picks the judge of a whole judgement (`panel`); the
replies of each judge that are kept (`cache`), which cost nothing and are held up by no budget; the
pause that its provider asked for (`ingest.ruler.pause`); the limits a minute (`limited`); what a
call costs, and the budgets (`meter`, `ledger`); the judge itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from ingest.judges.breaker import Breaker
from ingest.judges.cache import CachedJudge, ContentSeeds, KeptReplies, open_kept
from ingest.judges.ledger import Ledger
from ingest.judges.limited import LimitedJudge, Limits
from ingest.judges.meter import Meter, MeteredJudge, Ticket
from ingest.judges.panel import Member, Panel
from ingest.records import Group
from ingest.ruler.judge import Judge, LiteLlmJudge
from ingest.ruler.judgements import LONGEST_LIMIT_S
from ingest.ruler.pause import LONGEST_STAY_S, Pause, PausingJudge
from ingest.ruler.ruler import SEED_BITS
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database


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
