"""What the scoring process last saw of the judge: a row of the `flag` table.

It tells the operator whether the judge works, and sampling whether candidates would find a judge.
Several scoring processes share the row, and the last one to write it is believed: they have the
same judge. When the judge last scored a group, the groups themselves say.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.store.groups import SAMPLED
from ingest.store.troubles import MAX_WHY
from sidecar.store.database import get_flag, set_flag
from sidecar.store.models import GroupRow

JUDGE = "judge"
"""Name of the flag."""
HELD_WHILE_AWAY = 16
"""Complete groups that may wait for a judge that does not answer; beyond, sampling holds. They keep
it busy when it is back: it is asked about 8 at once."""
FIRST_QUESTION = "judge_unknown"
"""Why sampling holds for the seconds in which the judge is asked for the first time."""

log = structlog.get_logger()


class JudgeSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One of the judges that may be asked."""

    model: str
    breaker: Literal["closed", "open", "half_open"] = "closed"
    """`closed`: it is asked. `open`: it failed, and is not asked until `until`; then the next
    group tries it, and it is `half_open` while that lasts."""
    since: float | None = None
    """When it began to fail, in Unix seconds."""
    until: float | None = None
    reason: str = ""
    """Kind of its last error, such as `judge_rejected`."""
    error: str = ""
    """Its last error. In the flag this is `reason`: the provider's words may quote a prompt, and
    `sidecar forget` does not reach the flag."""
    without: tuple[str, ...] = ()
    """Parts of requests that it turned out not to take (`ingest.ruler.abilities`)."""


class JudgeState(msgspec.Struct, frozen=True, kw_only=True):
    """The judge, as the scoring process last saw it."""

    state: Literal["unknown", "works", "away", "rejected", "no_credit", "spent"] = "unknown"
    """`unknown`: it is being asked since the process started. `away`: no answer, a rate limit, or
    scores for no group but for a sum; that may pass by itself. `rejected`: it answers, but never
    with scores (a wrong key, model, URL or parameter): an operator has to act.
    `no_credit`: the provider's account is used up: an operator has to pay. `spent`: a budget is
    spent, so it is not asked until `until`."""
    since: float
    """When the state began, in Unix seconds."""
    good_at: float | None = None
    """When the judge last proved that it works, by a question of the scoring process."""
    error_at: float | None = None
    error: str = ""
    """Its last error; also of one group while the judge works for others, then without the
    provider's words, which may quote the group's prompt."""
    until: float | None = None
    """When it is asked again, at the earliest."""
    judges: tuple[JudgeSeen, ...] = ()
    """Each judge, in the order in which they are asked."""

    def asked(self, now: float) -> JudgeState:
        """The process starts: what its judge is worth is not known yet."""
        return msgspec.structs.replace(self, state="unknown", since=now, until=None)

    def works(self, now: float) -> JudgeState:
        since = self.since if self.state == "works" else now
        return msgspec.structs.replace(self, state="works", since=since, good_at=now, until=None)

    def fails(
        self,
        now: float,
        error: str,
        *,
        until: float,
        state: Literal["away", "rejected", "no_credit", "spent"],
    ) -> JudgeState:
        since = self.since if self.state == state else now
        held = msgspec.structs.replace(self, state=state, since=since, until=until)
        return held.erred(now, error)

    def erred(self, now: float, error: str) -> JudgeState:
        """Note an error that says nothing about the judge as a whole."""
        return msgspec.structs.replace(self, error_at=now, error=error[:MAX_WHY])


def write_judge_state(session: Session, state: JudgeState, *, now: float) -> None:
    set_flag(session, JUDGE, msgspec.json.encode(state).decode(), now=now)


def read_judge_state(session: Session) -> JudgeState | None:
    """Return what is known of the judge; None when none was ever asked, or the row is damaged."""
    text = get_flag(session, JUDGE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=JudgeState)
    except msgspec.MsgspecError:
        log.warning("judge_state_unreadable")
        return None


def newest_scored(session: Session) -> tuple[str, float] | None:
    """Return id and time (Unix seconds) of the group that was scored last; None without one."""
    row = session.execute(
        select(GroupRow.group_id, GroupRow.scored_at)
        .where(GroupRow.scored_at.is_not(None))
        .order_by(GroupRow.scored_at.desc())
        .limit(1)
    ).first()
    return None if row is None or row[1] is None else (row[0], row[1])


def why_sampling_holds(session: Session) -> tuple[str, str] | None:
    """Return why candidates would find no judge, as a word and in words; None when they would."""
    known = read_judge_state(session)
    if known is None or known.state == "works":
        return None
    if known.state == "unknown":
        return FIRST_QUESTION, "the judge is asked whether it works"
    if known.state == "rejected":
        return "judge_rejected", f"the judge rejects every question: {known.error}"
    if known.state == "no_credit":
        return "judge_no_credit", f"the judge's account has no credit left: {known.error}"
    if known.state == "spent":
        return "judge_spent", known.error
    waiting = select(GroupRow.seq).where(GroupRow.status == SAMPLED).limit(HELD_WHILE_AWAY)
    number = session.scalar(select(func.count()).select_from(waiting.subquery()))
    if (number or 0) < HELD_WHILE_AWAY:
        return None
    return "judge_away", (
        f"{HELD_WHILE_AWAY} complete groups or more wait for a judge that is away: {known.error}"
    )
