"""One request as it was read from a client."""

from __future__ import annotations

from sidecar.access.admission import Credentials, Keep
from sidecar.relay.http1.heads import RequestHeaders
from sidecar.relay.surface.paths import Destination, destination
from sidecar.relay.surface.surfaces import SurfaceRule
from sidecar.relay.upstream.replicas import Replica


class SentHead:
    """The head that goes to one replica, for a head that came, up to the length of the body."""

    __slots__ = ("_encoding", "_instead", "_replica", "up_to_length")

    def __init__(
        self, replica: Replica, instead: bytes | Keep | None, encoding: bool, up_to_length: bytes
    ) -> None:
        """instead: of the caller's credentials. encoding: the reply may be compressed."""
        self._replica = replica
        self._instead = instead
        self._encoding = encoding
        self.up_to_length = up_to_length

    def serves(self, replica: Replica, instead: bytes | Keep | None, encoding: bool) -> bool:
        """Whether it is the one for these."""
        return replica is self._replica and instead is self._instead and encoding is self._encoding


class RequestHead:
    """Everything before the body. Not changed once it is complete, and shared by all requests of a
    connection that begin with the same bytes: what follows from a head alone is kept with it."""

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
        """keep_alive: the client wants to go on with this connection."""
        self.method = method
        self.target = target
        self.headers = headers
        self.http_1_1 = http_1_1
        self.keep_alive = keep_alive
        self.head_only = method == b"HEAD"
        """The reply has no body, whatever its head says."""
        self.where: Destination | SurfaceRule = destination(method, target)
        self._credentials: Credentials | None = None
        self.sent: SentHead | None = None
        """What was sent on for it last."""

    @property
    def credentials(self) -> Credentials:
        """What the client shows of itself."""
        found = self._credentials
        if found is None:
            found = self._credentials = Credentials(self.headers.aside)
        return found


class ClientRequest:
    """Not changed once it is complete. (A plain class: one is made for every request.)"""

    __slots__ = ("body", "head")

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.body = body
