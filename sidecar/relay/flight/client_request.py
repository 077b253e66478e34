"""One request as the client sent it."""

from __future__ import annotations

from sidecar.access.admission import Credentials, Keep
from sidecar.relay.http1.heads import RequestHeaders
from sidecar.relay.surface.paths import Destination, destination
from sidecar.relay.surface.surfaces import SurfaceRule
from sidecar.relay.upstream.replicas import Replica


class SentHead:
    """A head to send to one replica, up to the value of Content-Length; made of one client head."""

    __slots__ = ("_encoding", "_instead", "_replica", "up_to_length")

    def __init__(
        self, replica: Replica, instead: bytes | Keep | None, encoding: bool, up_to_length: bytes
    ) -> None:
        """instead: replaces the caller's credentials. encoding: the reply may be compressed."""
        self._replica = replica
        self._instead = instead
        self._encoding = encoding
        self.up_to_length = up_to_length

    def serves(self, replica: Replica, instead: bytes | Keep | None, encoding: bool) -> bool:
        """True if this head was made for these."""
        return replica is self._replica and instead is self._instead and encoding is self._encoding


class RequestHead:
    """Everything before the body. Immutable once complete, and shared by all requests of one
    connection whose heads have the same bytes. What follows from the head alone is cached here."""

    __slots__ = (
        "_credentials",
        "head_only",
        "headers",
        "http_1_1",
        "keep_alive",
        "method",
        "sent",
        "target",
        "where",
    )

    def __init__(
        self,
        method: bytes,
        target: bytes,
        headers: RequestHeaders,
        http_1_1: bool,
        keep_alive: bool,
    ) -> None:
        """keep_alive: the client wants to keep the connection open."""
        self.method = method
        self.target = target
        self.headers = headers
        self.http_1_1 = http_1_1
        self.keep_alive = keep_alive
        self.head_only = method == b"HEAD"
        """The reply has no body, even if its head has a Content-Length."""
        self.where: Destination | SurfaceRule = destination(method, target)
        self._credentials: Credentials | None = None
        self.sent: SentHead | None = None
        """The head that was last sent to a replica for this one."""

    @property
    def credentials(self) -> Credentials:
        """The credentials that the client sent."""
        found = self._credentials
        if found is None:
            found = self._credentials = Credentials(self.headers.aside)
        return found


class ClientRequest:
    """Immutable once complete. (A plain class, because one is made for every request.)"""

    __slots__ = ("body", "head")

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.body = body
