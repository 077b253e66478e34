"""Measure what one judge costs: each call's tokens, money, time and outcome.

What a provider reports is counted, also of a request whose reply was of no use. What it does not
report (a reply without usage, or with half of it; a call that was cancelled, or ran out of time
after it was sent) is counted by an estimate: the prompt at 4 bytes a token, and a whole reply. A
call that never arrived or was refused costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import ceil
from time import monotonic
from typing import Any

import structlog
from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from ingest.errors import IngestError, JudgeRejectedError, JudgeSpentError, JudgeUnavailableError
from ingest.judge_watch import NANO
from ingest.ruler.group import REFUSED
from ingest.ruler.judge import LIMITS, MILLION, JudgeReply, Usage, import_litellm
from ingest.ruler.prompt import reply_tokens
from ingest.store.listing import day_of, next_midnight
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database, count, insert_into
from sidecar.store.models import CounterRow

# What the judges have cost, and the budgets of it. The rule (`first_spent`) is pure.

DAY, TOKENS = "judge_spent", "judge_tokens"
"""Stages of counter rows: (stage, day) -> nano-dollars, tokens."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What something costs, or may cost."""

    nano_usd: int = 0
    tokens: int = 0
    """Tokens of prompt and reply together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What this day (UTC) has cost, with what calls in flight may cost."""

    nano_usd_today: int = 0
    tokens_today: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentBudget:
    """A budget that is spent."""

    why: str
    """What was spent of what, and until when, for people."""
    until: datetime
    """When it is renewed."""


def nano_usd(dollars: float) -> int:
    return round(dollars * NANO)


def first_spent(spending: Spending, budget: JudgeSettings, *, now: float) -> SpentBudget | None:
    """Return a budget that is spent; None when none is. Pure."""
    budgets = (
        ("budget", spending.nano_usd_today, nano_usd(budget.budget)),
        ("budget_tokens", spending.tokens_today, budget.budget_tokens),
    )
    for name, used, limit in budgets:
        if limit and used >= limit:
            until = next_midnight(now)
            amounts = (
                f"{used:,} of {limit:,} tokens"
                if name == "budget_tokens"
                else f"{shown_usd(used)} of {shown_usd(limit)}"
            )
            return SpentBudget(
                why=f"judge.{name} is spent: {amounts} today, until {until:%Y-%m-%d %H:%M} UTC",
                until=until,
            )
    return None


def shown_usd(nano: int) -> str:
    """Return nano-dollars as people write dollars; more digits below a cent."""
    dollars = nano / NANO
    return f"${dollars:,.2f}" if dollars >= 0.01 or not nano else f"${dollars:.6f}"


def rows_of(amount: Amount, *, now: float) -> dict[tuple[str, str], int]:
    """Return what an amount adds to the counters, at a time in Unix seconds."""
    day = day_of(now)
    return {(DAY, day): amount.nano_usd, (TOKENS, day): amount.tokens}


def read_spending(
    session: Session, *, now: float, unwritten: Mapping[tuple[str, str], int] | None = None
) -> Spending:
    """Read what this day has cost.

    unwritten: counts that are still to be added.
    """
    day = day_of(now)
    found = {row.stage: row.count for row in session.scalars(_counters_of(day))}

    def total(stage: str) -> int:
        return found.get(stage, 0) + (unwritten or {}).get((stage, day), 0)

    return Spending(nano_usd_today=total(DAY), tokens_today=total(TOKENS))


def lock_rows(session: Session, *, now: float) -> None:
    """Have the counters of this day to oneself until the transaction ends."""
    day = day_of(now)
    today = insert_into(session, CounterRow).values(stage=DAY, reason=day, count=0)
    session.execute(today.on_conflict_do_nothing(index_elements=["stage", "reason"]))
    # Locked: processes that ask at once see one another's reservations.
    session.execute(_counters_of(day).order_by(CounterRow.stage).with_for_update())


def _counters_of(day: str) -> Select[CounterRow]:
    return select(CounterRow).where(CounterRow.stage.in_([DAY, TOKENS]), CounterRow.reason == day)


# Keep in the store what the judges cost, and refuse a judgement when a budget is spent.

Counts = Mapping[tuple[str, str], int]
"""(stage, reason) -> what is added to that counter."""


