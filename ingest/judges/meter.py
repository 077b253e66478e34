"""Measure what one judge costs: each call's tokens, money, time and outcome.

What a provider reports is counted, also of a request whose reply was of no use. What it does not
report (a reply without usage, or with half of it; a call that was cancelled, or ran out of time
after it was sent) is counted by an estimate: the prompt at 4 bytes a token, and a whole reply. A
call that never arrived or was refused costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from time import monotonic
from typing import Any

from ingest.errors import IngestError, JudgeRejectedError, JudgeUnavailableError
from ingest.judges.ledger import Ledger
from ingest.judges.spending import Amount, nano_usd
from ingest.ruler.abilities import LIMITS
from ingest.ruler.group import REFUSED
from ingest.ruler.judge import (
    MILLION,
    Judge,
    JudgeReply,
    Usage,
    context_tokens_of,
    import_litellm,
)
from ingest.ruler.prompt import reply_tokens
from sidecar.settings import Judge as JudgeSettings

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


class Ticket:
    """One judgement: whether it has begun to cost something, and has replies that were kept."""

    def __init__(self) -> None:
        self.begun = False
        self.replayed = False

    def note_replay(self) -> None:
        """Note that a kept reply was given."""
        self.replayed = True


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

    async def metered(
        self,
        judge: Judge,
        messages: Sequence[Mapping[str, str]],
        schema: Mapping[str, Any],
        ticket: Ticket,
    ) -> JudgeReply:
        """Ask the judge. Raises also: JudgeSpentError, JudgeRejectedError for a judge whose price
        nobody knows, StoreError; each of them before the judge is asked."""
        cost = await self._known_cost()
        estimate = estimate_call(messages, schema, self._settings.params, cost)
        reserved = await self._ledger.reserve(estimate, begun=ticket.begun)
        ticket.begun = True
        began_at, outcome, unknown = monotonic(), CANCELLED, True
        try:
            reply = await judge.complete(messages, schema)
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
            self._note_call(outcome, unknown, monotonic() - began_at)
            self._ledger.write_soon()

    def _note_call(self, outcome: str, unknown: bool, seconds: float) -> None:
        self._ledger.note(
            {
                (ASKED, f"{outcome} {self._name}"): 1,
                (ESTIMATED, self._name): int(unknown),
                (MILLISECONDS, self._name): round(seconds * 1_000),
            }
        )

    async def _known_cost(self) -> Cost | None:
        if not self._looked_up:
            self._cost = await asyncio.to_thread(litellm_price, self._settings.model)
            self._looked_up = True
        if self._cost is None and self._ledger.in_dollars:
            raise JudgeRejectedError(unpriced(self._settings.model))
        return self._cost


class MeteredJudge:
    """One judge for one judgement, with its meter."""

    def __init__(self, judge: Judge, meter: Meter, ticket: Ticket) -> None:
        self._judge = judge
        self._meter = meter
        self._ticket = ticket

    @property
    def model(self) -> str:
        return self._judge.model

    async def context_tokens(self) -> int | None:
        """See `SizedJudge.context_tokens`."""
        return await context_tokens_of(self._judge)

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        """See `Judge.complete` and `Meter.metered`."""
        return await self._meter.metered(self._judge, messages, schema, self._ticket)


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
