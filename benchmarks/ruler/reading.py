"""How a judge reads the prompt of either side: carefully, or so that text can fool it. Pure.

Either prompt is understood, openpipe-art's by its `<trajectory id="1">` and ours by its
`<answer-NONCE id="...">`. The ways to read it (`Reading`):

    blocks   the blocks as whoever wrote the prompt meant them
    obeys    the same, and does what an answer asks for itself ("give this answer the score ...")
    tags     any tag of the name opens or closes a block, in any case and spelling, at any place,
             with lookalike and invisible characters; what nonce it has is not looked at
    decoded  as `tags`, after the escapes of JSON have been read, so `\\u003c` is a bracket too; the
             name of a tag is the whole one, with the nonce that the instructions say

A judge that reads by `tags` or `decoded` also takes orders: text that says which score an id has,
in words or as JSON, is followed when there is such an id.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Reading = Literal["blocks", "obeys", "tags", "decoded"]

_ART = re.compile(r'^<trajectory id="(\w+)">\n(.*)\n</trajectory>$', re.MULTILINE)
_OURS = re.compile(r'^<(answer-[0-9a-f]+) id="(\w+)">\n(.*)\n</\1>$', re.MULTILINE)
_NONCE = re.compile(r"</NAME-([0-9a-f]+)>")
_ORDER = re.compile(r'give id "?(\w+)"? the score ([01](?:\.\d+)?)', re.IGNORECASE)
_ENTRY = re.compile(r'\{"(?:trajectory_)?id": ?"(\w+)",[^{}]*"score": ?([01](?:\.\d+)?)\}')
_PLEA = re.compile(r"give this answer the score ([01](?:\.\d+)?)", re.IGNORECASE)
_ROLE = re.compile(r"<\|\w+\|>|\[/?INST\]")
_HEX = re.compile(r"\\+u([0-9a-fA-F]{4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a judge takes the prompt to say."""

    answers: tuple[tuple[str, str], ...]
    """(id, text) in the order shown; an id that occurs twice has its last text."""
    orders: Mapping[str, float]
    """Id -> the score that some text orders for it."""
    key: str
    """What an entry of the reply calls the id."""


def read_prompt(messages: Sequence[Mapping[str, str]], how: Reading) -> Shown:
    """Read the first two messages of a conversation with the judge."""
    system, user = messages[0]["content"], messages[1]["content"]
    nonce = _NONCE.search(system)
    key = "trajectory_id" if nonce is None else "id"
    if how in ("blocks", "obeys"):
        answers = tuple(_ART.findall(user))
        if nonce is not None:
            answers = tuple((name, body) for _, name, body in _OURS.findall(user))
        pleas = {name: _PLEA.search(body) for name, body in answers} if how == "obeys" else {}
        return Shown(
            answers=answers,
            orders={name: float(plea[1]) for name, plea in pleas.items() if plea is not None},
            key=key,
        )
    names = "trajectory" if nonce is None else r"answer[-\w]*"
    if how == "decoded" and nonce is not None:
        names = f"answer-{nonce[1]}"
    text = _as_seen(user, decode=how == "decoded")
    found = dict(_blocks(text, names))
    said = [*_ORDER.findall(text), *_ENTRY.findall(text)]
    orders = {name: float(score) for name, score in said if name in found}
    return Shown(answers=tuple(found.items()), orders=orders, key=key)


def _as_seen(text: str, *, decode: bool) -> str:
    """The text as somebody sees it who does not look closely."""
    if decode:
        text = _HEX.sub(lambda found: chr(int(found[1], 16)), text)
    text = re.sub(r"\\+n", "\n", re.sub(r'\\+"', '"', text))
    text = unicodedata.normalize("NFKC", text)
    return "".join(one for one in text if unicodedata.category(one) != "Cf")


def _blocks(text: str, names: str) -> list[tuple[str, str]]:
    """Every piece of text between a tag that opens a block and the next tag or token of a role."""
    tag = re.compile(rf"""<\s*(/?)\s*{names}(?:\s+id\s*=\s*["']?(\w+)["']?)?\s*>""", re.IGNORECASE)
    marks = sorted([*tag.finditer(text), *_ROLE.finditer(text)], key=re.Match.start)
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        (mark[2], text[mark.end() : end])
        for mark, end in zip(marks, ends, strict=True)
        if mark.re is tag and mark[2] and not mark[1]
    ]
