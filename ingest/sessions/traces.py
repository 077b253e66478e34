"""Find the session of a request that repeats no beginning of a conversation. Pure.

Its client has shortened the conversation, or another agent works for it. What is left of the
conversation is searched for wherever it stands: whole messages, replies within other texts, and the
request's text among the arguments of calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ingest.sessions import marks
from ingest.sessions.indexes import GIVEN, HEARD, QUOTED, REPLIED, TOLD, Indexes
from ingest.sessions.messages import Message
from ingest.sessions.node import Node, Session, told

SEARCHED: Final = 64
"""Messages of a request that are searched for."""
TEXT_SEARCHED: Final = 65_536
"""Characters of a request that are searched for parts of replies."""
PARTS: Final = 2
WHOLE: Final = 0.8
"""A reply is repeated when so many parts of it are found, and this share of them."""
KNOWN: Final = 0.9
"""A long message counts 1 divided by the sessions that hold it. The session with this sum is the
one."""
CERTAIN: Final = 64
"""Characters of a long message; a shorter one counts in proportion."""
_KINDS: Final = (QUOTED, GIVEN, TOLD)
Before = Callable[[Node], bool]
"""Whether a node began before the request."""


def kept(
    indexes: Indexes,
    scope: bytes,
    messages: Sequence[Message],
    may_continue: Callable[[Node], bool],
) -> tuple[Node | None, float]:
    """Return the exchange whose reply stands last in a shortened conversation, and the weight of
    what is the same in its session."""
    weights: dict[Session, float] = defaultdict(float)
    replied: dict[Session, list[tuple[int, Node]]] = defaultdict(list)
    first = max(0, len(messages) - SEARCHED)
    said = [at for at in range(first, len(messages)) if messages[at].role == "assistant"]
    near = {at: told(messages[max(0, at - 1) : at + 2]) for at in said}
    for at in reversed(range(first, len(messages))):
        message = messages[at]
        under = indexes.under(REPLIED if at in near else HEARD, marks.link(scope, message))
        nodes = [node for node in under if may_continue(node)]
        sessions = {node.session for node in nodes}
        for session in sessions:
            weights[session] += min(1.0, message.length / CERTAIN) / len(sessions)
        if at in near:
            for node in reversed(nodes):
                replied[node.session].append((at, node))
    for session in sorted(replied, key=weights.__getitem__, reverse=True):
        if weights[session] < KNOWN:
            break
        for at, node in replied[session]:
            if is_new(node, messages, at) and _is_of(node, messages, at, near):
                return node, weights[session]
    return None, 0.0


def is_new(node: Node, messages: Sequence[Message], at: int) -> bool:
    """Return whether the reply at `at` is none that `node` had in its own request already, after
    the same message: then the client gives it to many requests."""
    pair = told(messages[max(0, at - 1) : at + 1])
    return not node.told.startswith(pair) if at == 0 else pair not in node.told


def _is_of(node: Node, messages: Sequence[Message], at: int, near: Mapping[int, bytes]) -> bool:
    """Return whether the messages before the reply at `at` are what is left of the request of
    `node`. Examples come from anywhere, so these are asked of it: the message right before the
    reply, after the reply before that; and most of the replies in the request, in their order,
    with a neighbour or by their own length. A reply that nothing stands before counts neither way.
    Where `node` itself begins with replies that nobody gave, one of them has to be there still.

    near: for each reply its digest between those of its neighbours (`told`).
    """
    if at:
        begin = at - 2 if at - 2 in near else at - 1
        if told(messages[begin:at]) not in node.told:
            return False
    known, total, place = 0, 0, 0
    for number, three in near.items():
        if number:
            total += 1
            if number < at:
                parts = [three[:8], three[4:]]
                if messages[number].length >= marks.LONG:
                    parts.append(three[4:8])
                found = max(node.told.find(part, place) for part in parts)
                known += found >= 0
                place = max(place, found)
    if node.parent is None and node.repeats and at and not known:
        return False
    return 2 * (known + (at > 0)) > total or not total


def quoted(indexes: Indexes, scope: bytes, texts: Iterable[str], before: Before) -> Node | None:
    """Return the exchange with which a conversation ends that is repeated within another text: a
    summary of it, or a record.

    A session is repeated when one of its replies is. An agent may answer in a few words, or with
    calls alone: then it is repeated when a user's message is, with a short reply or a tool's
    result. Of several sessions the one counts of which most is repeated; parts that several hold
    count less. In this session it is the exchange whose reply, or whose tools' results, are
    repeated last in the text.
    """
    under = {
        (kind, at): nodes
        for mark, at in _parts(scope, texts).items()
        for kind in _KINDS
        if (nodes := [node for node in indexes.under(kind, mark) if before(node)])
    }
    found: dict[tuple[int, Node], list[int]] = defaultdict(list)
    for (kind, at), nodes in under.items():
        for node in nodes:
            found[kind, node].append(at)
    whole = {one for one, places in found.items() if len(places) >= WHOLE * one[1].parts[one[0]]}
    ends: dict[Node, int] = {}
    known: set[Session] = set()
    for kind, node in whole:
        if kind != TOLD:
            ends[node] = max(ends.get(node, 0), *found[kind, node], 0)
        if kind != GIVEN and len(found[kind, node]) >= PARTS:
            known.add(node.session)
    weights: dict[Session, float] = defaultdict(float)
    for (kind, _), nodes in under.items():
        sessions = {node.session for node in nodes if (kind, node) in whole}
        for session in sessions:
            weights[session] += 1 / len(sessions)
    return max(
        (node for node in ends if node.session in known),
        key=lambda node: (weights[node.session], ends[node], node.at),
        default=None,
    )


def _parts(scope: bytes, texts: Iterable[str]) -> dict[int, int]:
    """Return the marks of all parts of the texts, and where each stands last: its number."""
    found: dict[int, int] = {}
    left = TEXT_SEARCHED
    at = 0
    for text in texts:
        for mark in marks.shingles(scope, text[-left:]):
            found[mark] = at
            at += 1
        left -= len(text)
        if left <= 0:
            break
    return found
