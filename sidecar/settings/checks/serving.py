"""Check the sections of addresses: where vLLM answers and where the sidecar listens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sidecar.settings.addresses import (
    addresses,
    is_every_address,
    is_loopback,
    share_an_address,
)
from sidecar.settings.checks.problem import Problem

if TYPE_CHECKING:
    from sidecar.settings.sections import Settings


def upstreams(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the addresses of vLLM."""
    if not settings.serving.upstreams:
        yield ("serving", "upstreams"), "is empty; name at least one vLLM"
    lists = (
        (("serving", "upstreams"), settings.serving.upstreams),
        (("groups", "sampling_upstreams"), settings.groups.sampling_upstreams),
    )
    proxy, admin = settings.proxy, settings.admin
    own = {"proxy": (proxy.host, proxy.port), "admin": (admin.host, admin.port)}
    for key, upstreams in lists:
        if len({url.rstrip("/").lower() for url in upstreams}) < len(upstreams):
            yield key, "names one vLLM twice; name each once"
        for name, (host, port) in own.items():
            if any(_same_place(url, host, port) for url in upstreams):
                yield (
                    key,
                    f"names the sidecar's own {name}.host and {name}.port, so requests would go "
                    "round in a circle; name vLLM's address",
                )


def _same_place(url: str, host: str, port: int) -> bool:
    parts = urlsplit(url)
    theirs = parts.hostname or ""
    same_host = theirs == host.lower() or not addresses(theirs).isdisjoint(addresses(host))
    both_here = all(is_loopback(one) or is_every_address(one) for one in (theirs, host))
    their_port = parts.port or (443 if parts.scheme == "https" else 80)
    return their_port == port and (same_host or both_here)


def engine(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the command that starts vLLM."""
    command = settings.engine.command
    if command and not command[0].strip():
        yield ("engine", "command"), "begins with an empty word; name the program first"
    if wrong := [name for name in settings.engine.env if not name or "=" in name]:
        yield ("engine", "env"), f"{wrong[0]!r} is no name of a variable; leave out the `=`"


def listeners(settings: Settings) -> Iterator[Problem]:
    """Yield listeners that share a port."""
    proxy, admin = settings.proxy, settings.admin
    if proxy.port and proxy.port == admin.port and share_an_address(proxy.host, admin.host):
        yield (
            ("admin", "port"),
            f"is {admin.port}, as proxy.port; the two listen apart, so give each its own",
        )


def useless_sampling_settings(settings: Settings) -> Iterator[Problem]:
    """Yield defaults of sampling with which the answers that users get are not learned from."""
    serving = settings.serving
    temperature = (serving.sampling_defaults or {}).get("temperature")
    if temperature is None:
        return
    key = ("serving", "sampling_defaults")
    if temperature == 0:
        yield (
            key,
            "has temperature = 0: an answer whose request names none is greedy and is not learned "
            "from (`temperature_zero`); have agents ask at a temperature above 0, best 1",
        )
    elif temperature != 1 and serving.logprobs_mode == "raw_logprobs":
        yield (
            key,
            f'has temperature = {temperature:g} and serving.logprobs_mode is "raw_logprobs", '
            "with which only answers at temperature 1 are exact; start vLLM with --logprobs-mode "
            "processed_logprobs",
        )
