"""Bound the replies that LiteLLM reads, and take token counts out that it cannot read.

LiteLLM and the clients within it read a reply of any size whole, and unpack it: 800 KB of gzip were
800 MB of memory. And they refuse a whole reply, which has been paid for, when its `usage` is odd.
Every provider's client gets its transport from one function of LiteLLM, so that one is wrapped.
Calls of LiteLLM that are not the judge's pass untouched: RULER's functions share it with a program
of others.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpx

MAX_BYTES = 16 * 2**20
"""Longest reply, unpacked. 200,000 characters of it are read (`ingest.ruler.prompt`), which JSON
may write in 1.2 MB; the rest is for a provider's own fields, such as log-probabilities."""
_PACKED = frozenset({"content-encoding", "content-length", "transfer-encoding"})
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens")
_DETAILS = "_tokens_details"
_ASKED: ContextVar[bool] = ContextVar("a_judge_is_asked", default=False)


@contextmanager
def a_judge_is_asked() -> Iterator[None]:
    """Bound the replies to the calls made within."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


def bound_replies(handler: Any) -> None:  # Any: LiteLLM's `AsyncHTTPHandler`, a class
    """Wrap the function that makes the transports of LiteLLM's clients; a second time: nothing."""
    create = handler.create_async_transport
    if getattr(create, "is_bounded", False):
        return

    def create_bounded(*args: Any, **options: Any) -> Any:
        transport: Any = create(*args, **options) or httpx.AsyncHTTPTransport()
        transport.handle_async_request = _bounded(transport.handle_async_request)
        return transport

    create_bounded.is_bounded = True  # type: ignore[attr-defined]
    handler.create_async_transport = staticmethod(create_bounded)


def _bounded(
    send: Callable[[httpx.Request], Awaitable[httpx.Response]],
) -> Callable[[httpx.Request], Awaitable[httpx.Response]]:
    async def send_bounded(request: httpx.Request) -> httpx.Response:
        response = await send(request)
        if not _ASKED.get():
            return response
        body = bytearray()
        try:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_BYTES:
                    raise httpx.DecodingError(
                        f"the reply is longer than {MAX_BYTES} bytes", request=request
                    )
        finally:
            await response.aclose()
        kept = [
            (name, value)
            for name, value in response.headers.multi_items()
            if name.lower() not in _PACKED
        ]
        return httpx.Response(
            response.status_code,
            headers=kept,
            content=without_odd_usage(bytes(body)),
            request=request,
            extensions=response.extensions,
        )

    return send_bounded


def without_odd_usage(body: bytes) -> bytes:
    """Return a reply without its `usage` when that holds no counts, else the reply as it is. Pure.

    What the tokens were is then not known; the reply itself is taken.
    """
    if b'"usage"' not in body:
        return body
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return body  # LiteLLM says what is wrong with it
    if not isinstance(reply, dict) or "usage" not in reply or _is_usage(reply["usage"]):
        return body
    del reply["usage"]
    return json.dumps(reply).encode()


def _is_usage(usage: object) -> bool:
    """Tell whether LiteLLM can read it: whole numbers, and objects of details."""
    if usage is None:
        return True
    if not isinstance(usage, dict):
        return False
    counts = all(_is_count(usage[name]) for name in _COUNTS if name in usage)
    return counts and all(
        value is None or (isinstance(value, dict) and all(map(_is_count, value.values())))
        for name, value in usage.items()
        if isinstance(name, str) and name.endswith(_DETAILS)
    )


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))
