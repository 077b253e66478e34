"""Render pages from templates, read their forms, and ask the admin API in the visitor's name."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import httpx
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape
from pydantic import BaseModel, ValidationError
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.admin.auth import TooLargeError, TooSlowError
from deploy.admin.client import is_of_a_line
from deploy.admin.wire import UnreadableError, check_text
from deploy.errors import DeployError
from deploy.page.text import clock, differences, iso, length, number, share, short_length
from deploy.records import LOADS, comes_next, short
from deploy.registry import audit
from deploy.text import capital, percent
from ingest.verifiers.records import check_words
from sidecar.hiding import hide_in_url
from sidecar.lines import Line
from sidecar.replies.parts import answer_text
from sidecar.store.models import COUNTED, ExchangeRow, TableTakenRow
from sidecar.visible import counted

# Templates and static files. Every value is escaped: no template marks anything as safe.

FOLDER: Final = Path(__file__).parent
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
"""Nothing inline and nothing from elsewhere."""
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: a form would then be sent with the Origin `null`, which is refused.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every reply of the page."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str
    tag: str
    """Changes with the content."""


class Templates:
    """The templates, and the static files that they name."""

    def __init__(self) -> None:
        self.files = {
            path.name: _load(path, _TYPES[path.suffix])
            for path in sorted((FOLDER / "static").iterdir())
            if path.suffix in _TYPES
        }
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            clock=_clock,
            iso=iso,
            length_of=length,
            measured=short_length,
            short=short,
            percent=percent,
            share=share,
            differences=differences,
            counted=counted,
            host=hide_in_url,
            text=message_text,
            check=check_words,
            commands=commands_as_code,
            capital=capital,
        )
        self._environment.globals.update(static=self._static, comes_next=comes_next, loads=LOADS)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """values: have `now`, Unix seconds."""
        return self._environment.get_template(template).render(values)

    def _static(self, name: str) -> str:
        return f"/static/{name}?v={self.files[name].tag}"


def _load(path: Path, media_type: str) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, media_type, hashlib.sha256(content).hexdigest()[:12])


@pass_context
def _clock(context: Context, at: object) -> str:
    return clock(at, context.get("now", time.time()))


def commands_as_code(text: str) -> Markup:
    """Return the text as HTML, escaped, with what stands between two backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of the backticks has no other
        return escape(text)
    code = Markup("<code>{}</code>")
    return Markup("").join(
        code.format(part) if number % 2 else part for number, part in enumerate(parts)
    )


def message_text(message: object) -> str:
    """What a chat message says: its words (`answer_text`), then its tool calls."""
    if not isinstance(message, Mapping):
        return str(message)
    words = answer_text(message)
    found = [words] if words else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        asked = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(asked, Mapping):
            found.append(f"calls {asked.get('name')}({asked.get('arguments')})")
    if not found and "unreadable" in message:
        found.append(str(message["unreadable"]))
    return "\n".join(found)


# Read the body of a form: bounded in bytes, fields and time.

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


# Ask the admin API inside this process, as the visitor who asks the page.

Reply = TypeVar("Reply", bound=BaseModel)


class ProblemError(DeployError):
    """The admin API refused, or could not answer."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title


class Ask:
    """The admin API for one visitor."""

    def __init__(
        self,
        api: ASGIApp,
        given: Mapping[str, Any],
        source: str,
        request_id: str,
        project: str | None = None,
    ) -> None:
        """api: the routes without their reception. given: what the reception would have added to
        the request's scope. source, request_id: what audit rows name. project: whose line of
        adapters is asked about; None: the default line."""
        self._api = api
        self._project = project
        self._given = dict(given)
        self._origin = (source, request_id)

    async def get(self, kind: type[Reply], *path: str, **query: Any) -> Reply:
        """Raises: ProblemError."""
        reply = await self._send("GET", path, query={k: v for k, v in query.items() if v})
        return _read(kind, reply)

    async def post(
        self, kind: type[Reply], *path: str, body: Mapping[str, Any], if_match: str = ""
    ) -> Reply:
        """Raises: ProblemError."""
        headers = {"if-match": if_match} if if_match else {}
        return _read(kind, await self._send("POST", path, body=body, headers=headers))

    async def etag(self, *path: str) -> str:
        """Return the entity tag of a resource. Raises: ProblemError."""
        reply = await self._send("GET", path)
        return str(reply.headers.get("etag", ""))

    async def _send(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        if self._project is not None and is_of_a_line(path):
            query = {**(query or {}), "project": self._project}
        transport = httpx.ASGITransport(app=self._known, raise_app_exceptions=False)
        client = httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1/admin/v1", trust_env=False
        )
        url = "/" + "/".join(httpx.URL(path="/" + one).raw_path[1:].decode() for one in path)
        async with client:
            with audit.changes_come_from(*self._origin):
                reply = await client.request(
                    method, url, params=query or None, json=body, headers=headers
                )
        if reply.is_error:
            raise _problem(reply)
        return reply

    async def _known(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api({**scope, **self._given}, receive, send)


def _read(kind: type[Reply], reply: httpx.Response) -> Reply:
    try:
        return kind.model_validate_json(reply.content)
    except ValidationError as error:
        raise ProblemError(502, "Unreadable", f"{kind.__name__}: {error.error_count()}") from error


def _problem(reply: httpx.Response) -> ProblemError:
    try:
        found = reply.json()
        return ProblemError(reply.status_code, str(found["title"]), str(found["detail"]))
    except (ValueError, KeyError, TypeError):
        return ProblemError(reply.status_code, "The admin API failed", reply.text[:200])


LOOKED_AT = 200
"""Exchanges of an adapter that are read: those that were in flight at the rollback, and the first
after it."""
MOST_PROXIES = 64
"""Processes that are shown: those that took a table last."""
MARGIN_S = 5.0
"""Exchanges are stored a little after they came in, by another clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstReply:
    """What the recorded traffic shows of a rollback: the first request that the new champion
    answered, and those that the old one answered although they came in later.

    Requests that were not recorded are not seen, nor is which proxy relayed one. All times are by
    the clocks of the proxies.
    """

    exchange_id: str | None
    """The first request that came in after it and that its target answered; None: none yet."""
    after_s: float | None
    """From the rollback until that request came in."""
    first_byte_s: float | None
    """From the rollback until that request's first byte left; None: not known."""
    late_s: tuple[float, ...]
    """From the rollback until each request that the old champion still answered, of those read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What one process of a proxy told."""

    proxy: str
    after_s: float | None
    """From the rollback until it took that table; None: it has a later one, or not yet this one."""
    behind: bool
    """The newest table that it told of is older than the rollback."""
    taken_at: float
    """When it took its newest table."""


