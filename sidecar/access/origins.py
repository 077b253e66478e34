"""Recognise web pages of other sites, where no key says who asks. Pure.

A browser sends what any page wants to any port of its machine, and names the page in `Origin`. So
the proxy in mode `open` and the admin listener without tokens take a page's request only when the
page came from the listener itself: its `Origin` is the `Host`, and `Host` is a name of the loopback
where the listener is (a page may have the name of its own site lead to 127.0.0.1: DNS rebinding).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from sidecar.settings.addresses import is_loopback

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]{1,5})?")


def host_name(host: str) -> str | None:
    """Return the host of a `Host` header without its port; None when it is malformed."""
    match = _HOST.fullmatch(host)
    return None if match is None else match[1].strip("[]").lower()


def is_other_site(origin: str | None, host: str | None) -> bool:
    """True if a page of another site asks. origin: None: no page asks. Raises: ValueError when it
    is no URL."""
    return origin is not None and urlsplit(origin).netloc != host


def is_foreign_page(origin: bytes | None, host: bytes | None, *, local: bool) -> bool:
    """True if a web page asks that is not of this listener. local: it is on the loopback."""
    if origin is None:
        return False
    try:
        name = (host or b"").decode("ascii")
        if is_other_site(origin.decode("ascii"), name):
            return True
    except ValueError:
        return True
    return local and not is_loopback(host_name(name) or "")
