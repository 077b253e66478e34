"""What the judged groups of a canary say so far, read from the `gate_comparison` table.

The groups of earlier tries of the candidate against the same champion and anchor come first: the
evidence goes on where it ended, so its level is that of all tries together.

Groups are read once, in the order in which their prompts were drawn; the state is kept in memory. A
process that starts again reads all of them and ends in the same state, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from deploy.canary import gate_store
from deploy.evidence.quality import Quality
from deploy.records import Canary
from deploy.registry.gate_rule import Comparison, quality_of
from deploy.registry.proof_rule import has_anchor, limits_of, tries_of
from sidecar.settings import Canary as CanarySettings


class Judged:
    """Keeps the state of one canary's groups between ticks."""

    def __init__(self, rules: CanarySettings) -> None:
        self._rules = rules
        self._limits = limits_of(rules)
        self._of = ""
        self._place = 0
        self._quality = Quality()
        self.carried = 0
        """Groups of earlier tries."""

    def _after(self, groups: Sequence[Comparison], canary: Canary) -> Quality:
        anchored = has_anchor(canary, self._rules)
        return quality_of(groups, self._limits, anchored=anchored, start=self._quality)

    def read(self, session: Session, canary: Canary, *, open_from: int | None) -> Quality:
        """Read what is new.

        open_from: the first place that may not be counted yet, found before `session` began
        (`Drawing.open_from`); None: all are counted.
        """
        if canary.canary_id != self._of:
            self._of, self._place, self._quality = canary.canary_id, 0, Quality()
            for earlier in tries_of(canary, self._rules):
                before = gate_store.judged_since(session, earlier, place=0)
                self._quality = self._after(before, canary)
            self.carried = self._quality.groups + self._quality.unknown
        groups = [
            one
            for one in gate_store.judged_since(session, canary.canary_id, place=self._place)
            if open_from is None or one.place < open_from
        ]
        self._quality = self._after(groups, canary)
        self._place = groups[-1].place if groups else self._place
        return self._quality
