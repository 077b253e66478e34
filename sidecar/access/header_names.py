"""Headers that say who sends a request. In lower case, as the relay compares names."""

from __future__ import annotations

from typing import Final

AUTHORIZATION: Final = b"authorization"
X_API_KEY: Final = b"x-api-key"
"""Where Anthropic's SDK puts the key."""
HOST: Final = b"host"
ORIGIN: Final = b"origin"
"""The web page that has its browser send the request; other clients do not send it."""
OWN_PROJECT: Final = b"x-sidecar-project"
OWN_KEY_ID: Final = b"x-sidecar-key-id"
"""Written by the relay alone, for the sidecar's own application: what a client sends under a name
that begins with `x-sidecar-` is never passed on."""
OWN_USER: Final = b"x-sidecar-user"
"""Sent by clients; the relay passes its value on to the application."""
