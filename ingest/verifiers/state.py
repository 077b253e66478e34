"""What the scoring process last saw of each verifier: a condition each.

Several scoring processes share them, and the last one to write it is believed: they have the
same verifiers. Which groups wait for a verifier, the groups themselves say.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.records import Answer
from ingest.store.groups import SAMPLED
from ingest.verifiers.records import OF_THE_GROUP, UNVERIFIED, Failure, Finding
from sidecar import conditions
from sidecar.store.models import GroupRow

KIND = "verifier "
"""How the kind of the condition begins; the verifier's name follows."""
WRITE_AGAIN_S = 60.0
"""The time of the last finding is written this often, and a change at once."""
MOST_WAITING = 1_000
"""Waiting groups that are looked at; by default 256 may wait (`learner.max_groups`)."""
QUIET = frozenset({"error", "bad_finding"})
"""Failures whose words may quote the answer: only the reason is kept."""


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
        error = failure_words(failure)[: conditions.MOST_CHARACTERS]
        return msgspec.structs.replace(self, fails=fails, error_at=now, error=error)

    def is_news(self, told: VerifierSeen | None) -> bool:
        """Tell whether the store should know it now. told: what the store says."""
        if told is None or (told.fails, told.error) != (self.fails, self.error):
            return True
        times = ((self.good_at, told.good_at), (self.error_at, told.error_at))
        return any(new is not None and new - (old or 0.0) >= WRITE_AGAIN_S for new, old in times)


def failure_words(failure: Failure) -> str:
    """Return a failure in words that quote no answer."""
    quiet = not failure.why or failure.reason in QUIET
    return failure.reason if quiet else f"{failure.reason}: {failure.why}"


def write_verifiers(session: Session, seen: Iterable[VerifierSeen], *, now: float) -> None:
    """Write a condition for each verifier, and remove those of others."""
    written = set()
    for one in seen:
        told = f": {one.error}" if one.error else ""
        found = conditions.Condition(
            kind=KIND + one.name,
            state="act" if one.fails else "ok",
            code="verifier_fails" if one.fails else "verifier_works",
            message=f"the verifier {one.name} fails{told}"
            if one.fails
            else f"the verifier {one.name} works"
            + (f", but for its last error{told}" if told else ""),
            to_do="start the service or install the package, or take the verifier out of [reward]; "
            "`sidecar config check --online` tries each once"
            if one.fails
            else "",
            data=msgspec.to_builtins(one),
        )
        conditions.write(session, found, now=now)
        written.add(found.kind)
    for known in conditions.read_all(session):
        if known.kind.startswith(KIND) and known.kind not in written:
            conditions.clear(session, known.kind)


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
