"""Which sessions are never trained on, so that they can tell whether training helped. Pure."""

from __future__ import annotations

import hashlib


def is_held_out(session_key: str, rate: float) -> bool:
    """Decide by hash of the session's key: the same for all its turns, everywhere, for ever.

    rate: share of sessions held out, 0..1. Raising it only adds sessions.
    """
    return share_of(f"held_out\x00{session_key}") < rate


def share_of(text: str) -> float:
    """A number in 0..1 that is the text's own, evenly spread over texts."""
    return (
        int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        / 2**64
    )
