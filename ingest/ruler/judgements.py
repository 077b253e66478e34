"""Reads and writes of the judging worker in the store.

Each method is one transaction and blocks: the worker calls it in a thread. A group's outcome is
written together with every judge call that was made for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import structlog
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ingest.judge_watch.costs import NANO, count_group
from ingest.judge_watch.state import newest_scored
from ingest.records import Group, ScoredGroup
from ingest.ruler.attempts import (
    Claimed,
    charge,
    claim_for_judge,
    doubt,
    give_back,
    hold,
)
from ingest.ruler.blame import Failed
from ingest.ruler.calls import count_call, save_judge_calls
from ingest.ruler.group import GroupOutcome, Scored, SetAside, Unanswered, failure_of
from ingest.ruler.judge_errors import storable
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S
from ingest.ruler.probe import SUBJECT
from ingest.ruler.ruler import ATTEMPTS, JudgeCall, Judgement
from ingest.store.groups import load_group, load_scored_group, mark_scored, set_aside
from sidecar.errors import StoreError
from sidecar.settings import Fallback
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database, count
from sidecar.store.models import GroupRow

LEASE_SLACK_S = 60.0
LONGEST_LIMIT_S = 120.0
"""Longest wait of one call for `judge.requests_per_minute` and `tokens_per_minute`."""
_DAMAGE = (ValueError, TypeError, LookupError, zlib.error)
"""Errors of reading a damaged group."""

OnScored = Callable[[Session, str, Judgement, str, float], None]
"""(session, group id, judgement, rubric hash, Unix seconds)"""

log = structlog.get_logger()


def lease_s(settings: JudgeSettings) -> float:
    """Return how long judging one group may take, in seconds: every judge in turn, each of whose
    calls takes as long as it may, and waits for the limits of a minute first. Pure."""
    judges: tuple[JudgeSettings | Fallback, ...] = (settings, *settings.fallbacks)
    limited = any(one.requests_per_minute or one.tokens_per_minute for one in judges)
    call_s = settings.timeout_s + (LONGEST_LIMIT_S if limited else 0.0)
    return len(judges) * settings.passes * ATTEMPTS * call_s + LEASE_SLACK_S


def cost_of(calls: Sequence[JudgeCall]) -> tuple[int, int | None]:
    """Return tokens and nano-dollars of the calls of one group; None without a known price."""
    replies = [call.reply for call in calls]
    tokens = sum((one.prompt_tokens or 0) + (one.completion_tokens or 0) for one in replies)
    costs = [one.cost_usd for one in replies]
    known = [cost for cost in costs if cost is not None]
    return tokens, round(sum(known) * NANO) if len(known) == len(costs) else None


class Judgements:
    """The judging worker's access to the store."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        *,
        judge_model: str,
        lease_s: float,
        on_scored: OnScored | None = None,
    ) -> None:
        """judge_model: recorded where no judge was asked. lease_s: how long a claimed group belongs
        to this worker; see `lease_s`.
        on_scored: is called in the transaction that stores a group's scores."""
        self._database = database
        self._clock = clock
        self._judge_model = judge_model
        self._lease_s = lease_s
        self._on_scored = on_scored
        self._lost = 0
        """Paid calls that could not be stored, and are not counted yet."""

    def claim(self, limit: int, *, suspects: bool) -> Claimed:
        """Claim up to `limit` groups; see `claim_for_judge` for `suspects`."""
        with self._database.write(alone=False) as session:
            return claim_for_judge(
                session,
                limit=limit,
                now=self._clock(),
                lease_s=self._lease_s,
                suspects=suspects,
            )

    def load(self, group_id: str) -> Group | None:
        """Load a group with its exchanges. Returns: None when it is gone."""
        with self._database.read() as session:
            return load_group(session, group_id)

    def load_known(self, group_id: str) -> ScoredGroup | None:
        """Load the scores that a group has before it is judged: those of a best-of-N request."""
        with self._database.read() as session:
            return load_scored_group(session, group_id)

    def load_scored(self) -> Group | None:
        """Load the newest scored group, to ask the judge about it again.

        Returns: None when there is none, or when it cannot be read.
        """
        with self._database.read() as session:
            newest = newest_scored(session)
            try:
                return None if newest is None else load_group(session, newest[0])
            except _DAMAGE as error:
                log.warning(
                    "judge_probe_unreadable", group_id=newest and newest[0], error=str(error)
                )
                return None

    def record(
        self,
        group_id: str,
        calls: Sequence[JudgeCall],
        outcome: GroupOutcome,
        failed: Failed | None,
        *,
        rubric_hash: str,
    ) -> None:
        """Write the calls made for a group and its outcome.

        rubric_hash: of the rubric that the judge was given for this group.
        failed: the outcome is not final, since the judge may be at fault. The group then stays
        claimed until it is charged or given back.
        """
        now = self._clock()
        lost, self._lost = self._lost, 0

        def write(session: Session) -> bool:
            count(session, "judge_calls", "lost", lost)
            return self._record(
                session, group_id, calls, outcome, failed, rubric_hash=rubric_hash, now=now
            )

        try:
            # Repeated when it conflicts with another transaction: the calls have been paid for.
            changed = self._database.repeat(write, alone=False)
        except StoreError:
            self._lost += lost
            raise
        if failed is None:
            _log_outcome(group_id, outcome, changed)

    def lose(self, group_id: str, calls: Sequence[JudgeCall], error: str) -> None:
        """Give up calls that the store did not take for so long; they count with the next ones."""
        self._lost += sum(not call.reply.cached for call in calls)
        log.error("judgement_lost", group_id=group_id, calls=len(calls), error=error)

    def _record(
        self,
        session: Session,
        group_id: str,
        calls: Sequence[JudgeCall],
        outcome: GroupOutcome,
        failed: Failed | None,
        *,
        rubric_hash: str,
        now: float,
    ) -> bool:
        """Returns: True when the group has its final outcome by this."""
        known = select(GroupRow.seq).where(GroupRow.group_id == group_id)
        if session.scalar(known) is None:  # deleted meanwhile: what was said of it is not kept
            for call in calls:
                count_call(session, call)
            return False
        save_judge_calls(session, group_id, calls, rubric_hash=rubric_hash, now=now)
        bad_replies = sum(not call.ok for call in calls)
        session.execute(
            update(GroupRow)
            .where(GroupRow.group_id == group_id)
            .values(attempts=GroupRow.attempts + bad_replies)
        )
        if failed is not None:
            if isinstance(outcome, Unanswered):
                count(session, "judge_calls", "unanswered")
                count(session, "judge_failures", outcome.reason)
            hold(session, group_id, until=now + LONGEST_RETRY_AFTER_S + self._lease_s)
        elif isinstance(outcome, SetAside):
            return set_aside(session, group_id, outcome.reason, detail=storable(outcome.detail))
        elif isinstance(outcome, Scored):
            if outcome.asked:
                tokens, nano = cost_of(calls)
                count_group(session, tokens=tokens, nano_usd=nano)
            marked = mark_scored(
                session,
                group_id,
                outcome.judgement.scores,
                outcome.judgement.explanations,
                *(
                    outcome.judged_by
                    or (outcome.judgement.judge_model or self._judge_model, rubric_hash)
                ),
                now,
                outcome.judgement.disagreement,
                outcome.rewarded,
                passes=len(outcome.judgement.passes),
            )
            if marked and self._on_scored is not None:
                self._on_scored(session, group_id, outcome.judgement, rubric_hash, now)
            return marked
        return False

    def record_probe(
        self,
        calls: Mapping[str, Sequence[JudgeCall]],
        outcomes: tuple[GroupOutcome | None, GroupOutcome],
    ) -> None:
        """Write the calls of a probe and count its outcomes.

        calls: by the hash of the rubric that they were made with.
        outcomes: the one over a group that was scored before (None: not asked), and the last one.
        """
        with self._database.write(alone=False) as session:
            for hashed, made in calls.items():
                save_judge_calls(session, SUBJECT, made, rubric_hash=hashed, now=self._clock())
            again, last = outcomes
            for outcome in (last,) if again is last or again is None else (again, last):
                count(session, "judge_probes", failure_of(outcome) or "scored")

    def charge(self, failures: Sequence[Failed], *, proven: bool) -> None:
        """Count failures against their groups; a group that has failed too often is set aside.

        proven: the judge works, so each failure is its group's own fault. Else any of them may be
        the judge's fault.
        """
        write = charge if proven else doubt
        now = self._clock()
        # In order: two workers that charge the same groups must not wait for each other.
        failures = sorted(failures, key=lambda failed: failed.group_id)
        with self._database.write(alone=False) as session:
            ended = [write(session, failed, now=now) for failed in failures]
        for failed, is_set_aside in zip(failures, ended, strict=True):
            log.warning(
                "group_set_aside" if is_set_aside else "group_not_judged",
                group_id=failed.group_id,
                reason=failed.reason,
                detail=failed.detail,
                proven=proven,
            )

    def give_back(self, group_ids: Sequence[str], until: float = 0.0) -> None:
        """Give up the leases of these groups. Nobody claims them before `until`, in Unix seconds.

        A store that refuses is logged: the leases then run out by themselves.
        """
        try:
            with self._database.write(alone=False) as session:
                for group_id in sorted(group_ids):
                    give_back(session, group_id, until=until)
        except StoreError as error:
            log.warning("judging_leases_left", groups=len(group_ids), error=str(error))


def _log_outcome(group_id: str, outcome: GroupOutcome, changed: bool) -> None:
    if not changed:
        log.info("judgement_came_second", group_id=group_id)
    elif isinstance(outcome, SetAside):
        log.warning(
            "group_set_aside", group_id=group_id, reason=outcome.reason, detail=outcome.detail
        )
    elif isinstance(outcome, Scored):
        scores = outcome.judgement.scores
        log.info("group_scored", group_id=group_id, low=min(scores), high=max(scores))
