"""The judges of a process, made by the real builder, against scripted servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from ingest.judges.build import ProcessJudges
from ingest.judges.provider import Provider
from ingest.judges.spending import Ledger, Meter
from ingest.ruler.judge import Judge
from ingest.ruler.judging import JudgingWorker
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database
from support.clock import Clock
from tests.ingest.conftest import Bench as Judging, JudgeKit

PRICE = {"input": 1_000.0, "output": 2_000.0}
"""The scripted reply has 12 prompt tokens and 3 of a reply: $0.012 and $0.006 a call."""
NOON = 1_795_262_400.0
"""2026-11-21 12:00 UTC."""
MIDNIGHT = NOON + 12 * 3_600.0


@dataclass
class Bench(Judging):
    """What one test of the judges uses."""

    opened: list[ProcessJudges] = field(default_factory=list)

    def settings(self, url: str, **changes: Any) -> JudgeSettings:
        values: dict[str, Any] = {
            "model": "openai/first",
            "api_base": url,
            "api_key": "sk-test-key-1",
            "rubric": "Be good.",
            "passes": 1,
            **changes,
        }
        return JudgeSettings.model_validate(values)

    def open(self, settings: JudgeSettings, **changes: Any) -> ProcessJudges:
        """The judges of one process; several of them share the store."""
        self.opened.append(ProcessJudges(settings, self.database, clock=self.clock, **changes))
        return self.opened[-1]

    def provider(self, judge: Judge, **changes: Any) -> Provider:
        """A judge of the test's own, with the clock of waiting of the real ones."""
        settings = JudgeSettings.model_validate({"model": judge.model, **changes})
        meter = Meter(settings, Ledger(self.database, settings, clock=self.clock))
        return Provider(judge, settings, meter, clock=self.clock)

    def scoring(
        self,
        judges: ProcessJudges,
        settings: JudgeSettings,
        *,
        announce: Callable[[str], None] = lambda _: None,
    ) -> JudgingWorker:
        seeds = iter(range(100, 10_000))
        return JudgingWorker(
            self.database,
            judges.patient,
            settings,
            clock=self.clock,
            draw_seed=lambda _: next(seeds),
            announce=announce,
        )


@pytest.fixture
async def bench(database: Database, judge_kit: JudgeKit) -> AsyncIterator[Bench]:
    clock = Clock()
    clock.now = NOON
    made = Bench(kit=judge_kit, database=database, clock=clock)
    yield made
    for judges in made.opened:
        await judges.aclose()
