"""Send requests to this machine directly, not through the proxy of the environment (`HTTP_PROXY`).

The sidecar's own clients ignore the environment. Libraries that do not (LiteLLM, OpenTelemetry) all
read `NO_PROXY`, so the loopback hosts are added to it before they make a request.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from urllib.parse import urlsplit

from sidecar.settings.addresses import is_loopback

ALWAYS = ("localhost", "127.0.0.1", "::1")
_NAMES = ("no_proxy", "NO_PROXY")
"""Clients read the first of these that is set."""


def ask_loopback_directly(environ: MutableMapping[str, str], *urls: str) -> None:
    """Add the usual loopback hosts and those of the URLs to `NO_PROXY`. Changes `environ`.

    The user's entries are kept; `*`, which means every host, stays alone.
    """
    hosts = [urlsplit(url).hostname or "" for url in urls]
    wanted = [*ALWAYS, *(host for host in hosts if is_loopback(host))]
    said = next((environ[name] for name in _NAMES if environ.get(name)), "")
    entries = [entry for part in said.split(",") if (entry := part.strip())]
    if "*" in entries:
        return
    entries += [host for host in dict.fromkeys(wanted) if host not in entries]
    for name in _NAMES:
        environ[name] = ",".join(entries)
