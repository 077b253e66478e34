"""The judging worker: claims `sampled` groups, asks the judge, writes `scored` or `set_aside`.

A group's outcome is written in one transaction with every judge call made for it. After a call
without a usable answer, `ingest.ruler.blame` finds out whether the group or the judge is at fault.
Failures caused by the group are counted, and after a few it is set aside with the judge's error;
while the judge is down the worker waits, longer each time, and no failure counts against a group.
The judge is asked before the first group too, and while it is down and no group waits; what is
known of it is written for `sidecar status` and for sampling (`ingest.judge_watch`).

A judgement has been paid for, so it is kept until the store takes it, also while the process stops.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import structlog
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ingest.errors import JudgeBusyError, JudgeNoCreditError, JudgeSpentError
from ingest.judge_watch import (
    ALL_FAIL,
    NANO,
    Failing,
    JudgeReport,
    advice,
    count_group,
    newest_scored,
)
from ingest.privacy.texts import JudgeView
from ingest.records import Group, ScoredGroup
from ingest.ruler.blame import (
    DEFECT,
    UNVERIFIED,
    Blame,
    Claimed,
    Cleared,
    Failed,
    charge,
    claim_for_judge,
    defect_of,
    give_back,
    hold,
)
from ingest.ruler.calls import count_call, save_judge_calls
from ingest.ruler.group import (
    SUBJECT,
    GroupOutcome,
    Held,
    Scored,
    SetAside,
    Unanswered,
    ask_probe,
    failure_of,
    verify_and_judge,
)
from ingest.ruler.judge import Judge, JudgePanel, replies_kept_for, storable
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import ATTEMPTS, SEED_BITS, JudgeCall, Judgement
from ingest.ruler.waiting import (
    LAST_DELAY_S,
    LONGEST_RETRY_AFTER_S,
    LONGEST_STAY_S,
    PASSING,
    Waiting,
)
from ingest.store.groups import load_group, load_scored_group, mark_scored, set_aside
from ingest.store.listing import patiently
from ingest.verifiers.rewarding import LONGEST_S, Rewarding
from sidecar.errors import StoreError
from sidecar.settings import Fallback, Judge as JudgeSettings
from sidecar.store.database import Database, count
from sidecar.store.models import GroupRow

# Reads and writes of the judging worker in the store.

LEASE_SLACK_S = 60.0
LONGEST_LIMIT_S = 120.0
"""Longest wait of one call for `judge.requests_per_minute`."""
_DAMAGE = (ValueError, TypeError, LookupError, zlib.error)
"""Errors of reading a damaged group."""

OnScored = Callable[[Session, Judgement, str, float], None]
"""(session, judgement, rubric hash, Unix seconds)"""

log = structlog.get_logger()


def lease_s(settings: JudgeSettings) -> float:
    """Return how long judging one group may take, in seconds: every judge in turn, each of whose
    calls takes as long as it may, and waits for its judge to be free first. Pure."""
    judges: tuple[JudgeSettings | Fallback, ...] = (settings, *settings.fallbacks)
    limited = any(one.requests_per_minute for one in judges)
    call_s = settings.timeout_s + (LONGEST_LIMIT_S if limited else LONGEST_STAY_S)
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

    def refused_replies(self, group_id: str) -> int:
        """Return how many replies to questions about a group were of no use. Blocks."""
        with self._database.read() as session:
            found = session.scalar(select(GroupRow.attempts).where(GroupRow.group_id == group_id))
        return found if isinstance(found, int) else 0

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
            return self._record(session, group_id, calls, outcome, failed, rubric_hash, now)

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
            judgement = outcome.judgement
            if outcome.asked:
                tokens, nano = cost_of(calls)
                count_group(session, tokens=tokens, nano_usd=nano)
            marked = mark_scored(
                session,
                group_id,
                judgement.scores,
                judgement.explanations,
                *(outcome.judged_by or (judgement.judge_model or self._judge_model, rubric_hash)),
                now,
                judgement.disagreement,
                outcome.rewarded,
                passes=len(judgement.passes),
            )
            if marked and self._on_scored is not None:
                self._on_scored(session, judgement, rubric_hash, now)
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
        now = self._clock()
        # In order: two workers that charge the same groups must not wait for each other.
        failures = sorted(failures, key=lambda failed: failed.group_id)
        with self._database.write(alone=False) as session:
            ended = [charge(session, one, now=now, proven=proven) for one in failures]
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


POLL_S = 0.5
GIVEN_BACK_S = 5.0
"""Extra wait of a group that failed during an outage, after the worker's own wait."""
LONGEST_SETUP_WAIT_S = 300.0
"""Longest wait while the judge refuses the probe, or every group: an operator has to act, and
useless replies may cost money."""
LONGEST_KEPT_S = 3600.0
"""Longest time that a judgement is kept for a store that refuses it. It occupies one of
`judge.concurrency` places meanwhile, so that no more of them are bought."""
STOP_GRACE_S = 15.0
"""Longest time that a stop waits for judgements to be stored. One attempt at a locked store takes
15 s, and may have begun just before the end of this: together less than the 35 s after which
`sidecar up` kills a process."""


