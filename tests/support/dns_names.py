"""DNS names of the settings for tests, in place of `Upstreams`."""

from __future__ import annotations


class Names:
    """What the settings' DNS names stand for now."""

    follows_dns = True

    def __init__(self, *urls: str) -> None:
        self.urls = urls

    def now(self) -> tuple[str, ...]:
        return self.urls
