"""What a judge sees of messages: which parts, escaped, without the bytes of files. Pure.

Ids of tool calls are drawn by the server and say nothing. A next action is shown without them; in
a trajectory, where results refer to calls, calls are numbered. Their arguments are written in one
way, as streams and whole replies differ in their spaces. Reasoning is shown when asked for. Images,
sound and files are shown by a placeholder, and speech by its transcript.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from ingest.errors import JudgeReplyError
from sidecar.replies.parts import WITHHELD, dumped

# Escape JSON text for a judge's prompt, so that untrusted text imitates no delimiter. Pure.

_TAG = re.compile(
    r"""<(?=[\s/\\<]{0,3}+(?:
        (?i:conversation|tools|answer|trajectory)  # our delimiters, whatever follows
      | [!#-;=?-{}~]{0,40}+[|\x80-\U0010ffff]  # <|user|>, <turn|>; lookalikes of bars and letters
      | (?:\w{1,20}:)?(\w{1,60})\s{0,3}/?>  # a bare tag: its name decides
    ))""",
    re.ASCII | re.VERBOSE,
)
"""A `<` that may begin a delimiter or a role token. The bounds keep the search linear."""
_ROLE_TAGS = re.compile(
    r"s|[be]os|[se]op|eo[aht]|pad|unk|unused\d*|cls|sep|mask|think(ing)?|thought|reasoning|role|turn"
    r"|system|user|assistant|developer|human|ai|tool(call)?|function|instructions?|inst|sys"
    r"|\w*_\w*(?<!_t)",
    re.IGNORECASE,
)
"""Names of bare tags that are role tokens of some chat template, or read like one. Many have an
underscore (`<start_of_turn>`, `<SPECIAL_10>`), which no element of HTML has."""
_BRACKET = re.compile(r"\[(?=/?[A-Z_]{2,40}\]|\||gMASK\]|e~\[)")
"""A `[` that begins a role token: `[INST]`, `[|user|]`, `[gMASK]`, `[e~[`."""
_BEYOND_ASCII = re.compile(r"[^\x20-\x7e]+")
_IMITATORS = frozenset("\u226e\u226f\ufe64\ufe65\uff1c\uff1e\u25b7\u25c1")
"""What normalisation turns into angle brackets, and the brackets of `\u25c1think\u25b7`."""
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of controls, invisible and direction marks, surrogates, private use, line breaks."""


def escape(text: str) -> str:
    """Escape JSON text: nothing in it imitates a delimiter or a role token, or is invisible.

    The result is the same JSON value: what is escaped occurs only inside of JSON strings.
    """
    text = _BRACKET.sub(r"\\u005b", _TAG.sub(_tag, text)).replace("]~", r"\u005d~")
    beyond = set("".join(_BEYOND_ASCII.findall(text)))
    hidden = {character: _escaped(character) for character in beyond if _is_hidden(character)}
    if not hidden:
        return text
    # Not a class of a pattern: outside of the basic plane it is searched character by character.
    return _BEYOND_ASCII.sub(lambda run: "".join([hidden.get(one, one) for one in run[0]]), text)


def _tag(found: re.Match[str]) -> str:
    plain = found[1] is not None and _ROLE_TAGS.fullmatch(found[1]) is None
    return "<" if plain else r"\u003c"  # plain: `<td>`, `<String>`, `<uint8_t>`


def _is_hidden(character: str) -> bool:
    return character in _IMITATORS or unicodedata.category(character) in _UNSEEN


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


# Images, sound and files in a message: the judge sees what kind and how large, never the bytes.

DEPTH: Final = 4
"""Levels of a content part that are searched; the deepest known, a file in an Anthropic block, is
at level 2."""
SHORTEST_MEDIA: Final = 256
"""Shorter base64 is left: it costs less than the placeholder is worth."""
DATA_FIELDS: Final = frozenset({"data", "file_data", "b64_json"})
KIND_FIELDS: Final = ("media_type", "mime_type", "mimeType", "format")
"""Fields beside the data that name its kind: Anthropic's, Gemini's and OpenAI's."""


def without_media(content: Any) -> Any:  # Any: JSON
    """Return the content with a placeholder for each image, sound or file that it carries.

    content: the `content` of a chat message. Text, and parts without data, are kept.
    Returns: the same object when there is nothing to replace.
    """
    if not isinstance(content, list):
        return content
    shown = [_replaced(part, DEPTH) if isinstance(part, Mapping) else part for part in content]
    return content if all(a is b for a, b in zip(shown, content, strict=True)) else shown


def _replaced(part: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    kind = next((part[name] for name in KIND_FIELDS if isinstance(part.get(name), str)), "")
    made: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, str) and name != "text":
            made[name] = _placeholder(value, kind if name in DATA_FIELDS else "")
        elif isinstance(value, Mapping) and depth > 1:
            made[name] = _replaced(value, depth - 1)
        else:
            made[name] = value
    return part if all(made[name] is part[name] for name in part) else made


def _placeholder(value: str, kind: str) -> str:
    """Return what stands for a data URL, or for base64 of a named kind; another text as it is."""
    if value[:5].lower() == "data:":
        head, comma, data = value.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            return value
        kind = head[5:].partition(";")[0] or "text/plain"
    elif kind and len(value) >= SHORTEST_MEDIA:
        data = value
    else:
        return value
    size = len(data) * 3 // 4 - data[-2:].count("=")
    digest = hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"[{kind}, {size} bytes, sha256 of its base64 {digest}; not shown]"


REASONING = ("reasoning", "reasoning_content")
"""Names under which vLLM and clients of it give an answer's reasoning: newer and older."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of content parts that are reasoning."""
_MORE_THOUGHTS = (*REASONING, "thinking_blocks", "reasoning_details")


def shown_answer(message: Mapping[str, Any], *, show_reasoning: bool = False) -> dict[str, Any]:
    """Return the parts of an assistant message that the judge sees, as a next action.

    These are its content, with what a tool parser kept back of it, its refusal, its transcript, its
    tool calls by name and arguments, and, if asked for, its reasoning. An answer that says nothing
    has an empty content, never null.
    """
    shown = _said(message, show_reasoning=show_reasoning)
    calls = [_call(function) for _, function in _calls(message)]
    return {**shown, "tool_calls": calls} if calls else shown


def shown_context(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of the conversation as the judge sees it: without reasoning."""
    content = _plain(without_media(message.get("content")))
    thinks = any(name in message for name in _MORE_THOUGHTS)
    if content is message.get("content") and not thinks:
        return message
    left_out = _MORE_THOUGHTS if thinks else ()
    kept = {name: value for name, value in message.items() if name not in left_out}
    return {**kept, "content": content} if "content" in kept else kept


def shown_trajectory(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a trajectory as the judge sees them, in the same order.

    Each has its role, content and name. Tool calls are numbered through the trajectory, and a
    tool's result names the number of its call: two trajectories that differ only in the ids that a
    server drew look the same.
    """
    numbers: dict[Any, str] = {}
    made: list[dict[str, Any]] = []
    count = 0
    for message in messages:
        shown: dict[str, Any] = {"role": message.get("role")}
        if message.get("name"):
            shown["name"] = message["name"]
        shown.update(_said(message))
        calls = []
        for call, function in _calls(message):
            count += 1
            if call is not None:
                numbers[str(call)] = f"call_{count}"
            calls.append({"id": f"call_{count}", **_call(function)})
        if calls:
            shown["tool_calls"] = calls
        answered = message.get("tool_call_id")
        if answered is not None:
            shown["tool_call_id"] = numbers.get(str(answered))
        made.append(shown)
    return made


def appearance(shown: Mapping[str, Any]) -> str:
    """Return a text that is equal for messages that look the same to the judge, or differ only in
    how the JSON of a tool call's arguments is written.

    shown: made by `shown_answer` or `shown_trajectory`.
    """
    made = {**shown}
    if "tool_calls" in made:
        made["tool_calls"] = [{**call} for call in made["tool_calls"]]
        for call in made["tool_calls"]:
            with suppress(ValueError, TypeError, RecursionError):  # no JSON text: as it is
                value = json.loads(call["arguments"], object_pairs_hook=unique_names)
                call["arguments"] = json.dumps(value, sort_keys=True)
    return json.dumps(made, sort_keys=True)


def unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its members. Raises: JudgeReplyError when two have one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise JudgeReplyError("an object holds the same name twice")
    return found


def _said(message: Mapping[str, Any], *, show_reasoning: bool = False) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    content = without_media(message.get("content"))
    if show_reasoning:
        thought = next((message[name] for name in REASONING if message.get(name)), None)
        shown = {} if thought is None else {"reasoning": thought}
    else:
        content = _plain(content)
    shown["content"] = "" if content is None else content
    if isinstance(shown["content"], str):
        shown["content"] += message.get(WITHHELD) or ""
    audio = message.get("audio")
    spoken = audio.get("transcript") if isinstance(audio, Mapping) else None
    for name, words in (("refusal", message.get("refusal")), ("transcript", spoken)):
        if words:
            shown[name] = words
    return shown


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    with suppress(ValueError, TypeError, RecursionError):  # no JSON text: as it is
        arguments = dumped(json.loads(arguments or "", object_pairs_hook=unique_names))
    return {"name": function.get("name"), "arguments": arguments}


def _plain(content: Any) -> Any:  # Any: JSON
    """Return the content without parts that are reasoning; the same object when it has none."""
    if not isinstance(content, list) or not any(map(_is_thought, content)):
        return content
    return [part for part in content if not _is_thought(part)]


def _is_thought(part: Any) -> bool:  # Any: JSON
    return isinstance(part, Mapping) and part.get("type") in _THOUGHTS


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    found = [
        (call.get("id"), call.get("function") or {})
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping)
    ]
    legacy = message.get("function_call")
    return [*found, (None, legacy)] if isinstance(legacy, Mapping) else found


# Estimate how many tokens a judge takes for a text, without its tokenizer. Pure.

WORD_BYTES = 2.5
"""Letters of ASCII and spaces for one token."""
MARK_BYTES = 1.5
"""Punctuation for one token. A digit is a token of its own: several tokenizers write it so."""
BEYOND_ASCII_BYTES = 2.0
"""Bytes of UTF-8 beyond ASCII for one token."""
_UNBROKEN = re.compile(rb"[A-Za-z0-9+/=_-]{24,}")
"""Base64, digests, long ids: one token for each character."""
_WORDS = bytes(code for code in range(128) if chr(code).isalpha() or chr(code).isspace())
_DIGITS = b"0123456789"
_WIDE_CHARACTERS = bytes(range(128, 256))


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text, rather too many than too few; time is linear in its length."""
    data = text.encode("utf-8", "surrogatepass")
    broken = _UNBROKEN.sub(b"", data)
    no_words = broken.translate(None, _WORDS)
    no_digits = no_words.translate(None, _DIGITS)
    marks = no_digits.translate(None, _WIDE_CHARACTERS)
    return ceil(
        (len(broken) - len(no_words)) / WORD_BYTES
        + (len(no_words) - len(no_digits))
        + len(marks) / MARK_BYTES
        + (len(no_digits) - len(marks)) / BEYOND_ASCII_BYTES
        + (len(data) - len(broken))
    )


# Leave out the oldest part of a conversation that does not fit into a judge's context. Pure.

MARK_TOKENS = 48
"""Room for the mark."""
LAST_TOKENS = 256
"""The last message is cut down to this before a system message is cut."""
SHORTEST_ELIDED = 64
"""Texts up to this length (roles, names, ids) are never cut."""
SYSTEM = ("system", "developer")
Write = Callable[[Mapping[str, Any]], str]
"""Writes a message as one line of the prompt."""


class NoRoomLeftError(ValueError):
    """The messages do not fit, however much of them is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elided:
    """The lines of a conversation, as many as fit."""

    lines: tuple[str, ...]
    left_out_messages: int = 0
    left_out_characters: int = 0
    """Characters of the lines of those messages, and of texts that were cut."""

    @property
    def is_whole(self) -> bool:
        return not self.left_out_messages and not self.left_out_characters


def elide(messages: Sequence[Mapping[str, Any]], *, room: float, write: Write) -> Elided:
    """Write the messages into at most `room` tokens, by estimate.

    room: tokens; infinite when no limit is known.
    Raises: NoRoomLeftError.
    """
    lines = [write(message) for message in messages]
    if room == float("inf"):
        return Elided(lines=tuple(lines))
    costs = [_cost(line) for line in lines]
    if sum(costs) <= room:
        return Elided(lines=tuple(lines))
    if room <= MARK_TOKENS or not lines:
        raise NoRoomLeftError
    stays = {
        place
        for place, message in enumerate(messages)
        if message.get("role") in SYSTEM or place == len(messages) - 1
    }
    left = room - MARK_TOKENS - sum(costs[place] for place in stays)
    if left < 0:
        kept, cut = _shortened(messages, lines, costs, stays, room - MARK_TOKENS, write)
        return _joined(lines, kept, cut)
    kept = {place: lines[place] for place in stays}
    for place in reversed(range(len(messages))):
        if place in stays:
            continue
        left -= costs[place]
        if left < 0:
            break
        kept[place] = lines[place]
    return _joined(lines, kept, 0)


def _joined(lines: Sequence[str], kept: Mapping[int, str], cut: int) -> Elided:
    gone = [place for place in range(len(lines)) if place not in kept]
    characters = sum(len(lines[place]) for place in gone) + cut
    mark = json.dumps(
        {"left_out": f"{len(gone)} older messages; {characters} characters in all"}
        if gone
        else {"left_out": f"{cut} characters, from the middle of long texts"}
    )
    at = gone[0] if gone else 0
    shown: list[str] = []
    for place in range(len(lines)):
        if place == at:
            shown.append(mark)
        if place in kept:
            shown.append(kept[place])
    return Elided(lines=tuple(shown), left_out_messages=len(gone), left_out_characters=characters)


def _shortened(
    messages: Sequence[Mapping[str, Any]],
    lines: Sequence[str],
    costs: Sequence[int],
    stays: set[int],
    room: float,
    write: Write,
) -> tuple[dict[int, str], int]:
    """Cut the messages that stay. Returns: their lines, and the characters that were cut."""
    *systems, last = sorted(stays)
    of_systems = sum(costs[place] for place in systems)
    for_last = min(costs[last], max(room - of_systems, LAST_TOKENS))
    made = {last: _cut(messages[last], for_last, write) if for_last < costs[last] else lines[last]}
    left = room - _cost(made[last])
    for number, place in enumerate(systems):
        share = left if of_systems <= left else left / (len(systems) - number)
        whole = costs[place] <= share
        made[place] = lines[place] if whole else _cut(messages[place], share, write)
        left -= _cost(made[place])
        of_systems -= costs[place]
    if left < 0:
        raise NoRoomLeftError
    return made, sum(max(0, len(lines[place]) - len(made[place])) for place in made)


def _cut(message: Mapping[str, Any], room: float, write: Write) -> str:
    """Write a message with its long texts cut, as little as fits. Raises: NoRoomLeftError."""
    low, high = SHORTEST_ELIDED, max(SHORTEST_ELIDED, int(room * 8))
    found = write(_capped(message, low))
    if _cost(found) > room:
        raise NoRoomLeftError
    while high - low > max(8, low // 50):  # within 2% of the longest that fits
        middle = (low + high) // 2
        tried = write(_capped(message, middle))
        if _cost(tried) <= room:
            low, found = middle, tried
        else:
            high = middle
    return found


def _capped(value: Any, most: int) -> Any:  # Any: JSON
    """Cut every text of a value to about `most` characters: the beginning and the end of it."""
    if isinstance(value, str):
        if len(value) <= max(most, SHORTEST_ELIDED):
            return value
        half = most // 2
        mark = f" [... {len(value) - 2 * half} characters left out ...] "
        return value[:half] + mark + value[len(value) - half :]
    if isinstance(value, Mapping):
        return {name: _capped(one, most) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_capped(one, most) for one in value]
    return value


def _cost(line: str) -> int:
    return estimate_tokens(line) + 1  # its line break
