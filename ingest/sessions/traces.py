"""Find the session of a request that repeats no beginning of a conversation. Pure.

Its client has shortened the conversation, or another agent works for it. What is left of the
conversation is searched for wherever it stands: whole messages, replies within other texts, and the
request's text among the arguments of calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ingest.sessions import marks
from ingest.sessions.indexes import GIVEN, HEARD, QUOTED, REPLIED, TOLD, Indexes
from ingest.sessions.messages import Message
from ingest.sessions.node import Node, Session

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
    indexes: Indexes, scope: bytes, messages: Sequence[Message], before: Before
) -> tuple[Node | None, float]:
    """Return who gave the same replies, wherever they stand, and the weight of what is the same in
    its session. Only replies that vLLM gave count: many clients begin with a greeting of their
    own."""
    weights: dict[Session, float] = defaultdict(float)
    newest: dict[Session, Node] = {}
    for message in reversed(messages[-SEARCHED:]):
        by_assistant = message.role == "assistant"
        under = indexes.under(REPLIED if by_assistant else HEARD, marks.link(scope, message))
        nodes = [node for node in under if before(node)]
        sessions = {node.session for node in nodes}
        for session in sessions:
            weights[session] += min(1.0, message.length / CERTAIN) / len(sessions)
        if by_assistant:
            for node in reversed(nodes):
                newest.setdefault(node.session, node)
    best = max(newest, key=weights.__getitem__, default=None)
    if best is None or weights[best] < KNOWN:
        return None, 0.0
    return newest[best], weights[best]


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
