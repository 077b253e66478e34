"""Sign a web hook by the Standard Webhooks specification: HMAC-SHA256 over id, time and body. Pure.

Source: https://github.com/standard-webhooks/standard-webhooks, version 1.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

PREFIX = "whsec_"
"""Marks a secret that is written in base64."""


def key_of(secret: str) -> bytes:
    """Return the key that a secret stands for: `whsec_` and base64, or any text.

    Raises: ValueError when the base64 is none, or nothing is left.
    """
    if not secret.startswith(PREFIX):
        if not secret:
            raise ValueError("the secret is empty")
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("the secret has no base64 behind whsec_") from error
    if not key:
        raise ValueError("the secret is empty")
    return key


def signed_headers(key: bytes, *, message_id: str, at: int, body: bytes) -> dict[str, str]:
    """Return the headers of one delivery. at: Unix seconds of the try, which a receiver checks."""
    told = b".".join((message_id.encode(), str(at).encode(), body))
    digest = hmac.new(key, told, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
