"""Make the judges of one process from its settings: the only place that composes them."""

from __future__ import annotations

import time
from collections.abc import Callable

from ingest.judges.provider import Panel, Patience, Provider
from ingest.judges.replies import ContentSeeds, open_kept
from ingest.judges.spending import Ledger
from ingest.ruler.judge import Judge
from ingest.ruler.judging import LONGEST_LIMIT_S
from ingest.ruler.waiting import LONGEST_STAY_S
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database


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
        self._kept = open_kept(database)
        self._providers = [
            Provider.open(one, self._ledger, self._kept, clock) for one in each_judge(settings)
        ]
        self.draw_seed = ContentSeeds(self._kept.store)
        patient = Patience(first_s=LONGEST_STAY_S, begun_s=LONGEST_LIMIT_S)
        self.patient: Judge = Panel(self._providers, patient)
        """For groups and the gate: a judge that is busy is waited for."""
        self.hurried: Judge = Panel(self._providers, Patience(first_s=hurry_s, begun_s=hurry_s))
        """For best of N: a user waits."""

    async def aclose(self) -> None:
        """Store what is noted, and close the connections; see `LiteLlmJudge.aclose`."""
        await self._kept.aclose()
        await self._ledger.aclose()
        for one in self._providers:
            await one.judge.aclose()  # type: ignore[attr-defined]


def each_judge(settings: JudgeSettings) -> list[JudgeSettings]:
    """Return the settings of each judge, in the order in which they are asked."""
    others = (
        settings.model_copy(update={name: getattr(one, name) for name in type(one).model_fields})
        for one in settings.fallbacks
    )
    return [one.model_copy(update={"fallbacks": ()}) for one in (settings, *others)]
