"""Ask a URL for its status: how a start finds out whether a server answers yet."""

from __future__ import annotations

from functools import cache

import httpx


def status_of(url: str) -> int | None:
    """Return the status that a GET of the URL is answered with; None when nothing answers."""
    try:
        return _client().get(url).status_code
    except httpx.HTTPError:
        return None


@cache
def _client() -> httpx.Client:
    """One client for all polls: making one reads the root certificates, 60 ms of CPU."""
    # HTTP_PROXY is for the web, not for this machine or its vLLM.
    no_reuse = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=2.0, trust_env=False, limits=no_reuse)
