"""Choose held-out sessions: never trained on, so they can show whether training helped. Pure."""

from __future__ import annotations

import hashlib


def is_held_out(session_id: str, rate: float) -> bool:
    """Return True for a held-out session, decided by a hash of its id.

    All turns of a session, in every process and at any time, get the same result.
    rate: share of sessions held out, 0..1. A higher rate only adds sessions.
    """
    return share_of(f"held_out\x00{session_id}") < rate


def share_of(text: str) -> float:
    """Hash a text to a number in 0..1, evenly distributed over texts."""
    return (
        int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        / 2**64
    )
