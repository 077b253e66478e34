"""Digests by which a request finds the conversation that it continues. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from ingest.sessions.messages import Message, spaced

LONG: Final = 24
"""Characters from which a message tells conversations apart; "Thank you!" does not."""
WORDS: Final = 6
"""Words of a shingle."""
SHINGLES: Final = 24
"""Shingles of a reply, of a user's message or of a tool's result that are remembered."""
FEW: Final = 4
"""Shingles that are remembered of a text with fewer chosen ones, chosen or not."""
HEARD_CHARS: Final = 2_048
"""Characters at the beginning, and as many at the end, of a message from which they are taken."""
ARGUMENT: Final = 16
"""Characters from which an argument of a call may be the task of another agent."""
ARGUMENTS: Final = 16
"""Arguments of a reply that are remembered."""
_AND_A_SPACE: Final[Callable[[int], int]] = (1).__add__


def chain(scope: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Return a digest of each beginning of a conversation: [0] of none of its messages, [k] of all.

    Equal digests mean equal scope and equal messages, in order.
    """
    found = [scope]
    for message in messages:
        found.append(link(found[-1], message))
    return found


def link(before: bytes, message: Message) -> bytes:
    """Return the digest of a beginning and one more message. With a scope for the beginning, it is
    the mark of the message wherever it stands."""
    return blake2b(before + message.digest(), digest_size=8).digest()


def calls(scope: bytes, message: Message) -> bytes | None:
    """Return the mark of a reply with the ids of its calls; None when it has none."""
    if not message.ids:
        return None
    return _mark(link(scope, message), "\x00".join(message.ids))


def shingles(scope: bytes, text: str) -> Iterator[int]:
    """Yield the mark of each run of `WORDS` words."""
    data = text.encode("utf-8", "replace")
    # Where the word after each one begins. Slices of the text cost half of joining words again.
    after = list(accumulate(map(_AND_A_SPACE, map(len, data.split(b" ")))))
    seed = int.from_bytes(scope, "big")
    return (
        xxh3_64_intdigest(data[begin : end - 1], seed)
        for begin, end in zip((0, *after), after[WORDS - 1 :], strict=False)
    )


def grown(before: bytes, text: str, reply: str) -> tuple[int, bytes] | None:
    """Return the marks of a message with a reply behind it: of the last run of words, by which a
    message that begins with both finds it, and of the whole. None for a few words.

    before: digest of the messages before it.
    """
    words = f"{text} {reply}".split()
    last = list(shingles(before, " ".join(words[-WORDS:])))
    return (last[0], whole_of(before, words)) if last and reply else None


def whole_of(before: bytes, words: Sequence[str]) -> bytes:
    """Return the mark of a text, whatever its white space."""
    return _mark(before, "".join(words))


def of_reply(scope: bytes, text: str) -> list[int]:
    """Return the first marks of a text, about every second one, chosen by their own value: so it is
    found again inside another text, whatever stands around it (Schleimer et al., Winnowing, SIGMOD
    2003)."""
    return _chosen(shingles(scope, text))


def of_heard(scope: bytes, text: str) -> list[int]:
    """Return about every second mark of the beginning and the end of a text, the lowest ones of a
    long text: they come from all parts, so texts that begin alike have different ones."""
    if len(text) > 2 * HEARD_CHARS:
        text = f"{text[:HEARD_CHARS]} {text[-HEARD_CHARS:]}"
    return _chosen(sorted(set(shingles(scope, text))))


def _chosen(found: Iterable[int]) -> list[int]:
    """Return the first `SHINGLES` odd marks; others too where there are few."""
    chosen: list[int] = []
    others: list[int] = []
    for mark in found:
        if mark & 1:
            chosen.append(mark)
            if len(chosen) == SHINGLES:
                break
        elif len(others) < FEW:
            others.append(mark)
    chosen += others[: max(0, FEW - len(chosen))]
    return list(dict.fromkeys(chosen))


def whole(scope: bytes, text: str) -> bytes | None:
    """Return the mark of a text that may be an argument of a call; None when it is too short."""
    return _mark(scope, text) if len(text) >= ARGUMENT else None


def arguments(scope: bytes, reply: Message) -> Iterator[bytes]:
    """Yield the mark of each text among the arguments of a reply's calls."""
    found = 0
    for _, written in reply.calls:
        try:
            value = msgspec.json.decode(written)
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
        for text in _texts(value):
            mark = whole(scope, spaced(text))
            if mark is not None:
                yield mark
                found += 1
                if found == ARGUMENTS:
                    return


def _texts(value: Any) -> Iterator[str]:  # Any: decoded JSON
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _mark(scope: bytes, text: str) -> bytes:
    return blake2b(scope + text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
