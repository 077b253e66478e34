"""The meaning of each chat request field for sampling. Pure.

The fields are those of `/v1/chat/completions` in vLLM 0.32, in four lists: fields that form the
prompt or end the answer (kept in a candidate's request); fields that set the sampling (replaced,
because a trainer can recompute log-probabilities only for temperature-only sampling); fields that
change which tokens may be sampled (kept; `ingest.grouping.masks` says when it is learned from); and
fields without effect on sampling. A field on none of the lists is not sent for candidates, and
the served answer of a request with such a field is not exchangeable with them.

vLLM also builds a grammar for a tool with `strict: true`, and for `parallel_tool_calls: false` when
there are tools; both apply with `tool_choice` auto, and no field of the masking list names them.
vLLM reads booleans loosely (1 and "yes" are true, 0 and "off" are false), so every value except the
one that certainly has no effect counts as set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# One name per line would hide that these are four lists.
# fmt: off
PROMPT_FIELDS = frozenset({
    "messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
    "include_reasoning", "documents", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "media_io_kwargs", "mm_processor_kwargs",
    "cache_salt", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens",
})
SAMPLING_FIELDS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "max_completion_tokens", "n",
})
MASKING_FIELDS = frozenset({
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "ignore_eos",
    "use_beam_search", "thinking_token_budget", "logits_processors", "repetition_detection",
    "watermarking",
})
PASSIVE_FIELDS = frozenset({
    "model", "user", "stream", "stream_options", "stream_interval", "logprobs", "top_logprobs",
    "length_penalty", "prompt_logprobs", "logprob_token_ids", "return_token_ids",
    "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text", "echo", "priority",
    "request_id", "session_id", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key",
})
# fmt: on
STRICT_TOOLS = "strict_tools"
HARD_MASKS = frozenset({
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "allowed_token_ids", "bad_words", "min_tokens", "tool_choice",
    "parallel_tool_calls", STRICT_TOOLS,
})  # fmt: skip
"""The masking fields that leave a token as it is or make it impossible. The other masking fields
move log-probabilities, force tokens or end answers."""
KNOWN_FIELDS = PROMPT_FIELDS | SAMPLING_FIELDS | MASKING_FIELDS | PASSIVE_FIELDS

_UNMASKED_FORMATS: tuple[dict[str, str], ...] = ({}, {"type": "text"})
_UNMASKED_TOOL_CHOICES = ("auto", "none")
_TEXT_PARTS = frozenset({
    "text", "input_text", "output_text", "refusal", "thinking", "tool_reference",
})  # fmt: skip
_MEDIA_KEYS = frozenset({
    "image_url", "input_image", "image_pil", "image_embeds", "audio_url", "input_audio",
    "audio_embeds", "video_url", "video_embeds", "prompt_embeds",
})  # fmt: skip


def masking_field(request: Mapping[str, Any]) -> str | None:
    """Return the first field, if any, by which the request forbids tokens during sampling.

    Returns: the field's name; `STRICT_TOOLS` for the `strict` of a tool.
    """
    return next(masking_fields(request), None)


def masking_fields(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield all of them."""
    for name in sorted(MASKING_FIELDS & request.keys()):
        if _asks(name, request[name]):
            yield name
    tool_choice = request.get("tool_choice")
    # vLLM enforces a named function or "required" with a grammar.
    if tool_choice and tool_choice not in _UNMASKED_TOOL_CHOICES:
        yield "tool_choice"
    if not has_tools(request) or tool_choice == "none":
        return
    if request.get("parallel_tool_calls") not in (None, True):
        yield "parallel_tool_calls"
    if any(map(_is_strict, request["tools"])):
        yield STRICT_TOOLS


def _asks(name: str, value: Any) -> bool:  # Any: JSON
    """Return True when a masking field with this value has an effect."""
    if name == "response_format":
        return value is not None and value not in _UNMASKED_FORMATS
    if name == "thinking_token_budget":
        return value not in (None, -1)  # 0 forbids thinking
    return bool(value)  # null, false, 0 and empty ask for nothing


def _is_strict(tool: Any) -> bool:  # Any: JSON
    """Return True when a tool, or its function, enforces its schema."""
    if not isinstance(tool, Mapping):
        return False
    function = tool.get("function")
    holders = (tool, function) if isinstance(function, Mapping) else (tool,)
    return any(holder.get("strict") not in (None, False) for holder in holders)


def has_tools(request: Mapping[str, Any]) -> bool:
    """Return True when the request shows tools to the model."""
    tools = request.get("tools")
    return isinstance(tools, list) and bool(tools)


def has_media(request: Mapping[str, Any]) -> bool:
    """Return True when a message holds an image, sound or other media.

    The token ids of such a prompt hold placeholders for the media, so a trainer cannot recompute
    what the model saw.
    """
    messages = request.get("messages")
    if not isinstance(messages, list):
        return False
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return any(
        _is_media(part) for content in contents if isinstance(content, list) for part in content
    )


def _is_media(part: Any) -> bool:  # Any: JSON
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return not (isinstance(kind, str) and kind in _TEXT_PARTS) or bool(_MEDIA_KEYS & part.keys())


def unknown_field(request: Mapping[str, Any]) -> str | None:
    """Return a field that is on none of the lists, or None."""
    return min(
        (name for name in request.keys() - KNOWN_FIELDS if request[name] is not None), default=None
    )


def candidate_body(
    request: Mapping[str, Any],
    *,
    upstream_model: str,
    temperature: float,
    max_tokens: int | None,
    seed: int | None = None,
    priority: int | None = None,
) -> dict[str, Any]:
    """Build the request for one more answer to the same prompt, not streamed.

    priority: vLLM's, lower comes first; None: the field is left out.

    Every sampling field is set: a missing one would take its default from the model's own
    `generation_config`, which often holds a top_p or a top_k.
    """
    body = {
        name: value
        for name, value in request.items()
        if name in PROMPT_FIELDS or name in MASKING_FIELDS
    }
    body |= {
        "model": upstream_model,
        "n": 1,
        "stream": False,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "watermarking": False,
        "logprobs": True,
        "return_token_ids": True,
    }
    if max_tokens is not None:
        body["max_completion_tokens"] = max_tokens
    if seed is not None:
        body["seed"] = seed
    if priority is not None:
        body["priority"] = priority
    return body
