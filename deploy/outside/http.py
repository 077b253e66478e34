"""Short calls to services that an operator named: bounded in time and size, never redirected.

A redirect is refused and not followed: the token and what was asked go to the named service alone.
No message quotes a URL, which may hold a password.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import httpx

from deploy.errors import DeployError

MAX_REPLY_BYTES = 256 * 2**10
KEEPALIVE_S = 30.0
AT_ONCE = 40
"""Connections to all services together: 16 hooks, 16 metrics and the approval service, each asked
for one thing at a time, so that those that hang keep no other one waiting."""


class OutsideError(DeployError, ConnectionError):
    """A service outside gave no usable answer; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a service answered."""

    status: int
    body: bytes


class Poster(Protocol):
    """Posts to a service."""

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        timeout_s: float,
        token: str = "",
        headers: Mapping[str, str] = {},
    ) -> Reply:
        """Post JSON. Raises: OutsideError."""
        ...


class Caller:
    """Calls services outside; a `Poster`."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """transport: None opens real connections."""
        self._client = httpx.AsyncClient(
            transport=transport,
            timeout=None,  # the whole exchange has a limit of its own
            follow_redirects=False,
            limits=httpx.Limits(max_connections=AT_ONCE, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,  # a web proxy, or a password of .netrc, is for others
        )

    async def get(
        self, url: str, *, timeout_s: float, token: str = "", params: Mapping[str, str] = {}
    ) -> Reply:
        """Get a document. Raises: OutsideError."""
        return await self._call("GET", url, timeout_s, token, {}, dict(params), b"")

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        timeout_s: float,
        token: str = "",
        headers: Mapping[str, str] = {},
    ) -> Reply:
        """Post JSON. Raises: OutsideError."""
        sent = {"content-type": "application/json", **headers}
        return await self._call("POST", url, timeout_s, token, sent, None, body)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(
        self,
        method: str,
        url: str,
        timeout_s: float,
        token: str,
        headers: Mapping[str, str],
        params: dict[str, str] | None,
        body: bytes,
    ) -> Reply:
        # Not packed, so that the limit is one of what is unpacked too.
        sent = {"accept-encoding": "identity", **headers}
        if token:
            sent["authorization"] = f"Bearer {token}"
        try:
            async with asyncio.timeout(timeout_s):
                asked = self._client.stream(
                    method, url, headers=sent, params=params or None, content=body or None
                )
                async with asked as reply:
                    return await _read(reply)
        except TimeoutError as error:
            raise OutsideError(
                f"no whole reply in {timeout_s:g} s; make it faster, or raise timeout_s"
            ) from error
        except httpx.RemoteProtocolError as error:  # it answers, so it can be reached
            raise OutsideError(
                f"its reply cannot be read as HTTP ({str(error)[:200] or type(error).__name__}); "
                "look at the service: a head of over 100 kB, or a connection that it broke off"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise OutsideError(
                f"it cannot be reached ({type(error).__name__}); check the URL, and that it runs"
            ) from None


async def _read(reply: httpx.Response) -> Reply:
    if reply.is_redirect:
        raise OutsideError("it redirects, which is not followed; give the URL that it leads to")
    if reply.headers.get("content-encoding", "identity") != "identity":
        raise OutsideError("the reply is packed, and was not to be; let it honour accept-encoding")
    said = bytearray()
    async for part in reply.aiter_bytes():
        said += part
        if len(said) > MAX_REPLY_BYTES:
            raise OutsideError(f"the reply is over {MAX_REPLY_BYTES} bytes; ask for less")
    return Reply(status=reply.status_code, body=bytes(said))


def secret_of(name: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the value of an environment variable that holds a secret; empty for no name.

    Raises: OutsideError when it is not set.
    """
    if not name:
        return ""
    value = (os.environ if environment is None else environment).get(name, "").strip()
    if not value:
        raise OutsideError(
            f"environment variable {name} is not set here; set it to the secret for the process "
            "that sends this, control or a command"
        )
    return value
