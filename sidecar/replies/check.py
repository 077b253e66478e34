"""Why an answer must not be learned from: what vLLM says of it is missing or contradicts itself.

Pure, and without a tokenizer: what is compared are the reply's own statements. Ingest decodes the
token ids besides, in its own process, and sees what escapes here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from sidecar.records import Surface
from sidecar.replies.parts import ReadChoice, ReadReply

TEXT_SURFACES: frozenset[Surface] = frozenset({"responses", "messages"})
"""vLLM gives no token ids on these."""
_TOKEN_AS_ID = "token_id:"
_LOST_CHARACTER = "\ufffd"


def untrainable(reply: ReadReply, surface: Surface, asked: str) -> str | None:
    """Why a reply that could be read and that no failure cut short must not be learned from, or
    None. The reasons stand in the data dictionary.

    asked: the model name that vLLM was asked for.
    """
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
    if not reply.prompt_token_ids or 0 in tokens:
        return "ids_missing"
    if 0 in logprobs:
        return "logprobs_missing"
    if tokens != logprobs or reply.completion_tokens not in (None, sum(tokens)):
        return "count_mismatch"
    for choice in choices:
        if not isfinite(sum(choice.logprobs)):
            return "logprobs_not_finite"
    for choice in choices:
        if not text_agrees(choice):
            return "text_mismatch"
    return None


def text_agrees(choice: ReadChoice) -> bool:
    """Whether the tokens that the log-probabilities name make up the text that was served.

    A plain text must be the tokens joined. Three things are granted: the token or stop string that
    ended it is not part of the text; a tokenizer of the SentencePiece family drops the space before
    a word when it decodes one token alone, so a text that agrees but for spaces agrees; characters
    that never became whole are U+FFFD in the text and nothing in the tokens. A special token in the
    middle, which vLLM leaves out of the text, is not granted.

    Where a parser took reasoning or tool calls out of the text, only parts can be compared: the
    content, the reasoning and each call's name must stand in what was sampled. The arguments
    cannot be: parsers write them anew, and not every model calls in JSON. That finds token ids lost
    from a stream with a tool parser (a fault that vLLM has had, 27482) where they were of a
    compared part; `usage`, where it was sent, finds them always.

    When the client asked for `return_tokens_as_token_ids`, the tokens must be the ids.
    """
    texts = choice.token_texts
    message = choice.message
    content = message.get("content")
    if len(texts) == 0:
        return True  # log-probabilities of a form without texts: nothing to compare
    sampled = "".join(texts)
    if content == sampled and len(message) <= 2:
        return True
    if texts[0].startswith(_TOKEN_AS_ID):
        return texts == [f"{_TOKEN_AS_ID}{token}" for token in choice.token_ids]
    if message.get("tool_calls") or message.get("reasoning"):
        return _parts_stand_in(choice, _loose(sampled))
    text = content if isinstance(content, str) else ""
    return _makes_up(choice, text, sampled, _same) or _makes_up(
        choice, _loose(text), _loose(sampled), _loose
    )


def _makes_up(choice: ReadChoice, text: str, sampled: str, form: Callable[[str], str]) -> bool:
    """Whether the text is what was sampled, but for what ended it. form: of text and sampled."""
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
    # `include_stop_str_in_output` leaves it in the text.
    return behind.startswith(form(stop)) or text.endswith(form(stop))


def _same(text: str) -> str:
    return text


def _parts_stand_in(choice: ReadChoice, sampled: str) -> bool:
    message = choice.message
    parts = [message.get("content"), message.get("reasoning")]
    parts += [call.get("function", {}).get("name") for call in message.get("tool_calls") or ()]
    return all(_loose(part) in sampled for part in parts if isinstance(part, str))


def _loose(text: str) -> str:
    """The text without what may differ: white space and characters that were never whole."""
    return "".join(text.split()).replace(_LOST_CHARACTER, "")
