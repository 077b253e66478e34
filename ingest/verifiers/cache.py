"""Findings that are kept in memory, so that an equal answer is not checked again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from ingest.records import Answer
from ingest.verifiers.records import Finding

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