class Ledger:
    """The spending of one process's judges. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        settings: JudgeSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._unwritten: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held by the thread that writes: what it has taken is in the store when the next reads."""
        self._writing: asyncio.Task[None] | None = None
        self.in_dollars = bool(settings.budget)
        self.has_budget = self.in_dollars or bool(settings.budget_tokens)

    async def reserve(self, amount: Amount, *, begun: bool) -> Counts:
        """Reserve what a call may cost.

        begun: the judgement has paid for a call already, so it is finished whatever is spent.
        Returns: the reservation, for `settle`.
        Raises: JudgeSpentError; StoreError when nobody can know what is spent.
        """
        now = self._clock()
        if not self.has_budget:
            return {}
        rows = rows_of(amount, now=now)
        spent = await asyncio.to_thread(self._reserve, rows, now, not begun)
        if spent is not None:
            raise JudgeSpentError(spent.why, until=spent.until.timestamp())
        return rows

    def settle(self, reserved: Counts, amount: Amount | None) -> None:
        """End a call.

        amount: what its provider may have charged without saying so, as far as that can be
            estimated; None when all is known (`spend`).
        """
        if amount is None:
            self.note({key: -number for key, number in reserved.items()})
        elif not reserved:
            self.spend(amount)

    def spend(self, amount: Amount) -> None:
        self.note(rows_of(amount, now=self._clock()))

    def note(self, counts: Counts) -> None:
        """Add to counters, in memory until the next write."""
        with self._lock:
            self._unwritten.update(counts)

    def write_soon(self) -> None:
        """Begin to write what is noted, unless a write is under way."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def aclose(self) -> None:
        """Write what is noted. What a store refuses now is lost, and logged."""
        if self._writing is not None:
            await self._writing
        await self._write()

    async def _write(self) -> None:
        while any(self._unwritten.values()):
            try:
                await asyncio.to_thread(self._reserve, {}, self._clock(), False)
            except StoreError as error:
                log.warning("judge_costs_not_stored", error=str(error))
                return

    def _reserve(self, rows: Counts, now: float, check: bool) -> SpentBudget | None:
        """Write the rows and what is noted, unless a budget is spent. Raises: StoreError."""
        noted: Counter[tuple[str, str]]

        def work(session: Session) -> SpentBudget | None:
            lock_rows(session, now=now)
            spending = read_spending(session, now=now, unwritten=noted)
            spent = first_spent(spending, self._settings, now=now) if check else None
            for counts in (noted,) if spent is not None else (noted, rows):
                for (stage, reason), number in counts.items():
                    count(session, stage, reason, number)
            return spent

        with self._turn:
            with self._lock:
                noted, self._unwritten = self._unwritten, Counter()
            try:
                return self._database.repeat(work, alone=False)
            except StoreError:
                self.note(noted)
                raise


PAID, ASKED, ESTIMATED = "judge_paid", "judge_asked", "judge_estimated"
PROMPTS, REPLIES, MILLISECONDS = "judge_prompt_tokens", "judge_reply_tokens", "judge_ms"
"""Stages of counter rows. (stage, model) -> nano-dollars, calls counted by an estimate, tokens,
tokens, milliseconds; (ASKED, "outcome model") -> calls."""
MODEL_CHARACTERS = 46
"""Characters of a model's name in these rows: with the longest outcome they fit a reason."""
ANSWERED, CANCELLED = "answered", "cancelled"
Cost = Callable[[int, int], float]
"""(prompt tokens, reply tokens) of one call -> US dollars."""
BYTES_A_TOKEN = 4
"""Bytes of a prompt for one token: English text has 4 to 5, code and other languages fewer."""


