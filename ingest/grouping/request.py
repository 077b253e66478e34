"""What a chat request means for sampling, with vLLM's defaults and implicit grammars. Pure.

The fields are those of `/v1/chat/completions` in vLLM 0.32, in four lists: fields that form the
prompt or end the answer (kept in a candidate's request); fields that set the sampling (replaced,
because a trainer can recompute log-probabilities only for temperature-only sampling); fields that
change which tokens may be sampled (kept; `ingest.grouping.features` says when it is learned from);
and fields without effect on sampling. A field on none of the lists is not sent for candidates, and
the served answer of a request with such a field is not exchangeable with them.

vLLM also builds a grammar for a tool with `strict: true`, and for `parallel_tool_calls: false` when
there are tools; both apply with `tool_choice` auto, and no field of the masking list names them.
vLLM reads booleans loosely (1 and "yes" are true, 0 and "off" are false), so every value except the
one that certainly has no effect counts as set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ingest.records import Answer
from sidecar.records import Exchange, Sampling
from sidecar.settings import SamplingField, Serving

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


def masking_fields(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields by which the request forbids tokens during sampling; `STRICT_TOOLS` for the
    `strict` of a tool."""
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


# Facts about vLLM that no request shows: sampling defaults and implicit grammars. Pure.

Grammar = Literal["as_asked", "with_tools", "always"]
"""The requests for which vLLM forbids tokens: those that ask for it, those with tools, or all."""
FLAG = "engine_facts"
"""Row of the `flag` table: the latest facts as JSON, written by ingest."""
NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
"""Sampling fields that vLLM may fill -> values without effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about a vLLM. A field is None while it is unknown."""

    defaults: frozenset[str] | None = None
    """Fields of `NEUTRAL` that vLLM fills with another value when the request leaves them out."""
    grammar: Grammar | None = None

    @property
    def known(self) -> bool:
        return self.defaults is not None and self.grammar is not None


UNKNOWN = EngineFacts()


def merge(found: Iterable[EngineFacts]) -> EngineFacts:
    """Merge the facts of several replicas: each field is as restrictive as on the worst replica."""
    order: tuple[Grammar | None, ...] = ("as_asked", None, "with_tools", "always")
    facts = list(found)
    fields = [one.defaults for one in facts]
    return EngineFacts(
        defaults=None if None in fields else frozenset().union(*(one or () for one in fields)),
        grammar=max((one.grammar for one in facts), key=order.index),
    )


def state(facts: EngineFacts, serving: Serving) -> EngineFacts:
    """Override the facts with those that the operator states in the settings."""
    return EngineFacts(
        defaults=facts.defaults if serving.sampling_defaults is None else frozenset(),
        grammar=facts.grammar if serving.grammar == "find_out" else serving.grammar,
    )


def dump_facts(facts: EngineFacts) -> str:
    """Serialise the facts as JSON, for the `flag` table."""
    fields = None if facts.defaults is None else sorted(facts.defaults)
    return msgspec.json.encode({"defaults": fields, "grammar": facts.grammar}).decode()


def load_facts(text: str) -> EngineFacts:
    """Inverse of `dump_facts`. Returns: `UNKNOWN` for unreadable text."""
    try:
        return msgspec.json.decode(text, type=EngineFacts)
    except (msgspec.MsgspecError, UnicodeError):
        return UNKNOWN


def fill(sampling: Sampling, stated: Mapping[SamplingField, float] | None) -> Sampling:
    """Complete the sampling with the operator's values for fields that the request leaves out."""
    missing: dict[str, Any] = {
        name: value for name, value in (stated or {}).items() if getattr(sampling, name) is None
    }
    if "top_k" in missing:
        missing["top_k"] = int(missing["top_k"])
    return msgspec.structs.replace(sampling, **missing) if missing else sampling


def why_unsaid(sampling: Sampling, defaults: frozenset[str] | None) -> str | None:
    """Return the reason why the value of a missing field is unknown; None when all are known."""
    unsaid = [name for name in NEUTRAL if getattr(sampling, name) is None]
    if defaults is None:
        return "defaults_unknown" if unsaid else None
    return next((f"unsaid_{name}" for name in unsaid if name in defaults), None)


def why_masked(request: Mapping[str, Any], grammar: Grammar | None) -> str | None:
    """Return the reason why vLLM may have forbidden tokens unasked; None when it has not."""
    if grammar == "always":
        return "masked_by_server"
    if not has_tools(request) or grammar == "as_asked":
        return None
    return "masking_unknown" if grammar is None else "masked_by_server"


