"""Who looks at the page, and from where: cookies, form tokens, origins.

As the admin API: with tokens configured a visitor logs in with one of them and has its scopes;
without them the listener is loopback only, and whoever reaches it under a loopback name may do
everything. A change needs a form token too, because cookies of one host are sent to all its ports,
and because a page on another port of this machine counts as the same site.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from deploy.admin.auth import ForbiddenError, Grant, admit, grant_of
from deploy.admin.context import AdminContext
from deploy.page import signing
from deploy.page.signing import Session
from sidecar.access.origins import is_other_site

SESSION: Final = "sidecar_admin_session"
"""Cookie of a login."""
FORM: Final = "sidecar_admin_form"
"""Cookie behind the forms of visitors who are not logged in. A second one: a link from another site
brings no Strict cookie along, and answering it must not end a login."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    grant: Grant | None
    """None: nobody has logged in."""
    session: Session
    is_new: bool
    """The session was made for this request, and goes into a cookie."""

    def may(self, scope: str) -> bool:
        return self.grant is not None and scope in self.grant.scopes


class Door:
    """Knows the key of this process's cookies."""

    def __init__(self, context: AdminContext, clock: Callable[[], float] = time.time) -> None:
        self._tokens = context.tokens
        self._clock = clock
        self._key = secrets.token_bytes(signing.KEY_BYTES)
        self._grants: dict[str, Grant] = {}
        """What each token may do that has logged in, by its `signing.reference`: the settings do
        not change while this process lives."""
        self._ended: dict[str, float] = {}
        """Name of a session that was logged out -> when it ends anyway."""

    @property
    def asks_for_token(self) -> bool:
        return bool(self._tokens)

    def visitor(self, request: Request) -> Visitor:
        """Raises: ForbiddenError, UnreadableError for a request that no page of ours made."""
        if not self._tokens:
            grant = admit(request.scope["headers"], ())
            return self._anonymous(request, grant)
        if request.method not in ("GET", "HEAD"):
            self._check_origin(request)
        session = self._read(request, SESSION)
        if session is not None and session.name not in self._ended:
            known = self._grants.get(session.who)
            if known is not None:
                return Visitor(grant=known, session=session, is_new=False)
        return self._anonymous(request, None)

    def log_in(self, token: str) -> Session:
        """Raises: UnauthorizedError."""
        given = token.strip().encode("utf-8", "replace")
        grant = grant_of(b"Bearer " + given, self._tokens)
        who = signing.reference(self._key, hashlib.sha256(given).hexdigest())
        self._grants[who] = grant
        return self._new(who=who)

    def log_out(self, session: Session) -> None:
        """End a login. A session that nobody logged in to is not remembered: anybody makes one."""
        if not session.who:
            return
        now = self._clock()
        self._ended = {name: ends for name, ends in self._ended.items() if ends > now}
        self._ended[session.name] = session.ends_at

    @property
    def ended(self) -> int:
        """Number of sessions that are remembered because a logout ended them early."""
        return len(self._ended)

    def form_token(self, visitor: Visitor) -> str:
        return signing.form_token(self._key, visitor.session)

    def check_form(self, visitor: Visitor, given: str) -> None:
        """Raises: ForbiddenError when the form is not of this session."""
        if visitor.is_new or not signing.is_form_token(self._key, visitor.session, given):
            raise ForbiddenError(
                "foreign_origin", "the form is not of this session; load the page and try again"
            )

    def give_cookie(self, response: Response, session: Session) -> None:
        name = SESSION if session.who else FORM
        response.set_cookie(
            name,
            signing.seal(self._key, session),
            max_age=int(signing.SESSION_S),
            path="/",
            httponly=True,
            samesite="strict",
        )

    def _anonymous(self, request: Request, grant: Grant | None) -> Visitor:
        session = self._read(request, FORM)
        if session is not None and not session.who:
            return Visitor(grant=grant, session=session, is_new=False)
        return Visitor(grant=grant, session=self._new(who=""), is_new=True)

    def _new(self, *, who: str) -> Session:
        name = secrets.token_hex(signing.NAME_BYTES)
        return Session(name=name, who=who, ends_at=self._clock() + signing.SESSION_S)

    def _read(self, request: Request, cookie: str) -> Session | None:
        value = request.cookies.get(cookie)
        return None if value is None else signing.unseal(self._key, value, self._clock())

    @staticmethod
    def _check_origin(request: Request) -> None:
        origin, host = request.headers.get("origin"), request.headers.get("host")
        try:
            other_site = is_other_site(origin, host)
        except ValueError as error:
            raise ForbiddenError("foreign_origin", "the Origin is not a URL") from error
        if other_site:
            raise ForbiddenError("foreign_origin", f"web pages of {origin!r} may not send forms")
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise ForbiddenError("foreign_origin", "another site may not send forms")
