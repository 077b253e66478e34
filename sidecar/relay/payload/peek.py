"""Read from a request what routing needs, in one scan of its body. Pure.

Only what is needed is decoded; other values stay raw. A body that msgspec refuses and Python's json
(which vLLM uses) accepts is read by Python's json.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from sidecar.errors import UNREADABLE_JSON, BadRequestError
from sidecar.records import Surface
from sidecar.relay.payload.request_fields import (
    ITEMS,
    LOOSE,
    TYPED,
    LooseFields,
    Message,
    TypedFields,
    Value,
)
from sidecar.relay.surface.refusals import Refusal, invalid_json, not_an_object, unreadable_body
from sidecar.routing.assignment import ModelName

PROMPT_KEY_BYTES: Final = 1024
"""A prompt without messages names its conversation by this many bytes of its beginning."""
TOO_DEEP: Final = "nested_too_deep"
_UNSET: Final = UNSET
_MESSAGE_FIELDS: Final = ("role", "content")
_USER: Final = Raw(b'"user"')
_NO: Final = (b"null", b"false", b"0")


class UnreadableBodyError(BadRequestError):
    """The body is not a JSON object; `refusal` is what vLLM would have answered."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class RequestPeek:
    """What the relay reads of a request's body."""

    __slots__ = ("_fields", "body", "model", "model_is_text", "model_json")

    def __init__(
        self, body: bytes, fields: TypedFields | LooseFields, usual: ModelName | None = None
    ) -> None:
        """usual: a model's name that need not be decoded."""
        self.body = body
        """The body in UTF-8; the very bytes that came unless they came in another encoding."""
        self._fields = fields
        raw = fields.model
        self.model_json: bytes | None = None
        """The bytes of `model` in the body; None: it is absent."""
        self.model_is_text = True
        """False: `model` is a number or the like, which vLLM must be left to refuse."""
        self.model: str | None
        if usual is not None and raw == usual.raw:
            self.model_json = usual.json
            self.model = usual.text
        else:
            if raw is not _UNSET:
                self.model_json = bytes(raw)
            model = _value(raw)
            self.model = model if isinstance(model, str) and model else None
            self.model_is_text = model is None or isinstance(model, str)
        """None: absent or null."""

    @property
    def user(self) -> str:
        """`user`, or what Anthropic's surface has for it: `metadata.user_id`. Half of a surrogate
        pair, which JSON may hold and no record, becomes a question mark."""
        user = _value(self._fields.user)
        if user is None and self._fields.metadata is not _UNSET:
            metadata = _value(self._fields.metadata)
            user = metadata.get("user_id") if isinstance(metadata, dict) else None
        if not isinstance(user, str):
            return ""
        return user if user.isascii() else user.encode("utf-8", "replace").decode()

    @property
    def streams(self) -> bool:
        return _is_yes(self._fields.stream)

    def may_ask_token_ids(self, surface: Surface) -> bool:
        """The client did not ask for token ids, so asking is on the sidecar's account.

        Not with the `echo` of completions: vLLM then leaves the prompt out of the text.
        """
        if surface == "completions" and _is_yes(self._fields.echo):
            return False
        return not _is_yes(self._fields.return_token_ids)

    def may_ask_logprobs(self, surface: Surface) -> bool:
        """The client did not ask for log-probabilities, and asking for them changes nothing else.

        Not with `top_logprobs` or `logprob_token_ids`: without `logprobs` vLLM refuses them, and
        must go on refusing them. Not with `echo`: vLLM would compute the prompt's too. In
        completions `logprobs` is a number; even 0 and `false` ask for them.
        """
        fields = self._fields
        asked = fields.logprobs
        if surface == "completions" and asked is not _UNSET and bytes(asked) != b"null":
            return False
        return not (
            _is_yes(asked)
            or _is_yes(fields.top_logprobs)
            or _is_yes(fields.logprob_token_ids)
            or _is_yes(fields.echo)
        )

    @property
    def asks_nothing_of_ours(self) -> bool:
        """`return_token_ids` and `logprobs` are absent from the body, even as false."""
        return self._fields.return_token_ids is _UNSET and self._fields.logprobs is _UNSET

    @property
    def says_stream_options(self) -> bool:
        """`stream_options` is in the body, if only as null."""
        return self._fields.stream_options is not _UNSET

    @property
    def stream_options_json(self) -> bytes:
        """The bytes of the client's `stream_options`; `{}` when there are none."""
        raw = self._fields.stream_options
        return b"{}" if raw is _UNSET or bytes(raw) == b"null" else bytes(raw)

    def stream_options(self) -> dict[str, Any] | None:  # Any: the client's
        """The client's `stream_options`; None when it is no object: nothing can be added to it."""
        raw = self._fields.stream_options
        options = {} if raw is _UNSET or bytes(raw) == b"null" else _value(raw)
        return options if isinstance(options, dict) else None

    def conversation_prefix(self) -> list[bytes | Raw]:
        """What names the conversation, as it stands in the body: system prompt, then roles and
        contents of the messages up to the first user's; on any surface. Malformed ones give an
        empty list: vLLM refuses them, and nothing is recorded."""
        fields = self._fields
        conversation_prefix: list[bytes | Raw] = []
        if fields.system is not _UNSET:
            conversation_prefix.append(fields.system)
        if fields.instructions is not _UNSET:
            conversation_prefix.append(fields.instructions)
        messages = fields.messages if isinstance(fields, TypedFields) else _UNSET
        if messages is _UNSET and fields.input is not _UNSET:
            messages = _items(fields.input)
            if messages is _UNSET:  # a text
                conversation_prefix.append(fields.input)
                return conversation_prefix
        if messages is _UNSET:
            if fields.prompt is not _UNSET:
                conversation_prefix.append(bytes(memoryview(fields.prompt)[:PROMPT_KEY_BYTES]))
            return conversation_prefix
        for message in messages:
            role, content = message.role, message.content
            conversation_prefix.append(b"" if role is _UNSET else role)
            if content is not _UNSET:
                conversation_prefix.append(content)
            if role == _USER:
                break
        return conversation_prefix


