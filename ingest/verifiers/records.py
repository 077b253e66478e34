"""What a verifier sees and what it finds, and what comes of it for a group.

`Case`, `Finding` and `Verifier` are for packages of others, which declare an entry point in the
group `learning_sidecar.verifiers` (docs/verifiers.md).
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.records import Answer
from ingest.store.groups import SAMPLED
from ingest.store.listing import MAX_WHY
from sidecar.replies.parts import answer_text
from sidecar.store.database import get_flag, set_flag
from sidecar.store.models import GroupRow

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
    """Return the finding of a right answer."""
    return Finding(score=1.0, why=why)


def wrong(why: str) -> Finding:
    """Return the finding of a wrong answer."""
    return Finding(score=0.0, why=why)


def does_not_apply(why: str) -> Finding:
    """Return the finding of a verifier that has nothing to check."""
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


# What the scoring process last saw of each verifier: a row of the `flag` table.

FLAG = "verifiers"
WRITE_AGAIN_S = 60.0
"""The time of the last finding is written this often, and a change at once."""
MOST_WAITING = 1_000
"""Waiting groups that are looked at; by default 256 may wait (`groups.max_pending_groups`)."""
QUIET = frozenset({"error", "bad_finding"})
"""Failures whose words may quote the answer: only the reason is kept."""

log = structlog.get_logger()


class VerifierSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One verifier, as the scoring process last saw it."""

    name: str
    kind: str
    fails: bool = False
    """The last attempt gave no finding of any answer."""
    good_at: float | None = None
    """When it was last loaded or found something, in Unix seconds."""
    error_at: float | None = None
    error: str = ""
    """Its last failure, also one over a single answer."""

    def works(self, now: float) -> VerifierSeen:
        return msgspec.structs.replace(self, fails=False, good_at=now)

    def failed(self, now: float, failure: Failure, *, whole: bool) -> VerifierSeen:
        """Note a failure. whole: no other answer got a finding, so it may not work at all."""
        fails = self.fails or (whole and failure.reason not in OF_THE_GROUP)
        return msgspec.structs.replace(
            self, fails=fails, error_at=now, error=said_of(failure)[:MAX_WHY]
        )

    def is_news(self, told: VerifierSeen | None) -> bool:
        """Tell whether the store should know it now. told: what the store says."""
        if told is None or (told.fails, told.error) != (self.fails, self.error):
            return True
        times = ((self.good_at, told.good_at), (self.error_at, told.error_at))
        return any(new is not None and new - (old or 0.0) >= WRITE_AGAIN_S for new, old in times)


def said_of(failure: Failure) -> str:
    """Return a failure in words that quote no answer."""
    quiet = not failure.why or failure.reason in QUIET
    return failure.reason if quiet else f"{failure.reason}: {failure.why}"


def write_verifiers(session: Session, seen: Iterable[VerifierSeen], *, now: float) -> None:
    set_flag(session, FLAG, msgspec.json.encode(list(seen)).decode(), now=now)


def read_verifiers(session: Session) -> tuple[VerifierSeen, ...]:
    """Return what is known of the verifiers; empty when there are none, or the row is damaged."""
    text = get_flag(session, FLAG)
    try:
        return msgspec.json.decode(text, type=tuple[VerifierSeen, ...]) if text else ()
    except msgspec.MsgspecError:
        log.warning("verifiers_unreadable")
        return ()


def waiting_for(session: Session) -> Mapping[str, int]:
    """Count the groups that wait for each verifier (`on_error = "hold"`), up to `MOST_WAITING`."""
    details = session.scalars(_held(GroupRow.detail))
    return Counter(
        held.partition(":")[0] for detail in details for held in str(detail or "").split("; ")
    )


def held_groups(session: Session) -> int:
    """Count the groups that wait for some verifier, up to `MOST_WAITING`."""
    return session.scalar(select(func.count()).select_from(_held(GroupRow.seq).subquery())) or 0


def _held(column: Any) -> Any:  # Any: SQLAlchemy's types of a column and of a statement
    return (
        select(column)
        .where(
            GroupRow.status == SAMPLED,
            GroupRow.judge_failures.contains(f'"{UNVERIFIED}"'),
        )
        .limit(MOST_WAITING)
    )


# Findings that are kept in memory, so that an equal answer is not checked again.

Key = tuple[str, str, str, str]
"""Name, version and digest of the verifier, digest of what it saw."""


def content_digest(request: bytes, answer: Answer, project: str) -> str:
    """Hash all that a verifier sees of an answer: SHA-256 hex."""
    digest = hashlib.sha256()
    finish = answer.finish_reason or ""
    for part in (request, answer.message, finish.encode("utf-8", "replace"), project.encode()):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    digest.update(len(answer.token_ids).to_bytes(8, "big"))
    return digest.hexdigest()


class FindingCache:
    """The findings used last. It holds no failures: those may pass."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Key, Finding] = OrderedDict()

    def get(self, key: Key) -> Finding | None:
        """Return a finding; None when it is not kept."""
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        return found

    def put(self, key: Key, finding: Finding) -> None:
        """Keep a finding, in place of the one that was not used for the longest time."""
        self._found[key] = finding
        self._found.move_to_end(key)
        while len(self._found) > self._most:
            self._found.popitem(last=False)
