"""Reply bodies of the status about learning: the pile-up of groups, and the budgets."""

from __future__ import annotations

from typing import Literal

from deploy.admin.out import Out
from deploy.funnel.pile_up import PileUp, said, to_do


class PileUpOut(Out):
    """No new group begins, because enough wait."""

    most: int
    """Groups that may wait: `groups.max_pending_groups`, or `learner.max_groups` where that is
    0."""
    sampling: int
    judging: int
    learning: int
    """Groups that wait for the learner or are in a run."""
    exchanges: int
    """Suitable exchanges that are not chosen for it."""
    why: str
    to_do: str

    @classmethod
    def of(cls, pile: PileUp) -> PileUpOut:
        return cls(
            most=pile.most,
            sampling=pile.sampling,
            judging=pile.judging,
            learning=pile.learning,
            exchanges=pile.exchanges,
            why=said(pile),
            to_do=to_do(pile.where),
        )


class BudgetOut(Out):
    """A budget that has a limit, in this day or hour (UTC)."""

    setting: str
    what: str
    """What is counted: `candidate tokens`, `prompt tokens of candidates`, `US dollars` or `tokens
    of judges`."""
    used: float
    """Amount spent; a judge's budget counts what calls in flight may cost too."""
    limit: float
    period: Literal["day", "hour"]
