"""Apply the privacy policy of an exchange's project, before the exchange is stored.

Ingest applies it to captured exchanges, and the scoring and control processes to the answers that
they sample; all run off the path of users. A search that fails costs its exchange alone, which then
counts as flagged: what nobody could look into is not learned from, and not stored where values must
be replaced first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import msgspec
import structlog

from ingest.privacy.detectors import Detectors
from ingest.privacy.texts import (
    MAX_BYTES,
    SEARCHED_BYTES,
    Redaction,
    Searched,
    TooLargeError,
    kinds_in,
)
from sidecar.records import Choice, Exchange
from sidecar.settings import Privacy

STAGE = "privacy"
"""Counter rows: (stage, what was found or done) -> exchanges."""
PRIVATE = "private"
"""`untrainable_reason` of an exchange that is kept out of training."""
REDACTED = "redacted"
"""`untrainable_reason` of an exchange in which values were replaced; its token ids are gone."""
FAILED, TOO_LARGE = "failed", "too_large"
KEPT_OUT, ENCRYPTED, DROPPED = "kept_out", "encrypted", "dropped"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Screened:
    """What became of an exchange."""

    exchange: Exchange | None
    """None: it is not stored."""
    reasons: tuple[str, ...] = ()
    """What to count it under; empty when nothing was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenedAnswer:
    """What the policy allows for one answer that the sidecar sampled."""

    may_store: bool
    """The text of the answer may be in the store."""
    may_learn: bool
    """The answer may be trained on; False whenever it may not be stored."""
    reasons: tuple[str, ...] = ()
    """What was found, or why the search failed; empty when nothing was found."""


class Screen:
    """The policies of all projects. For one thread."""

    def __init__(self, settings: Privacy) -> None:
        self._settings = settings
        every = (settings, *(settings.of(name) for name in settings.projects))
        self._make = cache(lambda kinds: Detectors(kinds, settings.patterns))
        self._searched = cache(lambda _kinds: Searched(MAX_BYTES // len(every)))
        self.keeps_unread = not any(rules.before_storage for rules in every)
        """A record that cannot be read may be kept as it came."""

    def __call__(self, exchange: Exchange) -> Screened:
        """Never raises."""
        rules = self._settings.of(exchange.project)
        if not rules.flag and not rules.before_storage:
            return Screened(exchange)
        try:
            return self._screened(exchange, rules)
        except TooLargeError:
            why = TOO_LARGE
        except Exception as error:  # noqa: BLE001 - a defect costs this exchange, not the batch
            why = FAILED
            # Without the message, which may quote what users wrote.
            log.error(
                "privacy_failed", exchange_id=exchange.exchange_id, error=type(error).__name__
            )
        if rules.before_storage or rules.flagged == "drop":
            return Screened(None, (why, DROPPED))
        return Screened(_kept_out(exchange, PRIVATE), (why, KEPT_OUT))

    def answer(self, message: bytes, *, project: str) -> ScreenedAnswer:
        """Apply the policy to an answer that was sampled, not captured. Never raises.

        message: the assistant message as JSON. project: that of the exchange with the prompt.
        """
        rules = self._settings.of(project)
        may_store = not rules.before_storage and rules.flagged != "drop"
        flagging: list[str] = []
        hidden: list[str] = []
        try:
            if rules.flag:
                flags = self._make(rules.flag)
                flagging = kinds_in([message], flags, max_bytes=SEARCHED_BYTES)
            if rules.before_storage:
                hides = self._make(rules.hidden)
                hidden = kinds_in([message], hides, max_bytes=SEARCHED_BYTES)
        except TooLargeError:
            return ScreenedAnswer(may_store=may_store, may_learn=False, reasons=(TOO_LARGE,))
        except Exception as error:  # noqa: BLE001 - a defect costs this answer, not the group
            # Without the message, which may quote what the answer says.
            log.error("privacy_failed", error=type(error).__name__)
            return ScreenedAnswer(may_store=may_store, may_learn=False, reasons=(FAILED,))
        found = dict.fromkeys((*flagging, *hidden))
        return ScreenedAnswer(
            may_store=not hidden and (may_store or not flagging),
            may_learn=not hidden and (not flagging or rules.flagged == "encrypt"),
            reasons=tuple(f"found_{kind.lower()}" for kind in found),
        )

    def _screened(self, exchange: Exchange, rules: Privacy) -> Screened:
        bodies = [exchange.request, *(choice.message for choice in exchange.choices)]
        kinds: list[str] = []
        if rules.flag:
            kinds = kinds_in(
                bodies,
                self._make(rules.flag),
                max_bytes=SEARCHED_BYTES,
                searched=self._searched(rules.flag),
            )
        reasons = [f"found_{kind.lower()}" for kind in kinds]
        if kinds and rules.flagged == "drop":
            return Screened(None, (*reasons, DROPPED))
        if kinds and rules.flagged == "keep_out":
            exchange = _kept_out(exchange, PRIVATE)
            reasons.append(KEPT_OUT)
        elif kinds:
            reasons.append(ENCRYPTED)
        if rules.before_storage:
            redaction = Redaction(self._make(rules.hidden), max_bytes=SEARCHED_BYTES)
            exchange = _redacted(exchange, redaction)
            if redaction.replaced:
                reasons.append(REDACTED)
        return Screened(exchange, tuple(reasons))


def _kept_out(exchange: Exchange, reason: str) -> Exchange:
    if exchange.untrainable_reason is not None:
        return exchange
    return msgspec.structs.replace(exchange, untrainable_reason=reason)


def _redacted(exchange: Exchange, redaction: Redaction) -> Exchange:
    """Replace values in what was said. Token ids say the same, so they go with them."""
    request = redaction.body(exchange.request)
    messages = [redaction.body(choice.message) for choice in exchange.choices]
    if not redaction.replaced:
        return exchange
    choices = tuple(
        Choice(index=choice.index, message=message, finish_reason=choice.finish_reason)
        for choice, message in zip(exchange.choices, messages, strict=True)
    )
    return msgspec.structs.replace(
        exchange,
        request=request,
        choices=choices,
        prompt_token_ids=(),
        untrainable_reason=exchange.untrainable_reason or REDACTED,
    )


@cache
def default_screen() -> Screen:
    """The policy by the default settings: what a caller has that names no other."""
    return Screen(Privacy())


def keep_all(exchange: Exchange) -> Screened:
    """Screen nothing."""
    return Screened(exchange)
