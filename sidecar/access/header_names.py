"""Headers in which a client sends its API key. In lower case, as the relay compares names."""

from __future__ import annotations

from typing import Final

AUTHORIZATION: Final = b"authorization"
X_API_KEY: Final = b"x-api-key"
"""Where Anthropic's SDK puts the key."""
