"""The opening of a conversation in one canonical form: what every turn of it repeats. Pure.

A conversation is recognised by its user's first messages, up to the first reply. Left out are
system prompts, and of the user's messages what clients write anew for each request: clocks, dates,
token budgets, checksums, and the blocks in which agents describe their environment. White space
does not count. The relay, the session tree and the caps of near-duplicates all use this form.

The cost is bounded: notes are searched for in the first and last `ENDS` characters of a text, and
at most `KEPT` bytes of each of its halves count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from xxhash import xxh3_128_digest

SYSTEM_ROLES: Final = frozenset({"system", "developer"})
ENDS: Final = 1024
"""Characters at each end of a text in which notes are searched for. Templates put them first or
last; a regular expression takes 20 ns a character."""
KEPT: Final = 8 * 1024
"""Bytes at each end of a longer text that count. Two conversations whose first messages differ only
in between are taken for one: they share an arm and a replica."""
MOST_BLOCKS: Final = 64
AROUND: Final = 64
"""Characters around a word like "token" in which its note is searched for."""
WORD_CHARS: Final = 16
_WHITE: Final = b" \t\r\n\x0b\x0c"
_BLOCK: Final = re.compile(
    r"<(system[-_]\w+|environment_\w+|turn_context|current_\w+|date(?:time)?|time(?:stamp)?"
    r"|(?:\w+:)?token_\w+|total_tokens|tokens_\w+|user_info|INSTRUCTIONS|user_instructions"
    r"|recommended_plugins|available_skills|ide_\w+|git_status)\b[^<>]*>"
)
"""Elements that agents put into a user's message: reminders and the surroundings (Claude Code),
environment and instructions (Codex, Cline), user_info (Cursor), and notes of time and tokens."""
_NUMBER: Final = r"\d[\d.,_]*\s?[kKmM]?"
_STAMP: Final = (
    r"[0-9](?:"
    r"[0-9]?:[0-9][0-9](?::[0-9][0-9](?:[.,][0-9]+)?)?"  # 10:31:02
    r"|0[0-9][0-9][-/.\u5e74][0-9][0-9]?[-/.\u6708][0-9][0-9]?\u65e5?"  # 2026-11-27
    r"|[0-9]?[-/.][0-9][0-9]?[-/.]20[0-9][0-9]"  # 27.11.2026
    # 27 November 2026, and what follows the month in November 27th, 2026
    r"|[0-9]?(?:st|nd|rd|th|\.)?(?:\s[A-Za-z]{3,9}\.?)?,?\s20[0-9][0-9]"
    r"|[78][0-9]{8}(?:[0-9]{3})?(?![0-9A-Za-z_])"  # seconds since 1970
    r")"
)
_BEGINS: Final = re.compile(_STAMP)
"""A date or a time. It begins with a class of characters, so the search skips what is none."""
_GOES_ON: Final = re.compile(
    rf"(?:[\s,;]*(?:T|at\b|{_STAMP}|Z\b|UTC|GMT|[ap]\.?m\b\.?|[+-][0-9][0-9]:?[0-9][0-9]"
    r"|[A-Z][a-z]+/[A-Z]\w+|\([\w/ +:-]{2,40}\)))*[\])]?[.\u3002]?",
    re.IGNORECASE,
)
"""What belongs to a date or time on its right."""
_LEAD: Final = frozenset(
    re.findall(
        r"\S+",
        "it it's the is today today's now current currently local system server date time datetime"
        " clock timestamp day and as of at on conversation started"
        " mon monday tue tuesday wed wednesday thu thursday fri friday sat saturday sun sunday"
        " jan january feb february mar march apr april may jun june jul july aug august"
        " sep september oct october nov november dec december"
        " \u5f53\u524d\u65f6\u95f4 \u5f53\u524d\u65f6\u95f4\u662f"
        " \u73b0\u5728\u662f \u4eca\u5929\u662f",
    )
)
"""Words before a date or time that introduce it."""
_BETWEEN: Final = " \t\r\n:,=[(*-\uff1a"
_MARKUP: Final = "[(*#-"
_TOKENS: Final = re.compile(
    r"(?:\b(?:you have|tokens?|remaining|left|used|usage|available|total|budget|context|window)\b"
    rf"[\s:=_-]*){{2,6}}(?:is\s)?{_NUMBER}(?:\s?(?:/|of|out of)\s?{_NUMBER})?"
    rf"(?:[;,]?\s*{_NUMBER})?(?:\s(?:tokens?|left|remaining|used)\b)*[.;]?"
    rf"|(?:\b(?:you have|budget|context|total|window|left|remaining)[\s:=]+){{0,3}}"
    rf"(?<![\w.]){_NUMBER}(?:\s?(?:/|of|out of)\s?{_NUMBER})?"
    r"\stokens?\b(?:\s(?:left|remaining|used|budget)\b)*[.;]?",
    re.IGNORECASE,
)
_CHECKSUM: Final = re.compile(
    r"x-[a-z-]+-header:\s*(?:[\w.-]+=[^;\s]*;?\s*)+|\bchecksum\s*[:=]\s*[\w.:/+=-]+",
    re.IGNORECASE,
)
MOST_NOTES: Final = 8
"""Notes of one kind that are left out at each end of a text."""


def opening(messages: Iterable[tuple[str, bytes]]) -> tuple[bytes, bool]:
    """Return a digest of 16 bytes of a conversation's opening, b"" when its user says nothing, and
    whether it goes on after it. messages: each one's role and the `mark` of its content, in order.
    It reads no more of them than it needs."""
    marks: list[bytes] = []
    goes_on = False
    for role, mark in messages:
        if role == "user":
            if mark:
                marks.append(mark)
        elif marks and role not in SYSTEM_ROLES:
            goes_on = True
            break
    return xxh3_128_digest(b"".join(marks)) if marks else b"", goes_on


def mark(text: str) -> bytes:
    """Return a digest of 16 bytes of a text's `plain` form; b"" where nothing is left of it. XXH3,
    for speed: who makes two messages collide only mixes up two conversations of its own."""
    data = plain(text)
    return xxh3_128_digest(data) if data else b""


def plain(text: str) -> bytes:
    """Return the canonical form of a text: without notes and white space. A text that is nothing
    else gives b""."""
    data = without_notes(text).encode("utf-8", "surrogatepass").translate(None, _WHITE)
    return data if len(data) <= 2 * KEPT else data[:KEPT] + data[-KEPT:]


def without_notes(text: str) -> str:
    """Leave out what agents write anew for each request: their blocks, and at both ends dates,
    times, token budgets and checksums."""
    if "<" in text:
        text = _without_blocks(text)
    if len(text) <= 2 * ENDS:
        return _without_notes(text)
    return f"{_without_notes(text[:ENDS])}{text[ENDS:-ENDS]}{_without_notes(text[-ENDS:])}"


def _without_blocks(text: str) -> str:
    kept: list[str] = []
    at = 0
    for _ in range(MOST_BLOCKS):
        found = _BLOCK.search(text, at)
        if found is None:
            break
        end = text.find(f"</{found[1]}>", found.end())
        if end < 0:
            kept.append(text[at : found.end()])
            at = found.end()
        else:
            kept.append(text[at : found.start()])
            at = end + len(found[1]) + 3
    kept.append(text[at:])
    return "".join(kept)


def _without_notes(text: str) -> str:
    if "oken" in text:
        text = _without(_TOKENS, "oken", text)
    if "-header:" in text:
        text = _without(_CHECKSUM, "-header:", text)
    if "hecksum" in text:
        text = _without(_CHECKSUM, "hecksum", text)
    # Every stamp has one of them: most texts need no search.
    if ":" in text or "20" in text or "17" in text or "18" in text:
        text = _without_stamps(text)
    return text


def _without(pattern: re.Pattern[str], hint: str, text: str) -> str:
    """Leave out what matches around each `hint`."""
    kept: list[str] = []
    at = begin = 0
    for _ in range(MOST_NOTES):
        hinted = text.find(hint, begin)
        if hinted < 0:
            break
        begin = hinted + len(hint)
        found = pattern.search(text, max(at, hinted - AROUND), begin + 2 * AROUND)
        if found is not None and found.start() < begin:
            kept.append(text[at : found.start()])
            at = found.end()
            begin = max(begin, at)
    kept.append(text[at:])
    return "".join(kept)


def _without_stamps(text: str) -> str:
    kept: list[str] = []
    at = begin = 0
    for _ in range(MOST_NOTES):
        found = _BEGINS.search(text, begin)
        if found is None:
            break
        start, begin = found.start(), found.end()
        before = text[start - 1] if start else " "
        if before.isascii() and (before.isalnum() or before in "._"):
            continue  # a version, an address, part of a name
        more = _GOES_ON.match(text, begin)
        kept.append(_without_lead(text[at:start]))
        at = begin = begin if more is None else more.end()
    kept.append(text[at:])
    return "".join(kept)


def _without_lead(text: str) -> str:
    """Leave out the words at the end of a text that introduce a time."""
    while True:
        before = text.rstrip(_BETWEEN)
        words = before[-WORD_CHARS:].rsplit(None, 1)
        if not words or words[-1].lstrip(_MARKUP).lower() not in _LEAD:
            return text.rstrip(" \t\r\n[(")
        text = before[: -len(words[-1])]
