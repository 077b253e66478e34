"""Read what limits learning, for the status: the pile-up of groups, and the budgets."""

from __future__ import annotations

from sqlalchemy.orm import Session

from deploy.admin.context import AdminContext
from deploy.admin.limits.out import BudgetOut, PileUpOut
from deploy.funnel.budgets import budgets_of
from deploy.funnel.pile_up import read_pile_up
from deploy.funnel.read import Funnel
from ingest.judges.spending import read_spending
from ingest.sampling.budget import read_usage


def pile_up(session: Session, context: AdminContext, funnel: Funnel) -> PileUpOut | None:
    """Return why no new group begins; None while there is room."""
    found = read_pile_up(session, context.line_names, funnel, most=context.most_pending_groups)
    return None if found is None else PileUpOut.of(found)


def budgets(session: Session, context: AdminContext, now: float) -> list[BudgetOut]:
    """Return the budgets that have a limit, with what is used. now: Unix seconds."""
    found = budgets_of(
        read_usage(session, now=now),
        context.groups,
        read_spending(session, now=now),
        context.judge,
    )
    return [BudgetOut.model_validate(one) for one in found]
