"""Errors of ingest. One base; one class per thing a caller can do about it.

IngestError
├── BusError (OSError)              the bus cannot be read or written: try again later
├── UnreadableExchangesError (ValueError)  stored exchanges hold no exchange: put them aside
├── NoTokenizerError (LookupError)  the base model's tokenizer is not on this machine
├── SamplingError (ConnectionError) vLLM gave no usable candidate: try the group again later
│   ├── EngineDownError             vLLM cannot be reached: wait, it is nobody's fault but its own
│   ├── AdapterGoneError            vLLM does not know the adapter: trying again will not help
│   └── RequestRefusedError         vLLM refuses the request itself (400)
├── JudgeUnavailableError (ConnectionError)  no usable answer: try again later
│   ├── JudgeBusyError              a limit of requests or tokens: wait as long as it says
│   ├── JudgeRejectedError          4xx: this request's fault or the settings'; ask the probe
│   └── JudgeGarbledError           the reply is no chat completion: the same
├── JudgeRefusalError (ValueError)  it will never take this request: set the group aside
└── JudgeReplyError (ValueError)    rubbish: retry once with the error, then set aside
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
        """seq -> what is wrong."""


class NoTokenizerError(IngestError, LookupError):
    """The base model's tokenizer cannot be found or read: ids cannot be checked against texts."""


class SamplingError(IngestError, ConnectionError):
    """vLLM did not give a usable candidate."""


class EngineDownError(SamplingError):
    """vLLM refuses connections or says that it is unavailable."""


class AdapterGoneError(SamplingError):
    """vLLM serves no model or adapter of this name (404)."""


class RequestRefusedError(SamplingError):
    """vLLM refuses the request itself, whoever asks and whenever (400)."""


class JudgeUnavailableError(IngestError, ConnectionError):
    """The judge gave no usable answer (down, time limit). Each subclass says what it looks like.

    The error alone does not tell whose fault it is: a judge that works for others fails for one
    request, and a judge that is set up wrongly refuses each request as if it were at fault.
    """

    reason: ClassVar[str] = "judge_unavailable"
    """Why a group is set aside that fails so while the judge works for others."""


class JudgeBusyError(JudgeUnavailableError):
    """The judge's provider limits requests or tokens (429, 529, or `Retry-After`)."""

    reason = "judge_busy"

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class JudgeRejectedError(JudgeUnavailableError):
    """The judge refuses the request (4xx): too large, filtered; or a wrong key or model."""

    reason = "judge_rejected"


class JudgeGarbledError(JudgeUnavailableError):
    """The judge's reply is no chat completion: a page, a message of null, half a body."""

    reason = "judge_garbled"


class JudgeRefusalError(IngestError, ValueError):
    """The judge refuses this very request (too long for it, content policy); others may pass."""


class JudgeReplyError(IngestError, ValueError):
    """The judge answered, but not with one valid score for each candidate."""
