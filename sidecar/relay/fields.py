"""What is read of a request's body, as msgspec decodes it.

Apart from what works with it: msgspec reads the annotations of a class, and a module that mypyc
compiles does not keep them (see setup.py). So this module never is.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

from sidecar.records import SampledFields, Value


class Message(msgspec.Struct, gc=False):
    role: Value = UNSET
    content: Value = UNSET


class Part(msgspec.Struct, gc=False):
    """A part of a message's content: what it says, without ids and marks of caches."""

    text: Value = UNSET
    image_url: Value = UNSET
    video_url: Value = UNSET
    input_audio: Value = UNSET
    source: Value = UNSET
    file: Value = UNSET
    file_id: Value = UNSET


class RequestFields(SampledFields, gc=False):
    model: Value = UNSET
    user: Value = UNSET
    stream_options: Value = UNSET
    return_token_ids: Value = UNSET
    logprobs: Value = UNSET
    top_logprobs: Value = UNSET
    logprob_token_ids: Value = UNSET
    echo: Value = UNSET
    system: Value = UNSET
    metadata: Value = UNSET
    instructions: Value = UNSET
    input: Value = UNSET
    prompt: Value = UNSET
    prompt_cache_key: Value = UNSET
    session_id: Value = UNSET
    litellm_session_id: Value = UNSET
    conversation: Value = UNSET


class TypedFields(RequestFields):
    messages: list[Message] | UnsetType = UNSET


class LooseFields(RequestFields):
    messages: Value = UNSET


TYPED = msgspec.json.Decoder(TypedFields)
LOOSE = msgspec.json.Decoder(LooseFields)
ITEMS = msgspec.json.Decoder(list[Message])
PARTS = msgspec.json.Decoder(list[Part])


class Tail(msgspec.Struct, gc=False):
    model: Raw


TAIL = msgspec.json.Decoder(Tail)
FRONT = msgspec.json.Decoder(dict[str, Raw])


# What is read of a reply's body or event, as msgspec decodes it.


class ChoiceFields(msgspec.Struct, gc=False):
    delta: Raw | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    finish_reason: Raw | UnsetType = UNSET
    token_ids: Raw | UnsetType = UNSET
    prompt_token_ids: Raw | UnsetType = UNSET


class ReplyFields(msgspec.Struct, gc=False):
    choices: list[ChoiceFields] | UnsetType = UNSET
    prompt_token_ids: Raw | UnsetType = UNSET
    usage: Raw | UnsetType = UNSET


class UsageFields(msgspec.Struct, gc=False):
    """The token counts of any surface: first the names of chat, completions and embeddings, then
    those of the others."""

    prompt_tokens: int | None = None
    total_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


REPLY = msgspec.json.Decoder(ReplyFields)
USAGE = msgspec.json.Decoder(UsageFields)
