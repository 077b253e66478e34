"""Keep what is known of the judge, write it for others, and say on the terminal when it fails."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec
import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.store.groups import SAMPLED
from sidecar import conditions
from sidecar.errors import StoreError
from sidecar.store.database import Database, count
from sidecar.store.models import GroupRow

# What an operator has to do when the judge gives no scores, in one sentence for each reason. Pure.

ALL_FAIL: Final = "the judge answers a simple sum but fails on every group"
_ADVICE: Final[Mapping[str, str]] = {
    JudgeUnavailableError.reason: "start the judge, correct {0}.api_base, or raise "
    "{0}.timeout_s where it is slow",
    JudgeBusyError.reason: "wait for the end of the limit, and if it comes back, lower "
    "judge.concurrency, set {0}.requests_per_minute to the limit, or get "
    "a larger one from the provider",
    JudgeNoCreditError.reason: "pay or raise the limit of the provider's account, or name another "
    "{0}.model or {0}.api_key and restart, since no waiting helps",
    JudgeRejectedError.reason: "correct {0}.model, {0}.api_base, {0}.api_key or {0}.params, and "
    "restart score and control",
    JudgeGarbledError.reason: "correct {0}.api_base: what answers there is no model's API but a "
    "web page or a gateway (most addresses end in /v1)",
    "judge_rubbish": "name a stronger {0}.model, or correct {0}.params: it answers, but writes no "
    "valid scores",
    ALL_FAIL: "check the judge's limits of length and tokens, and {0}.params",
}


def advice(reason: str, section: str = "judge") -> str:
    """Return what to do about a reason for which the judge gives no scores.

    section: of the settings, such as `gate_judge`.
    """
    known = _ADVICE.get(reason, _ADVICE[JudgeRejectedError.reason])
    return known.format(section)


def advice_on(error: str) -> str:
    """Return what to do about `JudgeState.error`, which begins with the reason."""
    return advice(error.partition(":")[0])


# What judging one group costs, as durable counters: two histograms with fixed bounds.

NANO = 10**9
"""Nano-dollars of a dollar: money is counted in whole numbers, which lose nothing."""
TOKENS, NANO_USD = "judge_group_tokens", "judge_group_nanousd"
"""Stages of counter rows: (stage, `le_<bound>`) -> groups of the bucket, (stage, SUM) -> total."""
BOUNDS: Mapping[str, tuple[int, ...]] = {
    TOKENS: (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000),
    NANO_USD: (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000),
}
"""Upper bounds of the buckets; the last bucket has none."""
SUM, LAST = "sum", "le_inf"


def count_group(session: Session, *, tokens: int, nano_usd: int | None) -> None:
    """Count what the judgement of one group cost, in the caller's transaction.

    nano_usd: None when the price of a call is not known: then it is in the other histogram alone.
    """
    for stage, amount in ((TOKENS, tokens), (NANO_USD, nano_usd)):
        if amount is not None:
            count(session, stage, bucket_of(stage, amount))
            count(session, stage, SUM, amount)


def bucket_of(stage: str, amount: int) -> str:
    """Return the reason of the row that counts this amount."""
    bounds = BOUNDS[stage]
    place = bisect_left(bounds, amount)
    return f"le_{bounds[place]}" if place < len(bounds) else LAST


# What the scoring process last saw of the judge: a condition.

JUDGE = "judge"
"""Kind of the condition."""
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
    """Its last error. In the condition this is `reason`: the provider's words may quote a
    prompt, and `sidecar forget` does not reach it."""
    without: tuple[str, ...] = ()
    """Parts of requests that it turned out not to take (`ingest.ruler.judge`)."""


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
        return msgspec.structs.replace(
            self, error_at=now, error=error[: conditions.MOST_CHARACTERS]
        )


def write_judge_state(session: Session, state: JudgeState, *, now: float) -> None:
    """Write the judge's condition; with fallbacks, also one for each judge."""
    code, passes, message = _SEEN[state.state]
    found = conditions.Condition(
        kind=JUDGE,
        state="ok" if state.state in ("works", "unknown") else "act",
        code=code,
        message=message.format(state.error),
        to_do=f"{advice_on(state.error)}{passes}" if passes is not None else _SPENT_TO_DO,
        since=state.since,
        until=state.until,
        data=msgspec.to_builtins(state),
    )
    conditions.write(session, found, now=now)
    for place, one in enumerate(state.judges if len(state.judges) > 1 else ()):
        fails = one.since is not None
        named = f"{one.model} ({f'fallback {place}' if place else 'the first judge'})"
        found = conditions.Condition(
            kind=f"{JUDGE} {place}",
            state="look" if fails else "ok",
            code=f"judge_{one.breaker}",
            message=f"{named} fails: {one.error}" if fails else named,
            since=one.since or 0.0,
            until=one.until,
        )
        conditions.write(session, found, now=now)


_SPENT_TO_DO: Final = "wait, or raise the budget that is named and restart score and control"
_SEEN: Final[Mapping[str, tuple[str, str | None, str]]] = {
    "unknown": ("judge_unknown", "", "the judge is asked whether it works"),
    "works": ("judge_works", "", "the judge gives scores"),
    "away": (
        "judge_away",
        "; it is asked again by itself",
        "the judge gives no scores: {}",
    ),
    "rejected": ("judge_rejects", "", "the judge rejects every question: {}"),
    "no_credit": ("judge_no_credit", "", "the judge's account has no credit: {}"),
    "spent": ("judge_spent", None, "the judge is not asked: {}"),
}
"""State -> code, what follows the advice (None: it is that of a budget), message."""