def peek_request(body: bytes, usual: ModelName | None = None) -> RequestPeek:
    """Peek into a request. Raises: UnreadableBodyError when the body is not a JSON object.

    usual: the model's name that most requests have.
    """
    try:
        return RequestPeek(body, TYPED.decode(body), usual)
    except ValueError:
        return _peek_loosely(body)
    except RecursionError as error:  # vLLM, which is deeper in its stack, cannot read it either
        raise UnreadableBodyError(unreadable_body(TOO_DEEP)) from error


def _peek_loosely(body: bytes) -> RequestPeek:
    """Peek into a body that `TYPED` refuses."""
    try:
        return RequestPeek(body, LOOSE.decode(body))
    except UNREADABLE_JSON:
        return _peek_slowly(body)


def _items(raw: Raw) -> list[Message] | UnsetType:
    try:
        return ITEMS.decode(raw)
    except UNREADABLE_JSON:
        return _UNSET


def _is_yes(raw: Value) -> bool:
    """True if vLLM may take the value as true."""
    return raw is not _UNSET and bytes(raw) not in _NO


def _value(raw: Value) -> Any:  # Any: whatever JSON the client sent
    """The decoded value; 0 for one that cannot be read, which is left to vLLM to refuse."""
    if raw is _UNSET:
        return None
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE_JSON:
        return _value_slowly(raw)


def _value_slowly(raw: Raw) -> Any:  # Any: whatever JSON the client sent
    """As `_value`, with NaN and lone surrogates, in ten times the time."""
    try:
        return json.loads(bytes(raw))
    except UNREADABLE_JSON:
        return 0


def _peek_slowly(body: bytes) -> RequestPeek:
    """Read what msgspec refuses the way vLLM does: with Python's json."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        value = json.loads(text) if body else None
        peek = _peek_of(value, text) if isinstance(value, dict) else None
    except json.JSONDecodeError as error:
        raise UnreadableBodyError(invalid_json(error)) from error
    except UnicodeDecodeError as error:
        raise UnreadableBodyError(unreadable_body("not_text")) from error
    except RecursionError as error:
        raise UnreadableBodyError(unreadable_body(TOO_DEEP)) from error
    except ValueError as error:  # what Python says of an integer of over 4,300 digits
        raise UnreadableBodyError(unreadable_body("number_too_long")) from error
    if peek is None:
        raise UnreadableBodyError(not_an_object(value))
    return peek


def _peek_of(value: dict[str, Any], text: str) -> RequestPeek:  # Any: whatever JSON was sent
    """value: what `text` says."""
    fields = {
        name: Raw(json.dumps(value[name]).encode())
        for name in LooseFields.__struct_fields__
        if name in value and name != "messages"
    }
    messages = value.get("messages")
    encoded = text.encode("utf-8", "surrogatepass")
    if isinstance(messages, list) and all(isinstance(item, dict) for item in messages):
        kept = [
            Message(
                **{
                    key: Raw(json.dumps(item[key]).encode())
                    for key in _MESSAGE_FIELDS
                    if key in item
                }
            )
            for item in messages
        ]
        return RequestPeek(encoded, TypedFields(**fields, messages=kept))
    return RequestPeek(encoded, LooseFields(**fields))
