"""What a trainer tells while it works goes to the store, a tracker, the log and a terminal.

`RunWatch` counts (`learner.progress.estimate` calculates), and passes on a report at each change of
phase and at most every few seconds. It is told from the run's own thread. A step is stored when it
is done, so a run that fails later still has its curves. A store that is locked costs a report, and
never the run. A terminal has a sentence for each report and each step, and not the log's event too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

import structlog

from learner.progress.estimate import COST, Progress, Timed, progress, step_words, words
from learner.records import End, Phase, Stage, StepMetrics
from sidecar.logs import IN_WORDS

log = structlog.get_logger()

TOLD_S = 2.0
"""Least time between two reports of one phase to the store and to a terminal."""
LOGGED_S = 30.0
"""... and to the log, which keeps them."""


class Keeper(Protocol):
    """Keeps what a run tells."""

    def keep_progress(self, found: Progress) -> None:
        """Keep where the run is, in place of what was kept before."""
        ...

    def drop_steps(self) -> None:
        """Forget the steps that were kept."""
        ...

    def go_on(self, steps: Sequence[StepMetrics]) -> None:
        """Keep exactly these steps, which were told before the run was killed."""
        ...

    def keep_step(self, metrics: StepMetrics) -> None:
        """Keep a step's figures."""
        ...

    def end(self, how: End | None, adapter: str) -> None:
        """The run has ended, and its row says so.

        how: None: another process goes on with it. adapter: the version that it made; "": none.
        """
        ...


class RunWatch:
    """Implements `Watch` for one run."""

    def __init__(
        self,
        keepers: Sequence[Keeper],
        *,
        show: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """show: prints a line on a terminal. clock: seconds, which only grow."""
        self._keepers = keepers
        self._show = show
        self._clock = clock
        self._stages: list[Stage] = []
        self._places: dict[str, int] = {}
        self._done = 0
        self._skipped = 0
        self._tokens_before = 0
        self._started = clock()
        self._before = Timed(work=0.0, seconds=0.0)
        self._shown = ""
        self._told_at = self._logged_at = float("-inf")

    def phase(self, name: Phase) -> None:
        self._leave_stage()
        self._stages = []
        self._tell(Progress(phase=name, tokens_done=self._tokens_before), now=True)

    def plan(self, stages: Sequence[Stage]) -> None:
        self._leave_stage()
        self._stages = list(stages)
        self._begin_stage()

    def done(self, group_id: str) -> None:
        place = self._places.get(group_id)
        if place is None or not self._stages:
            return
        self._done = max(self._done, place + 1)
        if self._done == len(self._stages[0].parts) and len(self._stages) > 1:
            self._leave_stage()
            self._stages = self._stages[1:]
            self._begin_stage()
        else:
            self._tell(self._progress(), now=False)

    def begin_steps(self) -> None:
        for keeper in self._keepers:
            keeper.drop_steps()

    def go_on(self, metrics: Sequence[StepMetrics]) -> None:
        for keeper in self._keepers:
            keeper.go_on(metrics)
        parts = self._stages[0].parts if self._stages else ()
        self._done = self._skipped = sum(part.step <= len(metrics) for part in parts)
        if self._stages:
            self._tell(self._progress(), now=True)

    def step(self, metrics: StepMetrics) -> None:
        log.info("step_done", **metrics.flat, **{IN_WORDS: True})
        self._show(step_words(metrics, steps=self._stages[0].steps if self._stages else 0))
        for keeper in self._keepers:
            keeper.keep_step(metrics)
        if self._stages:
            self._tell(self._progress(), now=True)

    def end(self, how: End | None, adapter: str = "") -> None:
        """Tell the keepers how the run ended, as `Keeper.end` has it."""
        for keeper in self._keepers:
            keeper.end(how, adapter)

    def _begin_stage(self) -> None:
        self._started = self._clock()
        self._done = self._skipped = 0
        self._places = {part.group_id: at for at, part in enumerate(self._stages[0].parts)}
        self._tell(self._progress(), now=True)

    def _leave_stage(self) -> None:
        if self._stages and self._done > self._skipped:
            self._before = self._measured()
        if self._stages:
            self._tokens_before += sum(one.tokens for one in self._stages[0].parts[: self._done])

    def _measured(self) -> Timed:
        present = self._stages[0]
        tokens = sum(part.tokens for part in present.parts[self._skipped : self._done])
        return Timed(work=COST[present.name] * tokens, seconds=self._clock() - self._started)

    def _progress(self) -> Progress:
        return progress(
            self._stages,
            self._done,
            tokens_before=self._tokens_before,
            measured=self._measured(),
            before=self._before,
        )

    def _tell(self, found: Progress, *, now: bool) -> None:
        """now: whatever was told when."""
        at = self._clock()
        if now or at - self._told_at >= TOLD_S:
            self._told_at = at
            if (line := words(found)) != self._shown:
                self._shown = line
                self._show(line)
            for keeper in self._keepers:
                keeper.keep_progress(found)
        if now or at - self._logged_at >= LOGGED_S:
            self._logged_at = at
            left_s = None if found.left_s is None else round(found.left_s)
            log.info("run_progress", **{**asdict(found), "left_s": left_s, IN_WORDS: True})