def read_judge_state(session: Session) -> JudgeState | None:
    """Return what is known of the judge; None when none was ever asked."""
    found = conditions.read(session, JUDGE)
    return None if found is None else msgspec.convert(found.data, JudgeState)


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


Failing = Literal["away", "rejected", "no_credit"]
TELL_S = 30.0
"""Interval in which a state that does not change is written again: an older one has no score behind
it."""
TELL_AFTER_S = 30.0
"""An outage while the judge works is told on the terminal when it has lasted so long: most pass."""


class JudgeReport:
    """The state of one worker's judge. It is written by `tell` alone, so none of it is lost while
    the store is locked."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        announce: Callable[[str], None],
        seen: Callable[[], tuple[JudgeSeen, ...]] = tuple,
    ) -> None:
        """announce: tells the operator's terminal. seen: what is known of each judge."""
        self._seen = seen
        self._database = database
        self._clock = clock
        self._announce = announce
        self._state = JudgeState(since=clock())
        self._told: JudgeState | None = self._state
        """What the store says."""
        self._told_at = 0.0
        self._announced = False
        self.logged: str | None = None
        """The kind of the present outage that was last logged."""

    def log_down(
        self,
        kind: str,
        *,
        model: str,
        reason: str | None,
        error: str,
        to_do: str = "",
        passes: bool,
    ) -> None:
        """Log an outage, once for each kind. to_do: empty: the advice on the reason. passes: it
        may end by itself."""
        if self.logged != kind:
            self.logged = kind
            say = log.warning if passes else log.error
            say("judge_down", model=model, reason=reason, error=error, to_do=to_do or advice(kind))

    async def begin(self) -> None:
        """The process starts: the judge is asked, and sampling waits for what it answers."""
        try:
            self._state = await asyncio.to_thread(self._read)
        except StoreError as error:
            log.warning("judge_state_not_read", error=str(error))
        self._state = self._state.asked(self._clock())
        self._told = None
        await self.tell()

    @property
    def _is_spent(self) -> bool:
        """True until `renewed`: what groups in flight end with says nothing of the budget."""
        return self._state.state == "spent"

    def works(self) -> None:
        """The judge gives scores. Once that is known, nothing changes; nor while a budget is spent,
        when a group in flight is finished."""
        if self._state.state == "works" or self._is_spent:
            return
        self._state = self._state.works(self._clock())
        if self._announced:
            self._announced = False
            self._announce("judge gives scores again")

    def fails(self, state: Failing, why: str, *, until: float) -> None:
        """The judge gives scores to no group. until: when it is asked again, in Unix seconds."""
        if self._is_spent:
            return
        before, now = self._state.state, self._clock()
        self._state = self._state.fails(now, why, until=until, state=state)
        to_do = advice_on(why)
        if state == "rejected" and before != state:
            self._say(f"judge rejects every question, so nothing is learned: {why}; {to_do}")
        elif state == "no_credit" and before != state:
            self._say(f"the judge's account has no credit, so nothing is learned: {why}; {to_do}")
        elif before == "unknown" or (
            not self._announced and now - self._state.since >= TELL_AFTER_S
        ):
            self._say(f"judge gives no scores: {why}; {to_do}; it is asked again and again")

    def failed_once(
        self, reason: str, group_id: str, *, until: float | None, asked_s: float = 0.0
    ) -> None:
        """One group has no scores. until: the end of the outage that others share, if there is one.
        asked_s: how long its provider asked to be left alone.

        The provider's words are kept with the group and its calls alone, where `sidecar forget`
        reaches them: they may quote the prompt. A judge that rejects every question is not
        `away`, whatever it does to one group.
        """
        if self._is_spent:
            return
        why = f"{reason}: group {group_id}"
        if reason == JudgeBusyError.reason:
            wait = f"; it asked to wait {asked_s:,.0f} s" if asked_s else ""
            why = f"{reason}: a rate limit of the provider, met by group {group_id}{wait}"
        if until is None or self._state.state in ("rejected", "no_credit"):
            self._state = self._state.erred(self._clock(), why)
        else:
            self.fails("away", why, until=until)

    def spent(self, why: str, *, until: float) -> None:
        """A budget is spent. until: when it is renewed, in Unix seconds."""
        if not self._is_spent:
            log.warning("judge_spent", why=why, until=until)
            self._say(f"judge is not asked: {why}")
        self._state = self._state.fails(self._clock(), why, until=until, state="spent")

    def renewed(self) -> bool:
        """Tell, once, that a spent budget is renewed: what is known of the judge is hours old."""
        if not self._is_spent or self._clock() < (self._state.until or 0.0):
            return False
        self._state = self._state.asked(self._clock())
        log.warning("judge_budget_renewed")
        return True

    async def tell(self) -> None:
        """Write the state, if the store does not know it yet. A refusal is logged."""
        judges = tuple(msgspec.structs.replace(one, error=one.reason) for one in self._seen())
        state = msgspec.structs.replace(self._state, judges=judges)
        now = self._clock()
        if state == self._told and 0.0 <= now - self._told_at < TELL_S:
            return
        try:
            await asyncio.to_thread(self._write, state)
            self._told, self._told_at = state, now
        except StoreError as error:
            log.warning("judge_state_not_stored", error=str(error))

    def _say(self, line: str) -> None:
        self._announced = True
        self._announce(line)

    def _read(self) -> JudgeState:
        with self._database.read() as session:
            return read_judge_state(session) or self._state

    def _write(self, state: JudgeState) -> None:
        with self._database.write(alone=False) as session:
            write_judge_state(session, state, now=self._clock())
