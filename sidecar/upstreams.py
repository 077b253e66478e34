"""The base URLs of vLLM: those that the settings name, and the addresses of DNS names.

`dns+http://NAME:PORT` stands for every address of NAME, such as the ready pods of a headless
Service. Plain HTTP alone: no certificate names a pod's address.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import SplitResult, urlsplit

DNS: Final = "dns+http"
LOOKUP_S: Final = 5.0
"""Seconds between two look-ups: the TTL that CoreDNS gives the names of a cluster."""
MISSES: Final = 3
"""Look-ups in a row without an address until it is dropped: a server may answer with a part."""


def addresses_of(host: str, port: int) -> Sequence[str]:
    """Look a name up. Returns: its IPv4 addresses, else its IPv6 ones; empty: it has none now."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    first = socket.AF_INET if any(one[0] == socket.AF_INET for one in found) else socket.AF_INET6
    return sorted({str(address[0]) for family, *_, address in found if family == first})


class Upstreams:
    """What one list of base URLs in the settings stands for. For one thread at a time.

    Names are looked up in a thread of their own, which a process that ends does not wait for: a
    DNS server may take half a minute to answer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        look_up: Callable[[str, int], Sequence[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """look_up: the addresses of a name for a port; None: `addresses_of`."""
        self._urls = tuple(urls)
        self._look_up = look_up or addresses_of
        self._clock = clock
        self._looked_up_at = -LOOKUP_S
        self._thread: threading.Thread | None = None
        self._misses: dict[str, dict[str, int]] = {}
        """Entry of the settings -> address -> look-ups in a row that did not name it."""
        self.follows_dns = any(urlsplit(url).scheme == DNS for url in urls)

    def now(self) -> Sequence[str]:
        """Return the base URLs without a slash at the end, as the last look-up found them. Every
        `LOOKUP_S` it begins another one; it waits for the first one alone, and as long at most.

        A name that has no address keeps its last ones: a DNS server that is away takes no vLLM
        away. One that never had any stands for itself, so that there is something to ask.
        """
        due = self._clock() - self._looked_up_at >= LOOKUP_S
        if self.follows_dns and due and not (self._thread and self._thread.is_alive()):
            self._looked_up_at, first = self._clock(), self._thread is None
            self._thread = threading.Thread(target=self._look_all_up, daemon=True)
            with suppress(RuntimeError):  # no thread can be started now: the next call tries
                self._thread.start()
                if first:
                    self._thread.join(LOOKUP_S)
        return tuple(dict.fromkeys(one for url in self._urls for one in self._of(url)))

    def _look_all_up(self) -> None:
        for url in self._urls:
            if (parts := urlsplit(url)).scheme == DNS:
                self._follow(url, self._look_up(parts.hostname or "", parts.port or 80))

    def _follow(self, url: str, named: Sequence[str]) -> None:
        if not named:
            return
        known = self._misses.get(url, {})
        missed = {address: known[address] + 1 for address in known if address not in named}
        kept = {address: count for address, count in missed.items() if count < MISSES}
        self._misses[url] = dict.fromkeys(named, 0) | kept

    def _of(self, url: str) -> Sequence[str]:
        parts = urlsplit(url)
        if parts.scheme != DNS:
            return (url.rstrip("/"),)
        addresses = sorted(self._misses.get(url, ())) or [parts.hostname or ""]
        return tuple(_at(parts, address) for address in addresses)


def _at(parts: SplitResult, address: str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{parts.port or 80}{parts.path.rstrip('/')}"
