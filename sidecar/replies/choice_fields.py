"""The fields that are read from a reply of chat or text completions, as msgspec decodes them."""

from __future__ import annotations

import msgspec

from sidecar.replies.parts import JsonObject


# Fields stand in vLLM's order, because msgspec tries the next field first.
class Entry(msgspec.Struct, gc=False, kw_only=True):
    token: str | None = None
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    content: list[Entry] | None = None
    """Log-probabilities in the form of chat completions."""
    tokens: list[str] | None = None
    """Log-probabilities in the form of text completions: two lists."""
    token_logprobs: list[float | None] | None = None


class ChoiceFields(msgspec.Struct, gc=False):
    index: int = 0
    delta: JsonObject | None = None
    message: JsonObject | None = None
    text: str | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class Content(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: str | None = None


class OneLogprob(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: tuple[Entry]


class UsualChoice(msgspec.Struct, gc=False):
    """A choice with one token and its text, and nothing else; msgspec refuses any other field.
    Reading it takes a sixth less time than `ChoiceFields`."""

    delta: Content
    logprobs: OneLogprob
    token_ids: tuple[int]
    index: int = 0
    finish_reason: None = None
    stop_reason: int | str | None = None
    message: None = None
    text: None = None
    prompt_token_ids: None = None


class UsageFields(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


class ReplyFields(msgspec.Struct, gc=False):
    model: str | None = None
    choices: list[ChoiceFields] = []
    usage: UsageFields | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    error: object = None
    """An object when a stream failed; a string from vLLM's own key check."""


REPLY = msgspec.json.Decoder(ReplyFields)
CHOICE = msgspec.json.Decoder(ChoiceFields)
USUAL = msgspec.json.Decoder(UsualChoice)
