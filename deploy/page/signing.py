"""Cookies of the page: values that only this process can have made. Pure.

A session holds no token, and no digest of one that could be guessed at: it names the token by a
keyed digest. The key is made at the start of control, so a restart, which is also how a token is
taken out of the settings, logs everybody out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass

KEY_BYTES = 32
NAME_BYTES = 16
"""Random bytes that name a session."""
SESSION_S = 12 * 3600.0
"""A session ends so long after its login, used or not."""
MOST_BYTES = 1_024
"""No cookie of this page is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    name: str
    """Random; the form tokens are made of it."""
    who: str
    """`reference` of the token that logged in; empty: nobody has."""
    ends_at: float


def reference(key: bytes, token_digest: str) -> str:
    """Name a token in a session without telling its digest."""
    return _mac(key, "who", token_digest)[:32]


def seal(key: bytes, session: Session) -> str:
    """Write a session as the value of a cookie."""
    body = json.dumps([session.name, session.who, session.ends_at]).encode()
    text = base64.urlsafe_b64encode(body).decode().rstrip("=")
    return f"{text}.{_mac(key, 'session', text)}"


def unseal(key: bytes, value: str, now: float) -> Session | None:
    """Read the value of a cookie; None when it was not made with this key, or has ended."""
    text, _, mac = value.partition(".")
    if len(value) > MOST_BYTES or not hmac.compare_digest(_mac(key, "session", text), _ascii(mac)):
        return None
    try:
        name, who, ends_at = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (binascii.Error, ValueError):
        return None
    return Session(name=name, who=who, ends_at=ends_at) if ends_at > now else None


def form_token(key: bytes, session: Session) -> str:
    """Return what every form of this session carries: another site cannot know it."""
    return _mac(key, "form", session.name)


def is_form_token(key: bytes, session: Session, given: str) -> bool:
    return hmac.compare_digest(form_token(key, session), _ascii(given))


def _ascii(text: str) -> str:
    """`compare_digest` refuses other characters, and no digest has them."""
    return text if text.isascii() else ""


def _mac(key: bytes, purpose: str, text: str) -> str:
    message = f"{purpose}\0{text}".encode("utf-8", "surrogatepass")
    return hmac.new(key, message, hashlib.sha256).hexdigest()
