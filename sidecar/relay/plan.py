"""What to do with one chat request: who answers it, and what is written into it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.relay.heads import Header, text_header
from sidecar.relay.refusals import Refusal, unknown_model
from sidecar.relay.reply_edit import Strip
from sidecar.relay.request_edit import (
    RequestView,
    UnreadableBodyError,
    edit_request,
    opening_messages,
    read_request,
)
from sidecar.routing import Assignment, RoutingTable, assign, fallbacks
from sidecar.session_key import session_key

SESSION_HEADER = b"x-sidecar-session"
USER_HEADER = b"x-sidecar-user"
CAPTURE_HEADER = b"x-sidecar-capture"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """Everything that is decided before the first byte goes to vLLM."""

    view: RequestView
    public_model: str
    session_key: str
    user: str
    routes: tuple[Assignment, ...]
    """Tried in order; the next one only when vLLM does not know the adapter."""
    skip_reason: str | None
    """Why the exchange is not captured; None when it is."""
    strip: Strip
    """What the sidecar asks for on its own account."""

    def body_for(self, route: Assignment) -> bytes:
        """The body to send to vLLM."""
        if not self.view.model_is_text:
            return self.view.body
        named = self.view.model or self.public_model
        if named == route.upstream_model and self.strip.nothing:
            return self.view.body
        return edit_request(
            self.view.body,
            model=route.upstream_model,
            ask_token_ids=self.strip.token_ids,
            ask_logprobs=self.strip.logprobs,
        )


def plan_chat(
    body: bytes, headers: Sequence[Header], table: RoutingTable, *, sampled: bool
) -> ChatPlan | Refusal:
    """Decide about a chat request, or refuse it the way vLLM would.

    sampled: whether `capture.sample_rate` chose this request.
    """
    try:
        view = read_request(body)
    except UnreadableBodyError as error:
        return error.refusal
    if view.model not in (None, table.model):
        return unknown_model(str(view.model), table.model)
    user = text_header(headers, USER_HEADER) or view.user
    header = text_header(headers, SESSION_HEADER) or None
    messages = [] if header else opening_messages(view.messages)
    key = session_key(header=header, user=user, messages=messages)
    first = assign(table, key)
    reason = _skip_reason(headers, view, sampled=sampled)
    captured = reason is None
    return ChatPlan(
        view=view,
        public_model=table.model,
        session_key=key,
        user=user,
        routes=(first, *fallbacks(table, first)),
        skip_reason=reason,
        strip=Strip(
            token_ids=captured and view.may_ask_token_ids,
            logprobs=captured and view.may_ask_logprobs,
        ),
    )


def _skip_reason(headers: Sequence[Header], view: RequestView, *, sampled: bool) -> str | None:
    if text_header(headers, CAPTURE_HEADER).lower() == "off":
        return "header"
    if not view.model_is_text:
        return "not_valid"
    return None if sampled else "not_sampled"
