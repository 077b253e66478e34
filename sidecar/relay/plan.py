"""Plan one model request: which adapter answers it, and what is edited into it. Pure.

`_strip` decides which fields (token ids, log-probabilities, usage) the sidecar adds on its own
account, `Plan.body_for` adds them, and `reply_edit` makes them `null` again in the reply.
"""

from __future__ import annotations

from typing import Final

from msgspec import UNSET

from sidecar.records import Assignment
from sidecar.relay.heads import ACCEPT_ENCODING, ANY_CLIENT, RequestHeaders
from sidecar.relay.peek import RequestPeek, UnreadableBodyError, peek_request
from sidecar.relay.refusals import Refusal, unknown_model
from sidecar.relay.reply_edit import STRIP_NOTHING, STRIP_USUAL, Strip
from sidecar.relay.request_edit import (
    LOGPROBS,
    MODEL,
    STREAM_OPTIONS,
    TOKEN_IDS,
    PiecedBody,
    edit_request,
    splice_request,
)
from sidecar.relay.surfaces import SurfaceRule
from sidecar.relay.upstream import CAPTURE, USAGE
from sidecar.routing.assignment import CompiledRouting
from sidecar.routing.breaker import NO_CANARY
from sidecar.routing.session_key import (
    DEFAULT_PROJECT,
    KnownSessions,
    hash_of_address,
    header_name,
    session_key,
    short_name,
)

SESSION_HEADER: Final = b"x-sidecar-session"
USER_HEADER: Final = b"x-sidecar-user"
TASK_HEADER: Final = b"x-sidecar-task"


class Plan:
    """Everything that is decided before the first byte goes to vLLM. (A plain class, because one is
    made for every request.)"""

    def __init__(
        self,
        rule: SurfaceRule,
        peek: RequestPeek,
        *,
        public_model: str,
        session_key: str,
        user: str,
        routes: tuple[Assignment, ...],
        skip_reason: str | None,
        strip: Strip,
        metered: bool,
        kinds: int = 0,
        canary_tag: float = NO_CANARY,
        hides_arm: bool = False,
        canary_as: tuple[bytes, bytes] | None = None,
        address_hash: str = "",
    ) -> None:
        """metered: the key has an allowance of tokens, so the usage must be known.
        kinds: of what is added on the sidecar's account (`OwnFields`).
        routes: tried in order; the next one only when vLLM does not know the adapter.
        skip_reason: why the exchange is not captured; None when it is.
        strip: the reply fields that only the sidecar asked for.
        canary_tag: the breaker's tag of the canary that this request's session was assigned
        against.
        hides_arm: a canary runs, and the caller is not told which adapter answered.
        canary_as: names to replace in the reply for that (`CompiledRouting`); None: none. Whole
        replies of the champion are treated alike: their form must not tell the arms apart either.
        address_hash: as in `sidecar.records.Exchange`."""
        self.rule = rule
        self.metered = metered
        self.kinds = kinds
        self.peek = peek
        self.public_model = public_model
        self.session_key = session_key
        self.user = user
        self.routes = routes
        self.skip_reason = skip_reason
        self.strip = strip
        self.canary_tag = canary_tag
        self.hides_arm = hides_arm
        self.canary_as = canary_as
        self.address_hash = address_hash

    def strip_with(self, kinds: int) -> Strip:
        """The reply fields that are asked for where only these kinds of additions are made."""
        strip = self.strip
        if kinds & self.kinds == self.kinds:
            return strip
        captures = kinds & CAPTURE != 0
        return Strip(
            token_ids=captures and strip.token_ids,
            logprobs=captures and strip.logprobs,
            usage=kinds & USAGE != 0 and strip.usage,
        )

    def body_for(self, route: Assignment, strip: Strip) -> bytes | PiecedBody:
        """The body to send to vLLM. strip: what to add to it (`strip_with`)."""
        peek = self.peek
        if not _is_valid(self.rule, peek):
            return peek.body
        named = peek.model or self.public_model
        same_model = named == route.upstream_model
        if same_model and strip.nothing:
            return peek.body
        old = peek.model_json
        kept = old if same_model and peek.model else None
        new = kept if kept is not None else b'"%b"' % route.upstream_model.encode()
        fields = peek.fields
        present = fields.return_token_ids is not UNSET or fields.logprobs is not UNSET
        present = present or (strip.usage and fields.stream_options is not UNSET)
        if old is not None and not present:
            spliced = splice_request(peek.body, old, new, self._in_front(strip))
            if spliced is not None:
                return spliced
        wanted = {MODEL: new}
        if strip.token_ids:
            wanted[TOKEN_IDS] = b"true"
        if strip.logprobs:
            wanted[LOGPROBS] = self.rule.logprobs_ask
        if strip.usage:
            asked = edit_request(peek.stream_options_json, {"include_usage": b"true"})
            wanted[STREAM_OPTIONS] = asked
        return edit_request(peek.body, wanted)

    def _in_front(self, strip: Strip) -> bytes:
        front = b'"return_token_ids":true,' if strip.token_ids else b""
        if strip.logprobs:
            front += b'"logprobs":%b,' % self.rule.logprobs_ask
        if strip.usage:
            front += b'"stream_options":{"include_usage":true},'
        return front


