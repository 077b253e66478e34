"""What is read of a reply's body or event, as msgspec decodes it.

Apart from what works with it: msgspec reads the annotations of a class, and a module that mypyc
compiles does not keep them (see setup.py). So this module never is.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType


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
