"""What each field of a chat request means to sampling. Pure.

vLLM 0.32's `/v1/chat/completions`. Fields fall into four lists: those that make the prompt or end
the answer (kept in a candidate's request), those that say how to sample (replaced, because only
temperature-only sampling has log-probabilities that a trainer can recompute), those that forbid
tokens (kept, and no reason to train: the trainer cannot recompute the mask), and those that do not
matter to what is sampled. A field that is in none of them is not sent for candidates, and the
served answer of a request with one is not taken to be exchangeable with them.
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

_UNMASKED_FORMATS: tuple[dict[str, str], ...] = ({}, {"type": "text"})
_UNMASKED_TOOL_CHOICES = ("auto", "none")


def masking_field(request: Mapping[str, Any]) -> str | None:
    """The field, if any, by which the request forbids tokens while they are sampled."""
    for name in sorted(MASKING_FIELDS & request.keys()):
        value = request[name]
        if name == "response_format" and value in _UNMASKED_FORMATS:
            continue
        if value:  # null, false, 0 and empty ask for nothing
            return name
    tool_choice = request.get("tool_choice")
    # A named function or "required" is held to by a grammar.
    return "tool_choice" if tool_choice and tool_choice not in _UNMASKED_TOOL_CHOICES else None


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
        "logprobs": True,
        "return_token_ids": True,
    }
    if max_tokens is not None:
        body["max_completion_tokens"] = max_tokens
    if seed is not None:
        body["seed"] = seed
    return body