def plan_request(
    rule: SurfaceRule,
    body: bytes,
    headers: RequestHeaders,
    routing: CompiledRouting,
    known: KnownSessions,
    *,
    skip_reason: str | None = None,
    project: str = DEFAULT_PROJECT,
    key_id: str = "",
    metered: bool = False,
    needs_session: bool = True,
    pinned: Assignment | None = None,
    operator: bool = True,
    address: str = "",
) -> Plan | Refusal:
    """Plan a request, or refuse it as vLLM would. known: what the relay remembers of earlier
    requests. skip_reason, metered: as in `Plan`. needs_session: the session key is needed even
    where no canary splits the traffic. pinned: an operator, or the ticket of a rehearsal, named the
    adapter. operator: the caller may know which arm answers while a canary runs. address: of the
    connection, as text; looked at while a canary runs."""
    try:
        peek = peek_request(body, routing.public_name)
    except UnreadableBodyError as error:
        return error.refusal
    public = routing.public_name.text
    if peek.model is not None and peek.model != public:
        return unknown_model(peek.model, public, rule.surface)
    reason = skip_reason if rule.captured else "surface"
    if reason is None and not _is_valid(rule, peek):
        reason = "not_valid"
    user = key = ""
    if reason is None or needs_session or (rule.adapted and routing.splits):
        aside = headers.aside
        user = short_name(header_name(aside.get(USER_HEADER)) or peek.user)
        key = _session_key(peek, headers, user, project, key_id, known)
    if pinned is not None:
        routes: tuple[Assignment, ...] = (pinned,)
        if pinned.arm != "rehearsal":
            reason = reason or "pinned"
    else:
        routes = routing.routes(key) if rule.adapted else routing.base
    strip = _strip(rule, peek, captured=reason is None, metered=metered)
    kinds = CAPTURE if strip.token_ids or strip.logprobs else 0
    if strip.usage or (metered and ACCEPT_ENCODING in headers.aside):
        kinds |= USAGE
    hides_arm = routing.splits and not operator
    same_form = hides_arm and rule.adapted and (routes[0].arm == "canary" or not peek.streams)
    asked_by = address if routing.splits and not key_id else ""
    return Plan(
        rule,
        peek,
        public_model=public,
        session_key=key,
        user=user,
        routes=routes,
        skip_reason=reason,
        metered=metered,
        canary_tag=routing.canary_tag if rule.adapted and pinned is None else NO_CANARY,
        strip=strip,
        kinds=kinds,
        hides_arm=hides_arm,
        canary_as=routing.canary_as if same_form else None,
        address_hash=hash_of_address(asked_by, routing.table.salt),
    )


def _session_key(
    peek: RequestPeek,
    headers: RequestHeaders,
    user: str,
    project: str,
    key_id: str,
    known: KnownSessions,
) -> str:
    header = header_name(headers.aside.get(SESSION_HEADER))
    if header:
        return session_key(header=header, user=user, project=project)
    rank = headers.session_rank
    name = header_name(headers.session_name) if rank < ANY_CLIENT else peek.agent_session()
    if name:
        return session_key(header=None, user=user, name=name, project=project, key_id=key_id)
    opening, goes_on = peek.opening(known.marks)
    hint = peek.cache_key()
    name = header_name(headers.session_name) or peek.session_name()
    if name:
        key = session_key(header=None, user=user, name=name, project=project, key_id=key_id)
        if not known.is_shared(key, opening, goes_on=goes_on):
            return key
        hint = name
    return session_key(
        header=None, user=user, opening=opening, hint=hint, project=project, key_id=key_id
    )


def _is_valid(rule: SurfaceRule, peek: RequestPeek) -> bool:
    """False: vLLM will refuse the request because of its `model`, and must see it unchanged."""
    return peek.model_is_text and (peek.model is not None or not rule.needs_model)


def _strip(rule: SurfaceRule, peek: RequestPeek, *, captured: bool, metered: bool) -> Strip:
    if not rule.gives_ids or not (captured or metered):
        return STRIP_NOTHING
    options = peek.stream_options() if metered and peek.streams else None
    token_ids = captured and peek.may_ask_token_ids(rule.surface)
    logprobs = captured and peek.may_ask_logprobs(rule.surface)
    if token_ids and logprobs and options is None:
        return STRIP_USUAL
    usage = options is not None and not options.get("include_usage")
    return Strip(token_ids=token_ids, logprobs=logprobs, usage=usage)
