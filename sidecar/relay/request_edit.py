"""Read from a request what routing needs, and write into it what the sidecar asks. Pure.

The body is never re-encoded: values are replaced at their place and new members put in front, so
that whatever a client sends (unknown fields, big numbers, odd spacing) reaches vLLM as it came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sidecar.errors import BadRequestError
from sidecar.relay.json_spans import members
from sidecar.relay.refusals import Refusal, invalid_json, not_an_object, unreadable_text

MODEL = "model"
TOKEN_IDS = "return_token_ids"
LOGPROBS = "logprobs"


class UnreadableBodyError(BadRequestError):
    """The body is not a JSON object; `refusal` is what vLLM would have answered."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.body.decode())
        self.refusal = refusal


class _Peek(msgspec.Struct):
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    user: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    return_token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    top_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    logprob_token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_PEEK = msgspec.json.Decoder(_Peek)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What the relay needs of a chat request."""

    body: bytes
    """The body in UTF-8; the very bytes that came unless they came in another encoding."""
    model: str | None
    """None: not said, so the public model is meant."""
    model_is_text: bool
    """False: `model` is a number or the like, which vLLM must be left to refuse."""
    user: str
    may_ask_token_ids: bool
    """The client did not ask for token ids, so asking is on the sidecar's account."""
    may_ask_logprobs: bool
    messages: bytes
    """The `messages` array as JSON; empty when there is none."""


def read_request(body: bytes) -> RequestView:
    """Peek into a chat request.

    Raises: UnreadableBodyError when the body is not a JSON object.
    """
    try:
        peek = _PEEK.decode(body)
    except msgspec.MsgspecError:
        body, peek = _read_slowly(body)
    model = _value(peek.model)
    user = _value(peek.user)
    # vLLM refuses these two without `logprobs`; adding it would turn a 400 into a 200.
    needs_logprobs = _is_set(peek.top_logprobs) or _is_set(peek.logprob_token_ids)
    return RequestView(
        body=body,
        model=model if isinstance(model, str) and model else None,
        model_is_text=model is None or isinstance(model, str),
        user=user if isinstance(user, str) else "",
        may_ask_token_ids=not _is_set(peek.return_token_ids),
        may_ask_logprobs=not _is_set(peek.logprobs) and not needs_logprobs,
        messages=b"" if peek.messages is msgspec.UNSET else bytes(peek.messages),
    )


def opening_messages(messages: bytes) -> list[Mapping[str, Any]]:
    """The messages up to and with the first user's, which name the conversation.

    Malformed messages give an empty list: vLLM refuses them, and nothing is recorded.
    """
    opening: list[Mapping[str, Any]] = []
    try:
        for raw in _RAWS.decode(messages) if messages else ():
            message = _message(raw)
            if not isinstance(message, dict):
                return []
            opening.append(message)
            if message.get("role") == "user":
                break
    except ValueError:  # msgspec's and json's errors are ValueErrors
        return []
    return opening


def _message(raw: msgspec.Raw) -> Any:  # Any: whatever JSON the client sent
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError:  # NaN and lone surrogates; the fast way takes a tenth of the time
        return json.loads(bytes(raw))


def edit_request(body: bytes, *, model: str, ask_token_ids: bool, ask_logprobs: bool) -> bytes:
    """Set `model`, and `return_token_ids` and `logprobs` to true where asked for.

    body: a JSON object, as `RequestView.body`. A member that comes twice is set in both places.
    """
    wanted = {MODEL: json.dumps(model).encode()}
    if ask_token_ids:
        wanted[TOKEN_IDS] = b"true"
    if ask_logprobs:
        wanted[LOGPROBS] = b"true"
    missing = dict(wanted)
    head = body.index(b"{") + 1
    pieces: list[bytes] = []
    at = head
    found = members(body)
    for member in found:
        value = wanted.get(member.key)
        if value is not None:
            missing.pop(member.key, None)
            pieces += (body[at : member.start], value)
            at = member.end
    pieces.append(body[at:])
    new = b",".join(b'"%b":%b' % (key.encode(), value) for key, value in missing.items())
    comma = b"," if new and found else b""
    return b"".join((body[:head], new, comma, *pieces))


def _is_set(raw: msgspec.Raw | msgspec.UnsetType) -> bool:
    """True when the client said something that vLLM may take as yes."""
    return raw is not msgspec.UNSET and bytes(raw) not in (b"null", b"false", b"0")


def _value(raw: msgspec.Raw | msgspec.UnsetType) -> Any:  # Any: whatever JSON the client sent
    if raw is msgspec.UNSET:
        return None
    try:
        return json.loads(bytes(raw))
    except ValueError:  # bytes that are not UTF-8: vLLM refuses the body
        return 0


def _read_slowly(body: bytes) -> tuple[bytes, _Peek]:
    """Read what msgspec refuses the way vLLM does: with Python's json."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        value = json.loads(text) if body else None
    except json.JSONDecodeError as error:
        raise UnreadableBodyError(invalid_json(error)) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBodyError(unreadable_text()) from error
    if not isinstance(value, dict):
        raise UnreadableBodyError(not_an_object(value))
    fields = {
        name: msgspec.Raw(json.dumps(value[name]).encode())
        for name in _Peek.__struct_fields__
        if name in value
    }
    return text.encode("utf-8", "surrogatepass"), _Peek(**fields)
