"""The rule by which the demo's stand-in judge scores an answer. Pure, and all of it is here.

It stands in for a judgement: it reads form and not truth, which is enough to show a loop that
learns and too little to train anything for users. A score is 0..1, the sum of

| weight | part     | full marks for                                                               |
|--------|----------|------------------------------------------------------------------------------|
| 0.35   | complete | three equal checks: at least 4 words; ends in `.`, `!` or `?`; plain text    |
| 0.25   | polite   | at least one courtesy marker (`COURTESY`)                                    |
| 0.35   | short    | one sentence of at most 20 words: 1 / sentences, times a ramp to 0 at 60     |
| 0.05   | brevity  | breaks ties: 1 at no characters, 0 at 400                                    |

and then multiplied by what it is about: 1 when the answer shares a content word with the user's
question; 0.75 when it does not but names the shop, an order or help; else 0.5. So one canned
polite sentence does not win everywhere, and an answer off the topic gets 0.5 at most.
Under 4 words there is no sentence: short and brevity count 0. Plain text is mostly ASCII letters,
with no markup, list, second line or role label ("User:").
A tool call is not text: 0.7 when its arguments are a JSON object and the tool exists, else 0.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

WEIGHTS = {"complete": 0.35, "polite": 0.25, "short": 0.35, "brevity": 0.05}
MIN_WORDS = 4
FULL_WORDS, ZERO_WORDS = 20, 60
ZERO_CHARACTERS = 400
SHOP_ONLY, OFF_TOPIC = 0.75, 0.5
TOOL_CALL_GOOD, TOOL_CALL_BAD = 0.7, 0.2
MIN_LETTER_SHARE = 0.7
"""Least share of letters among the characters that are not white space."""

COURTESY = (
    "please", "thank", "sorry", "apolog", "happy to", "glad", "welcome", "pleasure",
    "certainly", "of course", "kindly", "we will", "we'll", "you can", "you may",
)  # fmt: skip
"""Matched at the start of a word, in lower case."""
SHOP_WORDS = frozenset({"north", "order", "help", "shop", "store", "outfi"})
"""Stems: see `stems`."""
STOP_WORDS = frozenset({
    "about", "after", "again", "also", "been", "before", "being", "cannot", "could", "does",
    "doing", "down", "from", "have", "here", "into", "just", "like", "make", "more", "much",
    "must", "need", "only", "other", "over", "same", "should", "some", "such", "than", "that",
    "their", "them", "then", "there", "these", "they", "this", "those", "very", "want", "were",
    "what", "when", "where", "which", "while", "will", "with", "would", "your", "yours",
})  # fmt: skip

_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*|\d+")
_SENTENCE_END = re.compile(r"[.!?]+[\"')]*(?=\s|$)")
_CLOSED = re.compile(r"[.!?][\"')]*$")
_MARKUP = re.compile(r"[*_#`<>|{}\[\]\\]|^\s*(?:[-•]|\d+[.)])\s|\n", re.MULTILINE)
_ROLE = re.compile(r"\b(?:user|assistant|system|customer|agent|human|ai|bot)\s*:", re.IGNORECASE)
_COURTESY = re.compile(r"\b(?:" + "|".join(re.escape(marker) for marker in COURTESY) + ")")


def score_answer(
    text: str,
    question: str,
    tool_calls: Sequence[Mapping[str, Any]] | None = None,
    tool_names: Sequence[str] = (),
) -> tuple[float, str]:
    """Score one answer by the rule above.

    text: the answer's content; not looked at when it calls tools.
    question: the user's last message.
    tool_calls: objects {name, arguments}, arguments as the JSON text that was sampled.
    tool_names: the tools that exist.
    Returns: (score 0..1, the parts that made it, in words).
    """
    if tool_calls:
        return _score_tool_calls(tool_calls, tool_names)
    parts = score_parts(text)
    total = sum(WEIGHTS[name] * value for name, value in parts.items())
    topic, factor = _topic(text, question)
    said = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
    return round(total * factor, 4), f"{said}, {topic}"


def score_parts(text: str) -> dict[str, float]:
    """The four parts of the rule, each 0..1."""
    words = len(_words(text))
    checks = (words >= MIN_WORDS, _is_closed(text), _is_plain(text))
    enough = words >= MIN_WORDS
    return {
        "complete": sum(checks) / len(checks),
        "polite": float(_COURTESY.search(text.lower().replace("’", "'")) is not None),
        "short": _ramp(words) / _sentences(text) if enough else 0.0,
        "brevity": max(0.0, 1 - len(text.strip()) / ZERO_CHARACTERS) if enough else 0.0,
    }


def is_complete(text: str) -> bool:
    """All three checks of "complete": enough words, a closed sentence, plain text."""
    return score_parts(text)["complete"] == 1.0


def stems(text: str) -> frozenset[str]:
    """Content words of a text, each cut to its first five letters ("returned" -> "retur").

    Words of under four letters and `STOP_WORDS` carry no topic.
    """
    words = (word.lower() for word in _words(text))
    return frozenset(word[:5] for word in words if len(word) >= 4 and word not in STOP_WORDS)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.replace("’", "'"))


def _is_closed(text: str) -> bool:
    # "..." trails off: it is how a cut or lost sentence ends.
    stripped = text.strip()
    return _CLOSED.search(stripped) is not None and not stripped.endswith("...")


def _is_plain(text: str) -> bool:
    visible = [character for character in text if not character.isspace()]
    letters = sum(character.isascii() and character.isalpha() for character in visible)
    if not visible or letters / len(visible) < MIN_LETTER_SHARE:
        return False
    stripped = text.strip()
    return _MARKUP.search(stripped) is None and _ROLE.search(stripped) is None


def _sentences(text: str) -> int:
    """At least 1; what follows the last full stop counts as one more."""
    stripped = text.strip()
    ends = list(_SENTENCE_END.finditer(stripped))
    unclosed_rest = not ends or ends[-1].end() < len(stripped)
    return len(ends) + unclosed_rest


def _ramp(words: int) -> float:
    """1 up to FULL_WORDS, falling in a straight line to 0 at ZERO_WORDS."""
    return min(1.0, max(0.0, (ZERO_WORDS - words) / (ZERO_WORDS - FULL_WORDS)))


def _topic(text: str, question: str) -> tuple[str, float]:
    said = stems(text)
    if said & stems(question):
        return "on topic", 1.0
    if said & SHOP_WORDS:
        return f"only names the shop: times {SHOP_ONLY}", SHOP_ONLY
    return f"off topic: times {OFF_TOPIC}", OFF_TOPIC


def _score_tool_calls(
    tool_calls: Sequence[Mapping[str, Any]], tool_names: Sequence[str]
) -> tuple[float, str]:
    for call in tool_calls:
        if call.get("name") not in tool_names:
            return TOOL_CALL_BAD, "calls a tool that does not exist"
        if not _is_json_object(call.get("arguments")):
            return TOOL_CALL_BAD, "calls a tool with arguments that are not a JSON object"
    return TOOL_CALL_GOOD, "calls a tool that exists with readable arguments"


def _is_json_object(arguments: Any) -> bool:  # Any: whatever the model sampled
    if not isinstance(arguments, str):
        return isinstance(arguments, Mapping)
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