# Read the sampling defaults in the base model's `generation_config.json`.

FILES = ("generation_config.json", "config.json")
MAX_BYTES = 2**20
UNREADABLE = (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read_defaults(base_model_path: str) -> frozenset[str] | None:
    """Return the fields that the base model's files set to a value that is not neutral.

    Returns: None when that is unknown: no path, no such folder, not in the Hugging Face Hub cache,
        or an unreadable file.
    """
    if not base_model_path:
        return None
    folder = Path(base_model_path)
    is_folder = folder.is_dir()
    for name in FILES:
        path = folder / name if is_folder else _in_hub_cache(base_model_path, name)
        if path is None:
            return None
        if path.is_file():
            return _fields(path)
    return frozenset() if is_folder else None


def _fields(path: Path) -> frozenset[str] | None:
    try:
        with path.open("rb") as file:
            values = msgspec.json.decode(file.read(MAX_BYTES), type=dict[str, Any])
    except UNREADABLE:
        return None
    return frozenset(
        name for name, neutral in NEUTRAL.items() if values.get(name) not in (None, *neutral)
    )


def _in_hub_cache(name: str, file: str) -> Path | None:
    """Find a file in this machine's Hugging Face Hub cache.

    Returns: a path, which does not exist when the Hub has no such file; None when the cache does
        not know.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    if found is None:
        return None
    return Path(found) if isinstance(found, str) else Path(f"{name}/{file}.not-on-the-hub")


# Decide whether a served answer is exchangeable with the sampled candidates. Pure.

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]

DEFAULT_TEMPERATURE = 1.0
"""vLLM's temperature when neither the request nor the model's generation_config sets one."""
RAISED_BELOW = 0.01
"""vLLM raises a temperature between 0 and this to this (its `_MAX_TEMP`)."""
IMPOSSIBLE_LOGPROB = -9999.0
"""Value that vLLM's API writes for minus infinity."""


def candidate_temperature(sampling: Sampling, mode: LogprobsMode) -> float:
    """Return the temperature for candidates: the request's, or 1 if that would teach nothing.

    Greedy answers are all equal, so 0 becomes 1, and so do temperatures that vLLM raises to 0.01.
    Raw log-probabilities do not include the temperature, so with them only 1 is exact.
    """
    if mode == "raw_logprobs" or _temperature(sampling) < RAISED_BELOW:
        return DEFAULT_TEMPERATURE
    return _temperature(sampling)


def served_answers(
    exchange: Exchange,
    request: Mapping[str, Any],
    *,
    sampling: Sampling,
    defaults: frozenset[str] | None,
    mode: LogprobsMode,
    limit: int,
) -> tuple[Answer, ...]:
    """Convert the reply's choices to the first answers of a group, at most `limit` of them.

    sampling: the exchange's, completed with the operator's values for missing fields.
    defaults: fields that vLLM fills with an unknown value; None: any field may be.
    """
    masked = (
        why_unsaid(sampling, defaults)
        or _why_not_sampled_alike(sampling, mode)
        or ("unknown_field" if unknown_field(request) else None)
    )
    return tuple(
        Answer(
            index=place,
            origin="served",
            message=choice.message,
            finish_reason=choice.finish_reason,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            temperature=_temperature(sampling),
            untrainable_reason=masked or why_inexact(choice.token_ids, choice.logprobs),
        )
        for place, choice in enumerate(exchange.choices[:limit])
    )


def why_inexact(token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> str | None:
    """Return the defect of an answer's token ids and log-probabilities; None when exact."""
    if not token_ids:
        return "no_token_ids"
    if len(token_ids) != len(logprobs):
        return "lengths_differ"
    if not all(math.isfinite(value) and value > IMPOSSIBLE_LOGPROB for value in logprobs):
        return "logprob_not_finite"
    return None


def _why_not_sampled_alike(sampling: Sampling, mode: LogprobsMode) -> str | None:
    if sampling.temperature == 0:
        return "temperature_zero"
    if _temperature(sampling) < RAISED_BELOW:
        return "temperature_raised"
    if _temperature(sampling) != candidate_temperature(sampling, mode):
        return "temperature_differs"
    for name, neutral in NEUTRAL.items():
        value = getattr(sampling, name)
        if name != "temperature" and value is not None and value not in neutral:
            return name
    return None


def _temperature(sampling: Sampling) -> float:
    return DEFAULT_TEMPERATURE if sampling.temperature is None else sampling.temperature