def proxies_took(session: Session, *, model: str, generation: int, at: float) -> list[Took]:
    """Say of each process of a proxy when it took the table of a rollback, the first first.

    generation: of the table that the rollback wrote. at: the rollback, Unix seconds.
    """
    newest = (
        select(TableTakenRow)
        .where(TableTakenRow.model == model)
        .order_by(TableTakenRow.taken_at.desc())
        .limit(MOST_PROXIES)
    )
    found = [
        Took(
            proxy=row.proxy,
            after_s=row.taken_at - at if row.generation == generation else None,
            behind=row.generation < generation,
            taken_at=row.taken_at,
        )
        for row in session.scalars(newest)
    ]
    return sorted(found, key=lambda one: (one.behind, one.taken_at))


def first_reply(session: Session, *, line: Line, to: str, left: str, at: float) -> FirstReply:
    """Look for the first reply by the target of a rollback. Reads a bounded number of rows.

    line: the line of adapters that was rolled back; the base answers others too.
    to, left: adapters, or "base". at: the rollback, Unix seconds.
    """
    edge = _first_stored_after(session, at - MARGIN_S)
    answered = _answered_after(session, line, to, edge, at)
    late = _answered_after(session, line, left, edge, at)
    if not answered:
        return FirstReply(
            exchange_id=None,
            after_s=None,
            first_byte_s=None,
            late_s=tuple(came - at for came, _, _ in late),
        )
    came, exchange_id, first_byte_s = answered[0]
    return FirstReply(
        exchange_id=exchange_id,
        after_s=came - at,
        first_byte_s=None if first_byte_s is None else came - at + first_byte_s,
        late_s=tuple(one - at for one, _, _ in late),
    )


def _answered_after(
    session: Session, line: Line, adapter: str, edge: int, at: float
) -> list[tuple[float, str, float | None]]:
    """Return (came in, exchange id, seconds to its first byte) of requests after `at`, in order."""
    statement = (
        select(
            ExchangeRow.started_at,
            ExchangeRow.exchange_id,
            ExchangeRow.timings,
            ExchangeRow.project,
        )
        .where(
            ExchangeRow.public_model == line.model,
            ExchangeRow.adapter == adapter,
            ExchangeRow.arm == "champion",
            ExchangeRow.seq >= edge,
            text(COUNTED),
        )
        .order_by(ExchangeRow.seq)
        .limit(LOOKED_AT)
    )
    rows = session.execute(statement).all()
    return sorted(
        (
            float(started_at),
            str(exchange_id),
            number(timings.get("first_byte_s")) if isinstance(timings, dict) else None,
        )
        for started_at, exchange_id, timings, project in rows
        # Left out here, so that a rare project does not make the query read all rows.
        if line.has(project) and isinstance(started_at, int | float) and started_at >= at
    )


def _first_stored_after(session: Session, at: float) -> int:
    """Return a `seq` before which nothing was stored after `at`: rows are stored in the order of
    `seq`, so halving finds it without an index on the time."""
    low, high = 0, session.scalar(select(func.max(ExchangeRow.seq))) or 0
    while low < high:
        middle = (low + high) // 2
        found = session.execute(
            select(ExchangeRow.seq, ExchangeRow.stored_at)
            .where(ExchangeRow.seq > middle)
            .order_by(ExchangeRow.seq)
            .limit(1)
        ).first()
        if found is None or not isinstance(found.stored_at, int | float) or found.stored_at >= at:
            high = middle
        else:
            low = found.seq
    return low
