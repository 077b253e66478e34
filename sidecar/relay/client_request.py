"""One request as it was read from a client."""

from __future__ import annotations

from sidecar.relay.heads import RequestHeaders


class ClientRequest:
    """Not changed once it is complete. (A plain class: one is made for every request.)"""

    __slots__ = ("body", "headers", "http_1_1", "keep_alive", "method", "target")

    def __init__(
        self,
        method: bytes,
        target: bytes,
        headers: RequestHeaders,
        body: bytes,
        http_1_1: bool,
        keep_alive: bool,
    ) -> None:
        """keep_alive: the client wants to go on with this connection."""
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.http_1_1 = http_1_1
        self.keep_alive = keep_alive
