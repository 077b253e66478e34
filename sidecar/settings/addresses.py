"""Decide which addresses a host in the settings stands for, in any notation."""

from __future__ import annotations

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LOCALHOST: frozenset[Address] = frozenset(
    {ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")}
)


def addresses(host: str) -> frozenset[Address]:
    """Return the addresses of a literal or of `localhost`; none for another name. Pure."""
    if host.lower().rstrip(".") == "localhost":
        return LOCALHOST
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return frozenset()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return frozenset({mapped or address})


def is_loopback(host: str) -> bool:
    """Return True for a host that only this machine can reach. Pure."""
    found = addresses(host)
    return bool(found) and all(address.is_loopback for address in found)


def is_every_address(host: str) -> bool:
    """Return True for the wildcard address of IPv4 or IPv6. Pure."""
    return any(address.is_unspecified for address in addresses(host))


def share_an_address(one: str, other: str) -> bool:
    """Return True if listeners at these two hosts would conflict on one port. May ask the
    resolver."""
    if one.lower() == other.lower() or is_every_address(one) or is_every_address(other):
        return True
    return not (addresses(one) or _resolved(one)).isdisjoint(addresses(other) or _resolved(other))


def _resolved(host: str) -> frozenset[Address]:
    """Return None for a name that cannot be resolved now; the listener reports that later."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset().union(*(addresses(str(entry[4][0])) for entry in found))
