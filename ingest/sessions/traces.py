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
from ingest.sessions.indexes import HEARD, QUOTED, REPLIED, Indexes
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
    """Return whose reply is repeated within another text: a summary, or a record of the
    conversation. Of the session with the most such replies the newest one counts."""
    found: dict[Node, int] = defaultdict(int)
    for mark in _parts(scope, texts):
        for node in indexes.under(QUOTED, mark):
            found[node] += 1
    whole = [
        node
        for node, parts in found.items()
        if parts >= PARTS and parts >= WHOLE * node.quotes and before(node)
    ]
    size: dict[Session, int] = defaultdict(int)
    for node in whole:
        size[node.session] += 1
    return max(whole, key=lambda node: (size[node.session], node.at), default=None)


def _parts(scope: bytes, texts: Iterable[str]) -> Iterable[int]:
    """The marks of parts of the texts, each once."""
    found: dict[int, None] = {}
    left = TEXT_SEARCHED
    for text in texts:
        found.update(dict.fromkeys(marks.shingles(scope, text[-left:])))
        left -= len(text)
        if left <= 0:
            break
    return found
