"""Read from a request what routing needs, in one scan of its body. Pure.

Only what is needed is decoded; other values stay raw. A body that msgspec refuses and Python's json
(which vLLM uses) accepts is read by Python's json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType
from xxhash import xxh3_128_digest

from sidecar.errors import UNREADABLE_JSON, BadRequestError
from sidecar.records import Surface, Value
from sidecar.relay.fields import ITEMS, LOOSE, PARTS, TYPED, LooseFields, Message, Part, TypedFields
from sidecar.relay.refusals import Refusal, invalid_json, not_an_object, unreadable_body
from sidecar.routing.assignment import ModelName
from sidecar.routing.opening import mark, opening
from sidecar.routing.session_key import looks_drawn, user_and_session

PROMPT_KEY_BYTES: Final = 1024
"""A prompt without messages names its conversation by this many bytes of its beginning."""
HALF_TEXT_BYTES: Final = 32 * 1024
"""So much of each end of a longer text is read: `opening` keeps half of it."""
LONGEST_ESCAPE: Final = 12
"""Bytes of a character in JSON, as a pair of surrogates."""
MOST_PARTS: Final = 256
"""Parts of a message that are read: its first and its last ones."""
MARKS_KEPT: Final = 4096
"""Contents whose marks are cached, in 250 bytes each: every turn of a conversation repeats its
opening. A mark takes 1 to 150 us."""
Marks = dict[bytes, bytes]
"""Digest of a content as it stands in the body -> its `mark`."""
LONGEST_METADATA_BYTES: Final = 8 * 1024
"""Longer `metadata` names nobody and no session."""
LONGEST_ADDRESS_BYTES: Final = 8 * 1024
_SIGNED: Final = re.compile(rb"(?i)[?&](?:[\w-]*signature|sig)=")
"""In the query of an address at S3, Google Cloud Storage, CloudFront or Azure."""
TOO_DEEP: Final = "nested_too_deep"
_UNSET: Final = UNSET
_MESSAGE_FIELDS: Final = ("role", "content")
_USER: Final = Raw(b'"user"')
_SYSTEM: Final = Raw(b'"system"')
_DEVELOPER: Final = Raw(b'"developer"')
_QUOTE: Final = b'"'
_NO: Final = (b"null", b"false", b"0")


class UnreadableBodyError(BadRequestError):
    """The body is not a JSON object; `refusal` is what vLLM would have answered."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class RequestPeek:
    """What the relay reads of a request's body."""

    def __init__(
        self, body: bytes, fields: TypedFields | LooseFields, usual: ModelName | None = None
    ) -> None:
        """usual: a model's name that need not be decoded."""
        self.body = body
        """The body in UTF-8; the very bytes that came unless they came in another encoding."""
        self.fields = fields
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
        """`user`, or what Anthropic's surface has for it: `metadata.user_id`, without the session
        that agents put into it. Half of a surrogate pair, which JSON may hold and no record,
        becomes a question mark."""
        user = _value(self.fields.user)
        if user is None:
            user = user_and_session(self._metadata("user_id"))[0]
        if not isinstance(user, str):
            return ""
        return user if user.isascii() else user.encode("utf-8", "replace").decode()

    def agent_session(self) -> str:
        """The session in `metadata.user_id`, as coding agents write it, or `conversation` of the
        responses; "" without one."""
        session = user_and_session(self._metadata("user_id"))[1]
        if session or self.fields.conversation is _UNSET:
            return session
        name = _value(self.fields.conversation)
        if isinstance(name, dict):
            name = name.get("id")
        return name if isinstance(name, str) else ""

    def session_name(self) -> str:
        """What else in the body may name the session; "" without one."""
        fields = self.fields
        for raw in (fields.session_id, fields.litellm_session_id):
            if raw is not _UNSET:
                name = _value(raw)
                if isinstance(name, str) and name:
                    return name
        for key in ("session_id", "conversation_id", "thread_id"):
            name = self._metadata(key)
            if name:
                return name
        name = self.cache_key()
        return name if looks_drawn(name) else ""

    def cache_key(self) -> str:
        """`prompt_cache_key`: of a conversation, or of all of an application's."""
        name = _value(self.fields.prompt_cache_key)
        return name if isinstance(name, str) else ""

    def _metadata(self, name: str) -> str:
        """A text in `metadata`; "" where it has none."""
        raw = self.fields.metadata
        if raw is _UNSET or len(raw) > LONGEST_METADATA_BYTES:
            return ""
        metadata = _value(raw)
        value = metadata.get(name) if isinstance(metadata, dict) else None
        return value if isinstance(value, str) else ""

    @property
    def streams(self) -> bool:
        return _is_yes(self.fields.stream)

    def may_ask_token_ids(self, surface: Surface) -> bool:
        """The client did not ask for token ids, so asking is on the sidecar's account. Not with the
        `echo` of completions: vLLM then leaves the prompt out of the text."""
        if surface == "completions" and _is_yes(self.fields.echo):
            return False
        return not _is_yes(self.fields.return_token_ids)

    def may_ask_logprobs(self, surface: Surface) -> bool:
        """The client did not ask for log-probabilities, and asking for them changes nothing else.
        Not with `top_logprobs` or `logprob_token_ids`: without `logprobs` vLLM refuses them, and
        must go on refusing them. Not with `echo`: vLLM would compute the prompt's too. In
        completions `logprobs` is a number; even 0 and `false` ask for them."""
        fields = self.fields
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
    def stream_options_json(self) -> bytes:
        """The bytes of the client's `stream_options`; `{}` when there are none."""
        raw = self.fields.stream_options
        return b"{}" if raw is _UNSET or bytes(raw) == b"null" else bytes(raw)

    def stream_options(self) -> dict[str, Any] | None:  # Any: the client's
        """The client's `stream_options`; None when it is no object: nothing can be added to it."""
        options = _value(Raw(self.stream_options_json))
        return options if isinstance(options, dict) else None

    def opening(self, marks: Marks) -> tuple[bytes, bool]:
        """`sidecar.routing.opening` of the conversation, on any surface, and whether it goes on
        after it. Where its user says nothing, what it begins with names it. Malformed messages give
        b"": vLLM refuses them, and nothing is recorded. marks: a cache of the caller's."""
        fields = self.fields
        messages = fields.messages if isinstance(fields, TypedFields) else _UNSET
        if messages is _UNSET and fields.input is not _UNSET:
            messages = _items(fields.input)
            if messages is _UNSET:  # a text, which later turns send as their first message
                return opening((("user", _mark(fields.input, marks)),))
        if messages is _UNSET:
            return b"" if fields.prompt is _UNSET else _mark_of_prompt(fields.prompt), False
        found, goes_on = opening(_said(messages, marks))
        if found:
            return found, goes_on
        first = messages[0].content if messages else _UNSET
        for raw in (first, fields.system, fields.instructions):
            if raw is not _UNSET:
                found = _mark(raw, marks) or xxh3_128_digest(raw)
                break
        return found, goes_on


