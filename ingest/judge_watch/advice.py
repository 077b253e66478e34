"""What an operator has to do when the judge gives no scores, in one sentence for each reason. Pure.

Terminal, log, `sidecar status`, the page, `sidecar doctor` and `sidecar config check --online` say
the same. None holds a semicolon, at which findings are parted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRejectedError,
    JudgeUnavailableError,
)

ALL_FAIL: Final = "the judge answers a simple sum but fails on every group"
_ADVICE: Final[Mapping[str, str]] = {
    JudgeUnavailableError.reason: "start the judge, correct {0}.api_base, or raise "
    "{0}.timeout_s where it is slow",
    JudgeBusyError.reason: "wait for the end of the limit, and if it comes back, lower "
    "judge.concurrency, set {0}.requests_per_minute or {0}.tokens_per_minute to the limit, or get "
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
