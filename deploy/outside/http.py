"""Calls of services that an operator named: bounded, never redirected, each a task of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import httpx

from deploy.errors import DeployError
from sidecar.settings import Metric
from sidecar.settings.kinds import from_file

# Short calls to services that an operator named: bounded in time and size, never redirected.

CALL_TIMEOUT_S = 5.0
"""Longest time of a call of the approval service, or of one delivery to a hook."""
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

    Raises: OutsideError when it is not set, or names a file that cannot be read.
    """
    if not name:
        return ""
    value = (os.environ if environment is None else environment).get(name, "").strip()
    if not value:
        raise OutsideError(
            f"environment variable {name} is not set here; set it to the secret for the process "
            "that sends this, control or a command"
        )
    try:
        return str(from_file(value))
    except ValueError as error:
        raise OutsideError(f"environment variable {name} {error}") from None


# Calls of services outside that are being made, each a task of its own: one that hangs delays no
# other.

Name = TypeVar("Name", bound=Hashable)


async def end_turns(turns: dict[Name, asyncio.Task[None]], *, within_s: float) -> None:
    """Wait a while for the tasks and take out those that have ended; the others go on.

    They are cancelled with the caller. Raises: the error of one that failed.
    """
    if not turns:
        return
    try:
        await asyncio.wait(turns.values(), timeout=within_s)
    except asyncio.CancelledError:
        for turn in turns.values():
            turn.cancel()
        raise
    ended = [turns.pop(name) for name, turn in [*turns.items()] if turn.done()]
    failed = [error for turn in ended if (error := turn.exception()) is not None]
    if failed:
        raise failed[0]


_PLACE = re.compile(r"\{(adapter|champion|canary)\}")
_SHOWN = 200
"""Characters of a provider's own words that are repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the placeholders of a query stand for."""

    adapter: str
    """The adapter that is looked at: the candidate, or after its promotion the champion."""
    champion: str
    """What it is compared with: the champion when the canary began."""
    canary: str
    """Id of the canary."""


class MetricSource(Protocol):
    """Where the value of a metric comes from."""

    async def read(self, metric: Metric, names: Names) -> float | None:
        """Return the value; None when the provider has no data. Raises: OutsideError."""
        ...


class HttpMetrics:
    """Both kinds of metrics, over HTTP."""

    def __init__(self, caller: Caller, environment: Mapping[str, str] | None = None) -> None:
        """environment: None takes that of the process."""
        self._caller = caller
        self._environment = environment

    async def read(self, metric: Metric, names: Names) -> float | None:
        """See `MetricSource.read`."""
        token = secret_of(metric.token_env, self._environment)
        if metric.kind == "prometheus":
            url = f"{metric.url.rstrip('/')}/api/v1/query"
            params = {"query": filled_query(metric.query, names)}
            reply = await self._caller.get(
                url, timeout_s=metric.timeout_s, token=token, params=params
            )
            return prometheus_value(reply)
        reply = await self._caller.get(
            filled_url(metric.url, names), timeout_s=metric.timeout_s, token=token
        )
        return json_value(reply, metric.pointer)


def filled_query(query: str, names: Names) -> str:
    """Put names into a query, escaped for a text between double quotes of PromQL."""

    def name(match: re.Match[str]) -> str:
        text: str = getattr(names, match[1])
        return json.dumps(text, ensure_ascii=False)[1:-1]

    return _PLACE.sub(name, query)


def filled_url(url: str, names: Names) -> str:
    """Put names into a URL, percent-encoded whole: a slash in one opens no other path."""
    return _PLACE.sub(lambda match: quote(getattr(names, match[1]), safe=""), url)


def prometheus_value(reply: Reply) -> float | None:
    """Return the number of an instant query's reply, None for an empty one.

    Raises: OutsideError.
    """
    found = _json(reply.body) if reply.status in (200, 400, 422) else None
    if not isinstance(found, dict) or found.get("status") not in ("success", "error"):
        raise OutsideError(f"status {reply.status} and no reply of Prometheus; check url and token")
    if found["status"] == "error":
        why = str(found.get("error", ""))[:_SHOWN]
        raise OutsideError(f"Prometheus refuses the query ({why}); correct query")
    data = found.get("data")
    kind = data.get("resultType") if isinstance(data, dict) else None
    result = data.get("result") if isinstance(data, dict) else None
    if kind == "vector" and isinstance(result, list):
        if not result:
            return None
        if len(result) > 1:
            raise OutsideError(
                f"the query gives {len(result)} series; aggregate them, as with sum() or max()"
            )
        sample = result[0].get("value") if isinstance(result[0], dict) else None
    elif kind == "scalar":
        sample = result
    else:
        raise OutsideError("the query gives no number but a range or a text; ask for an instant")
    try:
        return float(sample[1])  # type: ignore[index]  # a list of time and text, else TypeError
    except (TypeError, ValueError, IndexError, KeyError):
        raise OutsideError("the sample is no number; check that url is a Prometheus") from None


def json_value(reply: Reply, pointer: str) -> float | None:
    """Return the number at a JSON pointer; None for null, an absent key, and status 204.

    Raises: OutsideError.
    """
    if reply.status == 204:
        return None
    if reply.status != 200:
        raise OutsideError(f"status {reply.status}; check url and token")
    value: Any = _json(reply.body)
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 10:
            value = value[int(key)] if int(key) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(key)
        elif value is None:
            return None
        else:
            raise OutsideError(f"nothing is below {part!r} in the document; correct pointer")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OutsideError(f"a {type(value).__name__} is at the pointer and no number; correct it")
    try:
        return float(value)
    except OverflowError:
        raise OutsideError("the number has over 300 digits; correct pointer") from None


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise OutsideError("the reply is no JSON; check url") from None
