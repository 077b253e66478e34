"""One request as it was read from a client."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.relay.heads import Header


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    method: bytes
    target: bytes
    headers: tuple[Header, ...]
    body: bytes
    http_1_1: bool
    keep_alive: bool
    """The client wants to go on with this connection."""
