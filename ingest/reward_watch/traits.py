"""What one answer is, by rules that ask no judge: refused, cut, in a loop, and so on. Pure.

The work for an answer is bounded: of 100,000 tokens only the ends are looked at, beside one pass
that decodes its JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from ingest.reward_watch.repetition import LOOPS, TAIL, repeated_share
from ingest.reward_watch.tool_calls import fault_of_calls
from ingest.reward_watch.wording import HEAD, is_clarifying, is_refusal
from sidecar.replies.parts import answer_text

Kind = Literal["refusal", "clarifying", "invalid_call", "repetition", "empty", "cut"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits of one answer, each by the rule of its name in docs/reward-watch.md."""

    refusal: bool = False
    clarifying: bool = False
    """It asks the user for something instead of answering."""
    invalid_call: bool = False
    """It calls a tool that is not offered, or with arguments that do not fit."""
    repetition: bool = False
    """It ends in a loop."""
    empty: bool = False
    """It has neither content nor tool calls."""
    cut: bool = False
    """The token limit ended it."""


def traits_of(message: bytes, *, finish_reason: str | None, tools: object) -> Traits:
    """Find the traits of an answer.

    message: the assistant message as JSON. tools: `tools` of its request; any JSON.
    Raises: ValueError when the message is no JSON object.
    """
    try:
        parsed = msgspec.json.decode(message, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the message is no JSON object: {error}") from error
    text = answer_text(parsed)
    calls = bool(parsed.get("tool_calls"))
    own = text.strip() if len(text) <= HEAD else text
    return Traits(
        refusal=not calls and (bool(parsed.get("refusal")) or is_refusal(own)),
        clarifying=not calls and is_clarifying(own),
        invalid_call=fault_of_calls(parsed, tools) is not None,
        repetition=repeated_share(text[-TAIL:]) >= LOOPS,
        empty=not calls and not text.strip(),
        cut=finish_reason == "length",
    )


def needs_tools(message: bytes) -> bool:
    """Return True when the tools of its request may tell something of an answer."""
    return (
        b'"tool_calls"' in message
        or b"tool_call" in message
        or b"<function=" in message
        or (b"<|python_tag|>" in message or b"[TOOL_CALLS]" in message)
    )
