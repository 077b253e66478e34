"""What each field of a chat request means to sampling. Pure.

vLLM 0.32's `/v1/chat/completions`. Fields fall into four lists: those that make the prompt or end
the answer (kept in a candidate's request), those that say how to sample (replaced, because only
temperature-only sampling has log-probabilities that a trainer can recompute), those that forbid
tokens (kept, and the exchange is not learned from: the trainer cannot recompute the mask), and
those that do not matter to what is sampled. A field that is in none of them is not sent for
candidates, and the served answer of a request with one is not taken to be exchangeable with them.

vLLM also builds a grammar that no field of the masking list names: from a tool with `strict: true`,
and from `parallel_tool_calls: false` where there are tools. Both apply with `tool_choice` auto.
vLLM reads truth values loosely (1 and "yes" are true, 0 and "off" are false), so any value other
than the one that certainly asks for nothing counts as asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# One name a line would hide that these are four lists.
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
KNOWN_FIELDS = PROMPT_FIELDS | SAMPLING_FIELDS | MASKING_FIELDS | PASSIVE_FIELDS

STRICT_TOOLS = "strict_tools"
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
    """The field, if any, by which the request forbids tokens while they are sampled.

    Returns: the field's name; `STRICT_TOOLS` where it is the `strict` of a tool.
    """
    for name in sorted(MASKING_FIELDS & request.keys()):
        if _asks(name, request[name]):
            return name
    tool_choice = request.get("tool_choice")
    # A named function or "required" is held to by a grammar.
    if tool_choice and tool_choice not in _UNMASKED_TOOL_CHOICES:
        return "tool_choice"
    if not has_tools(request) or tool_choice == "none":
        return None
    if request.get("parallel_tool_calls") not in (None, True):
        return "parallel_tool_calls"
    return STRICT_TOOLS if any(map(_is_strict, request["tools"])) else None


def _asks(name: str, value: Any) -> bool:  # Any: JSON
    """Whether a masking field of this value asks for anything."""
    if name == "response_format":
        return value is not None and value not in _UNMASKED_FORMATS
    if name == "thinking_token_budget":
        return value not in (None, -1)  # 0 forbids thinking
    return bool(value)  # null, false, 0 and empty ask for nothing


def _is_strict(tool: Any) -> bool:  # Any: JSON
    """Whether a tool, or its function, asks for its schema to be kept to."""
    if not isinstance(tool, Mapping):
        return False
    function = tool.get("function")
    holders = (tool, function) if isinstance(function, Mapping) else (tool,)
    return any(holder.get("strict") not in (None, False) for holder in holders)


def has_tools(request: Mapping[str, Any]) -> bool:
    """Whether the request shows tools to the model."""
    tools = request.get("tools")
    return isinstance(tools, list) and bool(tools)


def has_media(request: Mapping[str, Any]) -> bool:
    """Whether a message holds anything but text.

    The token ids of such a prompt have placeholders for the image or sound, from which a trainer
    cannot recompute what the model saw.
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
    """A field, if any, whose meaning to sampling is not known here."""
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
) -> dict[str, Any]:
    """The body that asks for one more answer to the same prompt, exact and not streamed.

    Every sampling field is said: a field left out would take the default of the model's own
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
    return body
