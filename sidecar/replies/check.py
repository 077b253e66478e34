"""Find out why an answer must not be trained on: vLLM's report is incomplete or inconsistent.

Pure, and without a tokenizer: only statements of the reply itself are compared. Ingest also decodes
the token ids, in its own process, and finds what this check cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from sidecar.records import Surface
from sidecar.replies import choices, items, parts
from sidecar.replies.parts import ReadChoice, ReadReply, UnreadableReplyError

TEXT_SURFACES: frozenset[Surface] = frozenset({"responses", "messages"})
"""Surfaces on which vLLM gives no token ids."""
_TOKEN_AS_ID = "token_id:"
_LOST_CHARACTER = "\ufffd"
_PARTS = ("tool_calls", "reasoning", "refusal")
"""Parts of an answer that a parser takes out of the sampled text."""


def untrainable(
    reply: ReadReply, surface: Surface, asked: str, *, tools: bool = True
) -> str | None:
    """Return why a complete, readable reply must not be trained on, or None: a reason of
    docs/data-dictionary.md. asked: the model name in the request to vLLM. tools: the request may
    have offered tools."""
    choices = list(reply.choices.values())
    if not choices:
        return "no_choices"
    if not reply.ended:
        return "stream_incomplete"
    if reply.models != {asked}:
        return "model_mismatch"
    if surface in TEXT_SURFACES:
        return "text_only"
    if reply.several_prompts:
        return "several_prompts"
    tokens = [len(choice.token_ids) for choice in choices]
    logprobs = [len(choice.logprobs) for choice in choices]
    if not reply.prompt_ids or 0 in tokens:
        return "ids_missing"
    if 0 in logprobs:
        return "logprobs_missing"
    if tokens != logprobs or reply.completion_tokens not in (None, sum(tokens)):
        return "count_mismatch"
    for choice in choices:
        if not isfinite(sum(choice.logprobs)):
            return "logprobs_not_finite"
    for choice in choices:
        if not text_agrees(choice, tools=tools):
            return "text_mismatch"
    return None


def text_agrees(choice: ReadChoice, *, tools: bool) -> bool:
    """Return True if the tokens named by the log-probabilities make up the served text.

    A plain text must equal the joined tokens, with three exceptions. The token or stop string that
    ended the answer is not part of the text. SentencePiece tokenizers drop the space before a word
    when they decode a single token, so differences in spaces are ignored. Characters that never
    became complete are U+FFFD in the text and absent from the tokens. A special token in the
    middle, which vLLM leaves out of the text, is no exception.

    When a parser took reasoning or tool calls out of the text, only parts can be compared: the
    content, the reasoning, the refusal and the name of each call must occur in the sampled text.
    Arguments are not compared, because parsers rewrite them and not every model writes JSON. This
    finds token ids that vLLM lost from a stream with a tool parser (vLLM issue 27482) when they
    belong to a compared part; `usage`, when it was sent, always finds them.

    When the request offered tools, the text may be only the beginning of what was sampled: a tool
    parser sends nothing of a call that it cannot read, such as one that the token limit cut. In a
    whole reply vLLM gives such a call as content, so it is trained on in either form.

    When the client sent `return_tokens_as_token_ids`, the tokens must be the ids.
    """
    texts = choice.token_texts
    message = choice.message
    content = message.get("content")
    if len(texts) == 0:
        return True  # log-probabilities without token texts: nothing to compare
    sampled = "".join(texts)
    if content == sampled and len(message) <= 2:
        return True
    if texts[0].startswith(_TOKEN_AS_ID):
        return texts == [f"{_TOKEN_AS_ID}{token}" for token in choice.token_ids]
    if any(message.get(key) for key in _PARTS):
        return _parts_stand_in(choice, _loose(sampled))
    text = content if isinstance(content, str) else ""
    loose, loosely_sampled = _loose(text), _loose(sampled)
    return (
        _makes_up(choice, text, sampled, str)
        or _makes_up(choice, loose, loosely_sampled, _loose)
        or (tools and loosely_sampled.startswith(loose))
    )


def withheld(choice: ReadChoice) -> str:
    """Return what was sampled behind the text that was served, without the token or stop string
    that ended the answer: what a tool parser kept back. Empty when the text is all. Spaces may be
    lost where a tokenizer decodes single tokens without them."""
    texts, message = choice.token_texts, choice.message
    sampled, text = "".join(texts), message["content"] or ""
    named = bool(texts) and not texts[0].startswith(_TOKEN_AS_ID)
    plain = isinstance(text, str) and not any(message.get(key) for key in _PARTS)
    if not (named and plain and sampled.startswith(text)):
        return ""
    behind = sampled[len(text) :]
    if choice.finish_reason == "stop":
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else texts[-1]
        behind = behind[: behind.rfind(stop)] if stop in behind else ""
    return behind.rstrip(_LOST_CHARACTER)


def _makes_up(choice: ReadChoice, text: str, sampled: str, form: Callable[[str], str]) -> bool:
    """Return True if the text is the sampled text without its end. form: normalises both."""
    if text == sampled:
        return True
    if choice.finish_reason != "stop" or not sampled.startswith(text):
        return False
    behind = sampled[len(text) :]
    last, stop = form(choice.token_texts[-1]), choice.stop_reason
    if not isinstance(stop, str):
        return behind == last
    if not form(stop):
        return last.endswith(behind)
    # `include_stop_str_in_output` leaves the stop string in the text.
    return behind.startswith(form(stop)) or text.endswith(form(stop))


def _parts_stand_in(choice: ReadChoice, sampled: str) -> bool:
    message = choice.message
    parts = [message.get(key) for key in ("content", "reasoning", "refusal")]
    parts += [call.get("function", {}).get("name") for call in message.get("tool_calls") or ()]
    return all(_loose(part) in sampled for part in parts if isinstance(part, str))


def _loose(text: str) -> str:
    """Remove what may differ: white space and incomplete characters."""
    return "".join(text.split()).replace(_LOST_CHARACTER, "")


# Read a captured reply of any surface. Pure.

WHOLE: dict[Surface, Callable[[bytes], ReadReply]] = {
    "chat": choices.read_whole,
    "completions": choices.read_whole,
    "responses": items.read_whole,
    "messages": parts.read_whole,
}
STREAM: dict[Surface, Callable[[Sequence[bytes]], ReadReply]] = {
    "chat": choices.read_stream,
    "completions": choices.read_stream,
    "responses": items.read_stream,
    "messages": parts.read_stream,
}


def read_reply(surface: Surface, chunks: Sequence[bytes], *, streamed: bool) -> ReadReply:
    """Read a reply. Raises: UnreadableReplyError, also when the body has another surface's form.
    chunks: the body as vLLM sent it, cut anywhere. streamed: it is a stream of events."""
    if surface not in WHOLE:
        raise UnreadableReplyError(f"replies of {surface} are not captured")
    if streamed:
        return STREAM[surface](chunks)
    return WHOLE[surface](chunks[0] if len(chunks) == 1 else b"".join(chunks))