def _said(messages: list[Message], marks: Marks) -> Iterator[tuple[str, bytes]]:
    for message in messages:
        role, content = message.role, message.content
        if role == _USER:
            yield "user", b"" if content is _UNSET else _mark(content, marks)
        else:
            is_system = role in (_SYSTEM, _DEVELOPER)
            yield "system" if is_system else "assistant", b""  # or a call, or its result


def _mark(raw: Any, marks: Marks) -> bytes:  # Any: bytes, or msgspec's Raw
    """The `mark` of a message's content: a text, or a list of parts."""
    digest = xxh3_128_digest(raw)
    known = marks.get(digest)
    if known is None:
        known = _mark_of(raw)
        if len(marks) >= MARKS_KEPT:
            marks.clear()
        marks[digest] = known
    return known


def _mark_of(raw: Any) -> bytes:  # Any: bytes, or msgspec's Raw
    first = bytes(memoryview(raw)[:1])
    if first == _QUOTE:
        return mark(_text(raw))
    if first != b"[":
        return b""
    try:
        parts: list[Part] = PARTS.decode(raw)
    except UNREADABLE_JSON:  # token ids, texts, or what vLLM refuses
        return xxh3_128_digest(raw)
    if len(parts) > MOST_PARTS:
        parts = parts[: MOST_PARTS // 2] + parts[-MOST_PARTS // 2 :]
    texts: list[str] = []
    media: list[bytes] = []
    for part in parts:
        if part.text is not _UNSET:
            texts.append(_text(part.text))
        for one in (part.image_url, part.video_url, part.input_audio, part.source, part.file):
            if one is not _UNSET:
                media.append(xxh3_128_digest(_unsigned(one)))
        if part.file_id is not _UNSET:
            media.append(xxh3_128_digest(part.file_id))
    said = mark("\n".join(texts))
    return xxh3_128_digest(said + b"".join(media)) if media else said


def _unsigned(raw: Any) -> Any:  # Any: as above
    """A medium without the query of a signed address, which each turn signs anew."""
    if len(raw) > LONGEST_ADDRESS_BYTES:
        return raw
    data = bytes(raw)
    at = data.find(b"?")
    return data[:at] if at > 0 and _SIGNED.search(data, at) else raw


def _mark_of_prompt(raw: Any) -> bytes:  # Any: as above
    beginning = bytes(memoryview(raw)[:PROMPT_KEY_BYTES])
    if len(beginning) < PROMPT_KEY_BYTES or beginning[:1] != _QUOTE:
        return _mark_of(beginning) or xxh3_128_digest(beginning)
    return mark(_cut_text(beginning[1:], -1))


def _text(raw: Any) -> str:  # Any: as above
    """The text of a JSON string; of a long one the beginning and the end."""
    if len(raw) <= 2 * HALF_TEXT_BYTES:
        text = _value(raw)
        return text if isinstance(text, str) else ""
    view = memoryview(raw)
    beginning, end = bytes(view[1:HALF_TEXT_BYTES]), bytes(view[-HALF_TEXT_BYTES:-1])
    return _cut_text(beginning, -1) + _cut_text(end, 0)


def _cut_text(data: bytes, side: int) -> str:
    """Decode a part of a JSON string. side: where it was cut, perhaps inside a character or an
    escape; 0: at its beginning, -1: at its end."""
    for _ in range(LONGEST_ESCAPE):
        text = _value(Raw(b'"%b"' % data))
        if isinstance(text, str):
            return text
        data = data[:-1] if side else data[1:]
    return ""


def peek_request(body: bytes, usual: ModelName | None = None) -> RequestPeek:
    """Peek into a request. usual: the model's name that most requests have. Raises:
    UnreadableBodyError when the body is not a JSON object."""
    try:
        return RequestPeek(body, TYPED.decode(body), usual)
    except RecursionError as error:  # vLLM, which is deeper in its stack, cannot read it either
        raise UnreadableBodyError(unreadable_body(TOO_DEEP)) from error
    except ValueError:
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
        try:
            return json.loads(bytes(raw))  # with NaN and lone surrogates, in ten times the time
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
