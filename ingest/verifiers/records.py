"""What a verifier sees and what it finds, and what comes of it for a group.

`Case`, `Finding` and `Verifier` are for packages of others, which declare an entry point in the
group `learning_sidecar.verifiers` (docs/verifiers.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sidecar.replies.parts import answer_text

ENTRY_POINTS = "learning_sidecar.verifiers"
"""Group of the entry points."""
WHY_CHARACTERS = 300
VERSION_CHARACTERS = 64

FailureReason = Literal[
    "timeout",
    "late",
    "error",
    "crashed",
    "bad_finding",
    "not_loaded",
    "unreachable",
    "refused",
    "not_redacted",
    "unreadable",
    "too_large",
]
"""Why a verifier found nothing: over its time limit; the group's verification took too long in all,
so that no answer is to blame; it raised; its process ended; it gave no score
in 0..1; its code cannot be loaded; no connection; a status other than 200; what it must not see is
not known; a body is no JSON object; there is more to check than `checkers` takes."""
OF_THE_ANSWER = frozenset({"timeout", "error", "crashed", "bad_finding"})
"""Reasons that an answer may bring about: with `on_error = "fail"` it gets 0."""
OF_THE_GROUP = frozenset({"unreadable", "not_redacted", "too_large"})
"""Reasons for which the group is to blame: they tell nothing of the verifier."""
UNVERIFIED = "verifier_failed"
"""Why a group waits, and is set aside in the end, for which a verifier gives no finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One answer with its request. It does not say which adapter answered."""

    request: Mapping[str, Any]
    """Body of the chat request: `messages`, `tools`, `response_format`, `metadata`, ..."""
    message: Mapping[str, Any]
    """The assistant message: `content`, `tool_calls`, `reasoning`."""
    finish_reason: str | None = None
    """As vLLM gave it: `stop`, `length`, `tool_calls`, ..."""
    tokens: int | None = None
    """Number of sampled tokens; None: not known."""
    project: str = "default"

    @property
    def content(self) -> str:
        """Words of the answer; empty when it has none. Its refusal and its transcript count."""
        return answer_text(self.message)

    @property
    def tool_calls(self) -> Sequence[Any]:
        """Calls of the answer, as they were parsed; Any: JSON."""
        calls = self.message.get("tool_calls")
        return calls if isinstance(calls, list) else ()

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tools of the request."""
        tools = self.request.get("tools")
        return [one for one in tools if isinstance(one, dict)] if isinstance(tools, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a verifier found of one answer."""

    score: float | None
    """0 (wrong) to 1 (right); None: the verifier does not apply to this request."""
    why: str = ""
    """The reason, for people; its first 300 characters are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A verifier found nothing of one answer."""

    reason: FailureReason
    why: str = ""


Result = Finding | Failure


class Verifier(Protocol):
    """A deterministic check: equal cases have equal findings, for the findings are kept."""

    version: str
    """Changes with what it finds; at most 64 characters."""

    def verify(self, case: Case) -> Finding | float | bool | None:
        """Check one answer. A number is a score, True is 1, False is 0, None: does not apply."""


def right(why: str = "") -> Finding:
    return Finding(score=1.0, why=why)


def wrong(why: str) -> Finding:
    return Finding(score=0.0, why=why)


def does_not_apply(why: str) -> Finding:
    return Finding(score=None, why=why)


def read_result(score: object, why: object = "") -> Result:
    """Check what a verifier gave. A score that is no number in 0..1 makes a `bad_finding`."""
    said = shown(why) if isinstance(why, str) else ""
    if isinstance(score, bool) or score is None:
        return Finding(score=None if score is None else float(score), why=said)
    if not isinstance(score, int | float):
        return Failure(reason="bad_finding", why=f"a score of type {type(score).__name__}")
    if not 0 <= score <= 1:  # also NaN; an integer may be too long for a float
        return Failure(reason="bad_finding", why="a score outside 0..1")
    return Finding(score=float(score), why=said)


def shown(text: str) -> str:
    """Return the beginning of a text as one line that every store and terminal takes."""
    line = "".join(char if char.isprintable() else " " for char in text[: 4 * WHY_CHARACTERS])
    return line.encode("utf-8", "replace").decode()[:WHY_CHARACTERS].strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What one verifier found of the answers of a group."""

    name: str
    version: str
    digest: str
    """SHA-256 (hex) of its kind and parameters."""
    weight: float
    gate: bool
    pass_at: float
    results: tuple[Result, ...]
    """[G] one for each answer."""
    scores: tuple[float, ...] = ()
    """[G] 0..1, as they count in the reward. Empty: it does not count in this group, because its
    answers would not all be measured alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What all verifiers found of a group."""

    checked: tuple[Checked, ...]
    held: str = ""
    """Why the group must wait and be verified again; empty: it need not."""

    @property
    def tells_apart(self) -> bool:
        """True when a verifier that counts scores two answers differently."""
        return any(len(set(one.scores)) > 1 for one in self.checked)


def check_words(check: Mapping[str, Any]) -> str:
    """Say what a verifier found of one answer: its name, the score or that it does not count, and
    why."""
    score = check.get("score")
    said = f"{score:.3f}" if isinstance(score, int | float) else "does not count"
    why = check.get("error") or check.get("why")
    return f"{check.get('name')}: {said}{f' ({why})' if why else ''}"
