"""Keep requests to this machine away from the environment's proxy (`HTTP_PROXY`).

Our own clients do not read the environment. Libraries that do (LiteLLM, OpenTelemetry) have
`NO_PROXY` in common, so the loopback hosts are added to it before such a library asks one.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from urllib.parse import urlsplit

from sidecar.settings.addresses import is_loopback

ALWAYS = ("localhost", "127.0.0.1", "::1")
_NAMES = ("no_proxy", "NO_PROXY")
"""The first that is set is the one that clients read."""


def ask_loopback_directly(environ: MutableMapping[str, str], *urls: str) -> None:
    """Add the usual loopback hosts and those of the URLs to `NO_PROXY`. Changes `environ`.

    The user's own entries stay; `*`, which is every host, stays alone.
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
