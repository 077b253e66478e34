"""Read the body of a form: bounded in bytes, fields and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

from deploy.admin.auth import TooLargeError, TooSlowError
from deploy.admin.json import UnreadableError, check_text

MAX_BYTES = 65_536
MAX_FIELDS = 20
TIMEOUT_S = 10.0
_KIND = "application/x-www-form-urlencoded"


async def read_form(request: Request) -> Mapping[str, str]:
    """Return the fields of a form, each once.

    Raises: UnreadableError, TooLargeError, TooSlowError.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _KIND:
        raise UnreadableError(f"body: send a form ({_KIND})")
    body = bytearray()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BYTES:
                    raise TooLargeError("too_large", f"a form has at most {MAX_BYTES} bytes")
    except TimeoutError as error:
        raise TooSlowError("too_slow", f"the form did not arrive in {TIMEOUT_S:g} s") from error
    except ClientDisconnect as error:
        raise UnreadableError("body: the client left before its end") from error
    try:
        fields = parse_qsl(
            body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS
        )
    except ValueError as error:
        raise UnreadableError("body: is no readable form") from error
    found: dict[str, str] = {}
    for name, value in fields:
        check_text(value, "body")
        if name in found:
            raise UnreadableError("body: has a field twice")
        found[name] = value
    return found
