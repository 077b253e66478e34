"""Escape JSON text for a judge's prompt, so that untrusted text imitates no delimiter. Pure.

What could open or close a block, or change the speaker in some chat template, and every invisible
character, is written as an escape of JSON: the value stays the same. Ordinary code and HTML stay as
they are.
"""

from __future__ import annotations

import re
import unicodedata

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
