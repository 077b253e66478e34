"""Make the judges of one process from its settings: the only place that composes them.

From the caller inwards: the pause that the provider asked for, then the judge itself.
"""

from __future__ import annotations

from ingest.ruler.judge import Judge, LiteLlmJudge
from ingest.ruler.pause import LONGEST_STAY_S, Pause, PausingJudge
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database


class ProcessJudges:
    """One section's judge, for all in a process that ask it; they share what is known of it."""

    def __init__(self, settings: JudgeSettings, database: Database) -> None:
        """database: where what all processes share about the judge is kept."""
        self._database = database
        self._asked = LiteLlmJudge(settings)
        pause = Pause()
        self.patient: Judge = PausingJudge(self._asked, pause, longest_stay_s=LONGEST_STAY_S)
        """For groups and the gate: a short pause is waited for."""
        self.hurried: Judge = PausingJudge(self._asked, pause, longest_stay_s=0.0)
        """For best of N: a user waits, so it never does."""

    async def aclose(self) -> None:
        """Close the connections to the judge's API; see `LiteLlmJudge.aclose`."""
        await self._asked.aclose()
