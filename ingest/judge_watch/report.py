"""Keep what is known of the judge, write it for others, and say on the terminal when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec
import structlog

from ingest.errors import JudgeBusyError
from ingest.judge_watch.advice import advice, advice_on
from ingest.judge_watch.state import JudgeSeen, JudgeState, read_judge_state, write_judge_state
from sidecar.errors import StoreError
from sidecar.store.database import Database

Failing = Literal["away", "rejected", "no_credit"]
TELL_AFTER_S = 30.0
"""An outage while the judge works is told on the terminal when it has lasted so long: most pass."""

log = structlog.get_logger()


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
        if self._state.state != "spent":
            self._say(f"judge is not asked: {why}")
        self._state = self._state.fails(self._clock(), why, until=until, state="spent")

    def renewed(self) -> None:
        """The time for which a budget was spent is over: the judge is asked whether it works."""
        self._state = self._state.asked(self._clock())

    async def tell(self) -> None:
        """Write the state, if the store does not know it yet. A refusal is logged."""
        judges = tuple(msgspec.structs.replace(one, error=one.reason) for one in self._seen())
        state = msgspec.structs.replace(self._state, judges=judges)
        if state == self._told:
            return
        try:
            await asyncio.to_thread(self._write, state)
            self._told = state
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
