"""Errors of ingest. One base; one class per thing a caller can do about it.

IngestError
├── BusError (OSError)              the bus cannot be read or written: try again later
├── UnreadableExchangesError (ValueError)  stored exchanges are damaged: leave them out
├── NoTokenizerError (LookupError)  the base model's tokenizer is not on this machine
├── SamplingError (ConnectionError) vLLM gave no usable candidate: try the group again later
│   ├── EngineDownError             vLLM cannot be reached: wait
│   ├── EngineBusyError             vLLM takes no request for now (429): wait as long as it says
│   ├── NoRoomError                 users need the capacity: wait
│   ├── AdapterGoneError            vLLM does not know the adapter: wait if it is to be loaded again
│   └── RequestRefusedError         vLLM refuses the request itself (400)
├── JudgeUnavailableError (ConnectionError)  no usable answer: try again later
│   ├── JudgeBusyError              a rate limit: wait as long as it says
│   ├── JudgeRejectedError          4xx, due to this request or to the settings: send a probe
│   │   └── JudgeNoCreditError      the provider's account is used up: an operator has to pay
│   ├── JudgeGarbledError           the reply is no chat completion: send a probe
│   └── JudgeWithheldError          our own limits: wait until the time it names, blame nobody
│       ├── JudgeSpentError         a budget is spent
│       └── JudgeLimitedError       `judge.requests_per_minute`
├── JudgeRefusalError (ValueError)  the judge never accepts this request: set the group aside
│   └── JudgeTooLongError           it is longer than the judge's context
├── JudgeReplyError (ValueError)    invalid scores: retry once with the error, then set aside
└── CalibrationFileError (ValueError)  a file of known scores is malformed: the message says where
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class IngestError(Exception):
    """Base of every error ingest raises on purpose."""


class BusError(IngestError, OSError):
    """The bus cannot be read or written; nothing is lost, try again later."""


class UnreadableExchangesError(IngestError, ValueError):
    """Rows of stored exchanges are damaged; the others of the same query can be read."""

    def __init__(self, damage: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"exchange {seq}: {why}" for seq, why in damage.items()))
        self.damage = damage
        """`seq` of the exchange -> its damage."""


class NoTokenizerError(IngestError, LookupError):
    """The base model's tokenizer cannot be found or read: ids cannot be checked against texts."""


class SamplingError(IngestError, ConnectionError):
    """vLLM did not give a usable candidate."""


class EngineDownError(SamplingError):
    """vLLM refuses connections or answers that it is unavailable."""


class EngineBusyError(SamplingError):
    """vLLM, or a gateway before it, takes no request for now (429)."""

    def __init__(self, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.headers = headers or {}
        """Headers of the reply: `retry-after` may say how long."""


class NoRoomError(SamplingError):
    """No vLLM has capacity to spare: users come first."""


class AdapterGoneError(SamplingError):
    """vLLM serves no model or adapter of this name (404)."""


class RequestRefusedError(SamplingError):
    """vLLM refuses the request itself (400, 413, 422); a retry will not help."""


AWAY = (EngineDownError, EngineBusyError, NoRoomError, AdapterGoneError)
"""What concerns vLLM and no answer: it passes, also a lost adapter that control loads again."""


class JudgeUnavailableError(IngestError, ConnectionError):
    """The judge gave no usable answer (down, timeout). Each subclass is one kind of failure.

    The error alone does not tell the cause: a working judge may fail on one request, and a wrongly
    configured judge refuses every request as if the request were at fault.
    """

    reason: ClassVar[str] = "judge_unavailable"
    """Reason to set aside a group that fails like this while the judge works for others."""

    def __init__(self, message: str, *, maybe_paid: bool = False) -> None:
        super().__init__(message)
        self.maybe_paid = maybe_paid
        """The provider may have answered, and charged for it, but nobody here knows."""


class JudgeBusyError(JudgeUnavailableError):
    """The judge's provider limits requests or tokens (429, 529, or `Retry-After`)."""

    reason = "judge_busy"

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class JudgeRejectedError(JudgeUnavailableError):
    """The judge refuses the request (4xx): too large, filtered; or a wrong key or model."""

    reason = "judge_rejected"


class JudgeNoCreditError(JudgeRejectedError):
    """The provider's account has no credit left (402, or 429 with `insufficient_quota`). Other than
    a rate limit, it does not pass by itself."""

    reason = "judge_no_credit"


class JudgeGarbledError(JudgeUnavailableError):
    """The judge's reply is no chat completion: an HTML page, a null message, half a body."""

    reason = "judge_garbled"


class JudgeWithheldError(JudgeUnavailableError):
    """The judge is not asked, by a limit of the operator: no outage, and no failure of a group."""

    reason = "judge_withheld"

    def __init__(self, message: str, *, until: float) -> None:
        super().__init__(message)
        self.until = until
        """When it may be asked again, in Unix seconds."""


class JudgeSpentError(JudgeWithheldError):
    """A budget of the judge is spent."""

    reason = "judge_spent"


class JudgeLimitedError(JudgeWithheldError):
    """More calls or tokens a minute than the settings allow."""

    reason = "judge_limited"


class JudgeRefusalError(IngestError, ValueError):
    """The judge refuses this request (too long, content policy); others may pass."""


class JudgeTooLongError(JudgeRefusalError):
    """The prompt is longer than the judge's context, also without the oldest shared messages."""

    def __init__(self, message: str, *, asked: bool = False) -> None:
        super().__init__(message)
        self.asked = asked
        """True when the judge said so; False when its known context was enough to tell."""


class JudgeReplyError(IngestError, ValueError):
    """The judge answered, but not with one valid score for each candidate.

    The message names the defect alone, because it is stored and shown to the judge. A traceback
    shows the beginning of the reply below it.
    """

    def __init__(self, message: str, *, reply: str = "") -> None:
        """reply: the beginning of what the judge wrote, without secrets."""
        super().__init__(message)
        self.reply = reply
        if reply:
            self.add_note(f"the judge wrote: {reply}")


class CalibrationFileError(IngestError, ValueError):
    """A line is no group with a known order; the message names the line, the field, the remedy."""