class Meter:
    """What one judge costs. Shared by all that ask it."""

    def __init__(self, settings: JudgeSettings, ledger: Ledger) -> None:
        """settings: those of this judge; a fallback has a model and a price of its own."""
        self._settings = settings
        self._name = settings.model[:MODEL_CHARACTERS]
        self._ledger = ledger
        self._cost: Cost | None = (
            None if settings.price is None else partial(_dollars, settings.price)
        )
        self._looked_up = settings.price is not None

    def paid(self, usage: Usage) -> None:
        """Note a request that the provider answered.

        Of half a usage only the tokens are noted: the call counts by its estimate (`metered`).
        """
        prompt, reply = usage.prompt_tokens, usage.completion_tokens
        nano = 0
        if prompt is not None and reply is not None:
            dollars = usage.cost_usd
            if dollars is None and self._cost is not None:
                dollars = self._cost(prompt, reply)
            nano = nano_usd(dollars or 0.0)
            self._ledger.spend(Amount(nano_usd=nano, tokens=prompt + reply))
        self._ledger.note(
            {
                (PAID, self._name): nano,
                (PROMPTS, self._name): prompt or 0,
                (REPLIES, self._name): reply or 0,
            }
        )

    async def estimate(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> Amount:
        """Return what a call may cost. Raises: JudgeRejectedError for a judge whose price nobody
        knows, when a budget is in dollars."""
        cost = await self._known_cost()
        return estimate_call(messages, schema, self._settings.params, cost)

    async def metered(
        self, send: Callable[[], Awaitable[JudgeReply]], estimate: Amount, *, begun: bool
    ) -> JudgeReply:
        """Send a call, and count what it cost. begun: as for `Ledger.reserve`.

        Raises: what `send` raises; before it is called, JudgeSpentError and StoreError.
        """
        reserved = await self._ledger.reserve(estimate, begun=begun)
        began_at, outcome, unknown = monotonic(), CANCELLED, True
        try:
            reply = await send()
            outcome = ANSWERED
            unknown = reply.prompt_tokens is None or reply.completion_tokens is None
            return reply
        except JudgeUnavailableError as error:
            outcome, unknown = error.reason, error.maybe_paid
            raise
        except IngestError:
            outcome, unknown = REFUSED, False
            raise
        finally:
            self._ledger.settle(reserved, estimate if unknown else None)
            self._ledger.note(
                {
                    (ASKED, f"{outcome} {self._name}"): 1,
                    (ESTIMATED, self._name): int(unknown),
                    (MILLISECONDS, self._name): round((monotonic() - began_at) * 1_000),
                }
            )
            self._ledger.write_soon()

    async def _known_cost(self) -> Cost | None:
        if not self._looked_up:
            self._cost = await asyncio.to_thread(litellm_price, self._settings.model)
            self._looked_up = True
        if self._cost is None and self._ledger.in_dollars:
            raise JudgeRejectedError(unpriced(self._settings.model))
        return self._cost


def estimate_call(
    messages: Sequence[Mapping[str, str]],
    schema: Mapping[str, Any],
    params: Mapping[str, Any],
    cost: Cost | None,
) -> Amount:
    """Return what a call may cost. Pure. cost: None: in tokens alone."""
    prompt = ceil(sum(len(one["content"].encode()) for one in messages) / BYTES_A_TOKEN)
    limits = (params.get(name) for name in LIMITS)
    reply = next((one for one in limits if isinstance(one, int)), None) or reply_tokens(schema)
    dollars = 0.0 if cost is None else cost(prompt, reply)
    return Amount(nano_usd=nano_usd(dollars), tokens=prompt + reply)


def litellm_price(model: str) -> Cost | None:
    """Return what a call of a model costs by LiteLLM's price list; None when it knows no price.

    The price of a token depends on the call where a provider takes more for long prompts, so it is
    looked up with the tokens of each call.
    """
    litellm = import_litellm()

    def cost(prompt_tokens: int, reply_tokens: int) -> float:
        return float(
            sum(
                litellm.cost_per_token(
                    model=model, prompt_tokens=prompt_tokens, completion_tokens=reply_tokens
                )
            )
        )

    try:
        cost(1, 1)
    except Exception:  # noqa: BLE001 - LiteLLM raises many kinds of errors for an unknown model
        return None
    return cost


def unpriced(model: str, setting: str = "its price") -> str:
    """Return what is wrong with a budget in dollars for a judge of unknown price.

    setting: where its price goes, such as `gate_judge.price`.
    """
    return (
        f"judge.budget cannot be kept: nobody knows the price of {model}, so it is not asked; "
        f"set {setting} (US dollars for a million tokens), or judge.budget_tokens in place of it"
    )


def _dollars(price: Mapping[Any, float], prompt_tokens: int, reply_tokens: int) -> float:
    """price: USD for a million tokens."""
    return (prompt_tokens * price["input"] + reply_tokens * price["output"]) / MILLION
