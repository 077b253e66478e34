"""Record what a relay parser feeds to llhttp."""

from __future__ import annotations

from typing import Any


class WatchedParser:
    """Replaces the llhttp parser inside a `RequestParser` or `ReplyParser`, and calls it."""

    def __init__(self, parser: Any) -> None:
        self.fed: list[bytes] = []
        self._inner: Any = parser._parser
        parser._parser = self

    def feed_data(self, data: bytes) -> None:
        self.fed.append(data)
        self._inner.feed_data(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