class JudgingWorker:
    """Judges groups until stopped. Several may run, in one process or in many."""

    def __init__(
        self,
        database: Database,
        judge: Judge,
        settings: JudgeSettings,
        *,
        clock: Callable[[], float] = time.time,
        draw_seed: Callable[[Group | None], int] = lambda _: secrets.randbits(SEED_BITS),
        view: JudgeView | None = None,
        announce: Callable[[str], None] = lambda _: None,
        rewarding: Rewarding | None = None,
        on_scored: OnScored | None = None,
    ) -> None:
        """draw_seed: for each group, None for a probe: nobody can predict ids. announce: tells the
        operator. rewarding: None: no verifiers. view, on_scored: `score_answers`, `Judgements`."""
        verifying_s = LONGEST_S if rewarding is not None else 0.0
        self._rewarding = rewarding
        self._view = view
        self._judge = judge
        self._settings = settings
        self._clock = clock
        self._draw_seed = draw_seed
        self._judgements = Judgements(
            database,
            clock,
            judge_model=judge.model,
            lease_s=lease_s(settings) + verifying_s,
            on_scored=on_scored,
        )
        self._blame = Blame()
        self._store = Waiting()
        """Outage of the store: no further judge calls are made, since nothing can be stored."""
        self._asking: set[str] = set()
        self._storing: set[str] = set()
        """Groups whose judgement waits to be stored."""
        seen = judge.seen if isinstance(judge, JudgePanel) else tuple
        self._report = JudgeReport(database, clock, announce, seen)
        self._starts = False  # True until the first probe
        self._suspect: str | None = None
        """Id of the group in flight that a process died over: at most one at a time."""

    async def begin(self) -> None:
        """Have the judge asked before the first group, and sampling wait for what it says."""
        self._ask_first()
        await self._report.begin()

    def _ask_first(self) -> None:
        self._starts = True
        self._blame.begin()

    async def run(self, stop: asyncio.Event) -> None:
        """Judge groups, at most `judge.concurrency` at once, until `stop` is set.

        Groups that the judge is asked about are then given back, so another worker judges them
        again; judgements that wait to be stored are waited for, up to `STOP_GRACE_S`.
        """
        in_flight: dict[asyncio.Task[None], str] = {}
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                await self._report.tell()
                for group_id in await self._claim(self._room() - len(in_flight)):
                    in_flight[asyncio.create_task(self._work(group_id))] = group_id
                if not in_flight and self._wants_probe():
                    in_flight[asyncio.create_task(self._probe())] = SUBJECT
                await asyncio.wait(
                    {stopping, *in_flight}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in [task for task in in_flight if task.done()]:
                    del in_flight[task]
                    task.result()
        finally:
            stopping.cancel()
            kept = {task for task, group_id in in_flight.items() if group_id in self._storing}
            if kept:
                log.info("judging_stops_when_stored", groups=len(kept), longest_s=STOP_GRACE_S)
            await _end([stopping, *(in_flight.keys() - kept)])
            late = (await asyncio.wait(kept, timeout=STOP_GRACE_S))[1] if kept else set()
            await _end(late)
            held = [failed.group_id for failed in self._blame.release()]
            given_back = [*(in_flight[task] for task in in_flight.keys() - kept), *held]
            if not late:  # else the store is away, and the leases run out by themselves
                await asyncio.to_thread(self._judgements.give_back, given_back)
                await self._report.tell()

    async def step(self) -> int:
        """Judge waiting groups, as many as may be in flight. Returns: the number tried."""
        group_ids = await self._claim(self._room())
        await asyncio.gather(*(self._work(group_id) for group_id in group_ids))
        if self._wants_probe():
            await self._probe()
        await self._report.tell()
        return len(group_ids)

    def _room(self) -> int:
        now = self._clock()
        if self._waits(now):
            return 0
        most = 1 if self._store.lasts else self._settings.concurrency
        return self._blame.room(most, now)

    def _wants_probe(self) -> bool:
        now = self._clock()
        return not self._waits(now) and self._blame.wants_probe(now)

    def _waits(self, now: float) -> bool:
        """Tell whether the store forbids to ask the judge. A renewed budget has it asked anew."""
        if self._report.renewed():
            self._ask_first()
        return now < self._store.retry_at

    async def _withhold(self, outcome: GroupOutcome, *group_ids: str) -> bool:
        """Give groups back for which the judge may not be asked. Returns: True when it may not."""
        if not isinstance(outcome, Unanswered) or outcome.until is None:
            return False
        self._blame.waiting = self._blame.waiting.withheld(outcome.until)
        if outcome.reason == JudgeSpentError.reason:
            self._report.spent(outcome.detail, until=outcome.until)
        await asyncio.to_thread(self._judgements.give_back, group_ids)
        return True

    def _not_stored(self, subject: str, error: StoreError) -> None:
        self._store = self._store.failed(self._clock())
        log.warning("judgement_not_stored", group_id=subject, error=str(error))

    async def _claim(self, limit: int) -> list[str]:
        if limit <= 0:
            return []
        try:
            return await asyncio.to_thread(self._claim_now, limit)
        except StoreError as error:
            log.warning("judging_waits_for_store", error=str(error))
            return []

    def _claim_now(self, limit: int) -> list[str]:
        claimed = self._judgements.claim(limit, suspects=self._suspect is None)
        self._suspect = claimed.suspect or self._suspect
        # The lease of a group whose judgement cannot be stored may have run out.
        return [group_id for group_id in claimed.group_ids if group_id not in self._asking]

    async def _work(self, group_id: str) -> None:
        self._asking.add(group_id)
        try:
            await self._judge_one(group_id)
        except StoreError as error:  # the lease runs out, and the group is judged again
            self._not_stored(group_id, error)
        except Exception as error:  # one group must not end the judging of all the others
            log.exception("judging_failed", group_id=group_id)
            self._blame.failed(defect_of(group_id, error), self._clock())
        finally:
            self._asking.discard(group_id)
            if self._suspect == group_id:
                self._suspect = None

    async def _judge_one(self, group_id: str) -> None:
        group = await asyncio.to_thread(self._judgements.load, group_id)
        if group is None:
            return
        settings = self._settings.of(group.project)
        calls: list[JudgeCall] = []
        with replies_kept_for(group.exchange_id):
            outcome = await verify_and_judge(
                group,
                self._judge,
                settings,
                self._rewarding,
                seed=await asyncio.to_thread(self._seed_of, group),
                on_call=calls.append,
                view=self._view,
                load_known=self._judgements.load_known,
            )
        if isinstance(outcome, Held):
            held = Failed(group_id=group_id, reason=UNVERIFIED, detail=outcome.detail)
            await asyncio.to_thread(self._judgements.charge, [held], proven=True)
            return
        failed = self._blame.failure(group_id, outcome)
        await self._record(group_id, calls, outcome, failed, rubric_hash=hash_of(settings))
        self._store = self._store.answered()
        if isinstance(outcome, Scored) and outcome.asked:
            await self._clear(self._blame.works(self._clock()))
        elif not await self._withhold(outcome, group_id) and failed is not None:
            await self._hold_against(failed)
        elif failed is None and (reason := failure_of(outcome)) is not None:
            self._report.failed_once(reason, group_id, until=self._until)

    async def _record(
        self,
        group_id: str,
        calls: list[JudgeCall],
        outcome: GroupOutcome,
        failed: Failed | None,
        *,
        rubric_hash: str,
    ) -> None:
        """Store what the judge said, which has been paid for. Raises: StoreError after an hour."""
        self._storing.add(group_id)
        try:
            await patiently(
                lambda: self._judgements.record(
                    group_id, calls, outcome, failed, rubric_hash=rubric_hash
                ),
                on_failure=lambda error, _: self._not_stored(group_id, error),
                longest_s=LONGEST_KEPT_S,
            )
        except (StoreError, asyncio.CancelledError) as error:
            self._judgements.lose(group_id, calls, str(error) or "the process stops")
            raise
        finally:
            self._storing.discard(group_id)

    def _seed_of(self, group: Group) -> int:
        """Draw the seed of a group; after replies that were of no use, another one: the candidates
        are shown in another order."""
        seed = self._draw_seed(group) + self._judgements.refused_replies(group.group_id)
        return seed & ((1 << SEED_BITS) - 1)

    @property
    def _until(self) -> float | None:
        """When the judge is asked again; None: nothing forbids it."""
        waits = self._blame.waiting.lasts or self._blame.free_at > self._clock()
        return self._blame.free_at if waits else None

    async def _hold_against(self, failed: Failed) -> None:
        if self._blame.failed(failed, self._clock()) if not failed.believed else False:
            log.warning("judge_busy", model=self._judge.model, error=failed.detail)
        self._report.failed_once(
            failed.reason, failed.group_id, until=self._until, asked_s=failed.retry_after_s
        )
        if failed.believed:
            await asyncio.to_thread(self._judgements.charge, [failed], proven=True)
        elif not self._blame.holds(failed.group_id):
            later = self._blame.free_at + GIVEN_BACK_S
            await asyncio.to_thread(self._judgements.give_back, [failed.group_id], later)

    async def _probe(self) -> None:
        """Test with our own question whether the judge works; see `ingest.ruler.blame`."""
        calls: dict[str, list[JudgeCall]] = {}
        try:
            # At the start the sum is enough: it finds a wrong key, model or URL, and costs little.
            starts, self._starts = self._starts, False
            before = None if starts else await asyncio.to_thread(self._judgements.load_scored)
            again = None if before is None else await self._ask_probe(before, calls)
            if isinstance(again, SetAside) and not again.asked:
                again = None  # damaged: the judge was not asked
            tells = isinstance(again, Scored) or failure_of(again) == JudgeBusyError.reason
            last = again if again is not None and tells else await self._ask_probe(None, calls)
            # Apply the result before recording it: a full disk must not repeat the probe for ever.
            if not isinstance(last, Scored):
                if not await self._withhold(last):
                    await self._wait(last, quotes=last is again)
            elif last is again:
                await self._clear(self._blame.works(self._clock()))
            else:
                await self._doubt(again)
            await asyncio.to_thread(self._judgements.record_probe, calls, (again, last))
        except StoreError as error:
            self._not_stored(SUBJECT, error)

    async def _ask_probe(
        self, group: Group | None, calls: dict[str, list[JudgeCall]]
    ) -> GroupOutcome:
        settings = self._settings if group is None else self._settings.of(group.project)
        try:
            return await ask_probe(
                self._judge,
                settings,
                seed=self._draw_seed(None),
                on_call=calls.setdefault(hash_of(settings), []).append,
                group=group,
                view=self._view,
            )
        except StoreError:
            raise
        except Exception as error:  # a defect that hits every group hits the probe too
            log.exception("judge_probe_failed")
            return Unanswered(detail=defect_of(SUBJECT, error).detail, reason=DEFECT)

    async def _clear(self, cleared: Cleared) -> None:
        """The judge works: charge the earlier failures to their groups."""
        self._say_up(cleared.outage_s)
        # A group that is being judged again was given back before: its next failure will count.
        faults = [one for one in cleared.own_faults if one.group_id not in self._asking]
        if faults:
            await asyncio.to_thread(self._judgements.charge, faults, proven=True)

    async def _doubt(self, again: GroupOutcome | None) -> None:
        """The judge answers the sum question: count the earlier failures as unproven."""
        doubted = self._blame.answers(
            self._clock(),
            longest_s=LONGEST_SETUP_WAIT_S,
            again_failed=failure_of(again) not in (None, DEFECT),
        )
        last = doubted.unproven[-1] if doubted.unproven else None
        if not doubted.all_fail:
            if not self._blame.waiting.lasts:
                self._say_up(doubted.outage_s)
        else:
            self._say_down("away", ALL_FAIL, last.reason if last is not None else "")
            self._report.log_down(
                ALL_FAIL,
                model=self._judge.model,
                reason=last.reason if last is not None else failure_of(again),
                error=last.detail if last is not None else "",
                to_do=f"{ALL_FAIL}: {advice(ALL_FAIL)}",
                passes=False,
            )
        await asyncio.to_thread(self._judgements.charge, doubted.unproven, proven=False)

    def _say_up(self, outage_s: float | None) -> None:
        if outage_s is not None:
            self._report.logged = None
            log.warning("judge_up", model=self._judge.model, lasted_s=round(outage_s, 1))
        self._report.works()

    def _say_down(self, state: Failing, reason: str, detail: str) -> None:
        why = f"{reason}: {detail}" if detail else reason
        self._report.fails(state, why, until=self._blame.free_at)

    async def _wait(self, outcome: SetAside | Unanswered, *, quotes: bool) -> None:
        """The judge does not work: charge no group, and pause all. quotes: users were quoted."""
        passes = isinstance(outcome, Unanswered) and outcome.reason in PASSING
        self._blame.down(
            self._clock(),
            longest_s=LAST_DELAY_S if passes else LONGEST_SETUP_WAIT_S,
            retry_after_s=outcome.retry_after_s if isinstance(outcome, Unanswered) else 0.0,
        )
        detail = "" if quotes else outcome.detail
        reason = outcome.reason
        unpaid = reason == JudgeNoCreditError.reason
        state: Failing = "away" if passes else "no_credit" if unpaid else "rejected"
        self._say_down(state, reason, detail)
        self._report.log_down(
            reason, model=self._judge.model, reason=reason, error=outcome.detail, passes=passes
        )
        released = [failed.group_id for failed in self._blame.release()]
        until = self._blame.free_at + GIVEN_BACK_S
        await asyncio.to_thread(self._judgements.give_back, released, until)


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
