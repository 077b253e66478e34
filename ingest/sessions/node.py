"""The nodes of the session tree, and the sessions that they form."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Sequence
from typing import Final, Protocol

from ingest.sessions.messages import Arrival, Conversation, Full, How, Message, Place, digest_of

_DIGITS: Final = re.compile(r"[0-9]+")
_LINES: Final = 12
"""Lines of a system prompt that are compared."""
SAME, ALIKE, OTHER = 2, 1, 0
"""How alike two agents are: the same system prompt and tools; the same but for numbers, or half of
the lines; neither."""


Key = bytes | int
"""A mark of `ingest.sessions.messages`."""
MAX_AGENTS: Final = 1_000
"""Agents remembered by `Agents`, in 2 kB each."""
MAX_CALLERS: Final = 8
"""Callers (key and user of a project) of one session: agents with keys of their own, and people who
hand a conversation over, are fewer."""
MAX_OPENINGS: Final = 256
"""Openings of one session: an agent's run with all its sub-agents and summaries has fewer."""
DIGESTED_MESSAGES: Final = 512
"""Messages of a request that its node remembers, the newest, in 4 bytes each."""


def digests_of(messages: Sequence[Message]) -> bytes:
    """Return 4 bytes for each of the newest messages, in order: those of successive messages stand
    side by side."""
    return b"".join(message.digest()[:4] for message in messages[-DIGESTED_MESSAGES:])


class Agent:
    """What tells one agent from another: its system prompt and its tools."""

    __slots__ = ("_exact", "_lines", "_numberless", "_tools")

    def __init__(self, conversation: Conversation) -> None:
        system = conversation.system
        self._exact = digest_of(system)
        self._numberless = digest_of(_DIGITS.sub("0", system))
        self._tools = conversation.tools
        sentences = re.split(r"[.!?;:\n]\s", system, maxsplit=_LINES)[:_LINES]
        self._lines = frozenset(digest_of(line) for line in sentences if line)

    @property
    def numberless(self) -> bytes:
        """Digest of the system prompt with each number made 0: a clock does not change it."""
        return self._numberless

    def likeness(self, other: Agent) -> int:
        """Return SAME, ALIKE or OTHER."""
        same_tools = self._tools == other._tools
        if self._exact == other._exact:
            return SAME if same_tools else ALIKE
        if self._numberless == other._numberless and same_tools:
            return ALIKE
        both = len(self._lines & other._lines)
        return ALIKE if 2 * both >= max(len(self._lines), len(other._lines), 1) else OTHER


class Agents:
    """The agents met last: most exchanges come from one that is known."""

    def __init__(self) -> None:
        self._found: dict[tuple[bytes, tuple[str, ...]], Agent] = {}

    def of(self, conversation: Conversation) -> Agent:
        """Return the agent of a conversation."""
        key = (digest_of(conversation.system), conversation.tools)
        agent = self._found.get(key)
        if agent is None:
            if len(self._found) == MAX_AGENTS:
                del self._found[next(iter(self._found))]
            agent = self._found[key] = Agent(conversation)
        return agent


class Newcomer(Protocol):
    """An exchange that may join a session."""

    owner: bytes
    """Digest of its caller."""
    beginning: bytes
    """Digest of how its request begins."""
    first: bytes
    """`told` of its first message."""


class Session:
    """All nodes of one session."""

    __slots__ = ("callers", "held_out", "name", "names", "nodes", "opening", "openings")

    def __init__(self, name: str, opening: str | None, held_out: bool) -> None:
        """opening: `Search.opening` of the first request; None when there is none, or it is not
        known."""
        self.name = name
        self.opening = opening
        self.held_out = held_out
        self.nodes: dict[Node, None] = {}
        self.names: list[bytes] = []
        """What the client calls it: digests of headers and traces."""
        self.callers: list[bytes] = []
        self.openings: list[bytes] = []

    def refuses(self, one: Newcomer, parent: Node | None) -> Full | None:
        """Return why an exchange may not join: so many callers or openings are no conversation, but
        a name, or words, that many share. parent: what it was found to continue."""
        if one.owner not in self.callers and len(self.callers) >= MAX_CALLERS:
            return "too_many_callers"
        if self._opens(one, parent) and len(self.openings) >= MAX_OPENINGS:
            return "too_many_openings"
        return None

    def admit(self, one: Newcomer, parent: Node | None) -> None:
        """Count the caller and the opening of an exchange."""
        if one.owner not in self.callers:
            self.callers.append(one.owner)
        if self._opens(one, parent):
            self.openings.append(one.beginning)

    def _opens(self, one: Newcomer, parent: Node | None) -> bool:
        """Return whether it begins in a new way, and not with a message of its parent."""
        known = parent is not None and one.first in parent.told
        return not known and one.beginning not in self.openings


class Node:
    """One exchange in the tree."""

    __slots__ = (
        "agent",
        "asked",
        "at",
        "branch",
        "children",
        "exact",
        "exchange_id",
        "grown",
        "has_reply",
        "how",
        "keys",
        "parent",
        "parts",
        "placed_at",
        "repeats",
        "segment",
        "session",
        "shares_opening",
        "told",
        "trace_id",
        "turn",
        "turn_id",
    )

    def __init__(self, arrival: Arrival, agent: Agent, session: Session, placed_at: float) -> None:
        """placed_at: Unix seconds, by the clock of whoever places it."""
        self.exchange_id, self.at = arrival.exchange_id, arrival.at
        self.trace_id, self.turn_id = arrival.trace_id, arrival.turn_id
        self.has_reply = bool(arrival.replies)
        self.told = digests_of(arrival.conversation.messages)
        self.repeats = any(
            message.role == "assistant" for message in arrival.conversation.messages[1:]
        )
        """Its request holds replies, besides a greeting."""
        self.asked = b""
        """Digest of all that it asks, of the system prompt apart."""
        self.agent = agent
        self.session = session
        self.placed_at = placed_at
        self.parent: Node | None = None
        self.children: list[Node] = []
        self.turn = self.branch = self.segment = 0
        self.exact = False
        """The parent is the exchange whose reply the request repeats last."""
        self.how: How = "root"
        self.keys: list[tuple[int, Collection[Key]]] = []
        """Where the indexes hold this node: number of the index, keys."""
        self.shares_opening = False
        self.grown: tuple[bytes, ...] = ()
        """Marks of its last message with each reply behind it (`messages.grown`)."""
        self.parts: dict[int, int] = {}
        """Number of marks under which parts of its texts are remembered, by kind of index."""
        session.nodes[self] = None

    def join(self, parent: Node, how: How) -> None:
        """Put this node, and with it its branch of the tree, under another parent."""
        if self.parent is not None:
            self.parent.children.remove(self)
        self.parent, self.how = parent, how
        self.branch = 1 + max((child.branch for child in parent.children), default=-1)
        parent.children.append(self)

    def branches(self, how: How) -> int:
        """Number of requests that differ, among those that were found to continue it in this way:
        the same request again is no branch."""
        return len({child.asked for child in self.children if child.how == how})

    def is_above(self, other: Node) -> bool:
        """Return True when this node is the other one, or an ancestor of it."""
        node: Node | None = other
        while node is not None and node is not self:
            node = node.parent
        return node is self

    def settle(self, session: Session, segment: int) -> list[Place]:
        """Give this node and all below it their session and turn number. Returns: their places."""
        by = segment - self.segment
        moved: list[Place] = []
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.session is not session:
                del node.session.nodes[node]
                session.nodes[node] = None
                node.session = session
            node.turn = 0 if node.parent is None else node.parent.turn + 1
            node.segment += by
            moved.append(node.place())
            waiting += node.children
        return moved

    @property
    def may_move(self) -> bool:
        """Whether a parent that arrives later may be the better one. A parent found by a reply that
        the request repeats in other words is such a guess, too."""
        return not self.exact or self.how == "asked"

    def come_above(self, other: Node) -> tuple[Node, Node] | None:
        """See to it that this node does not stand under `other`, of which it is the parent: a link
        between them was a guess, and the parent of `other` takes its place. Returns: the node whose
        parent changed, and the parent that it had."""
        guessed: Node | None = None
        node: Node | None = self
        while node is not None and node is not other:
            if node.may_move:
                guessed = node
            node = node.parent
        if node is None or guessed is None:
            return None
        left = guessed.parent
        assert left is not None, "it stands under `other`"
        left.children.remove(guessed)
        guessed.parent = None
        if other.parent is not None:
            guessed.join(other.parent, other.how)
        return guessed, left

    def place(self) -> Place:
        return Place(
            exchange_id=self.exchange_id,
            session=self.session.name,
            parent=None if self.parent is None else self.parent.exchange_id,
            turn=self.turn,
            branch=self.branch,
            segment=self.segment,
            how=self.how,
            held_out=self.session.held_out,
            shares_opening=self.shares_opening,
        )


# Where exchanges are remembered: by digests of what they asked, were answered, said and called.

KINDS: Final = range(12)
SAME_KEY: Final = 32
"""Nodes remembered under one key, the newest."""
(
    ANSWERED,
    ASKED,
    REPLIED,
    HEARD,
    QUOTED,
    CALLED,
    CALL_IDS,
    TOLD,
    GIVEN,
    WANTED,
    WANTED_ASKED,
    GROWN,
) = KINDS
"""Kinds of keys: the conversation with its reply; without it; the reply wherever it stands; a
tool's result or a user's message wherever it stands; parts of a reply; an argument of its calls;
the ids of its calls; parts of users' messages; parts of tools' results; the `ANSWERED`
that the parent of the exchange would have; the `ASKED` that it would have; the end of the last
message with a reply behind it."""
GUESSED: Final = frozenset({HEARD, QUOTED, TOLD, GIVEN, CALLED})
"""The many keys of a node; they serve while its conversation goes on."""


class Indexes:
    """Nodes by kind and key."""

    def __init__(self) -> None:
        self._nodes: tuple[dict[Key, Node | list[Node]], ...] = tuple({} for _ in KINDS)
        """A list only where a key has several nodes: nearly all have one."""

    def __len__(self) -> int:
        found = (under for index in self._nodes for under in index.values())
        return sum(len(under) if isinstance(under, list) else 1 for under in found)

    def under(self, index: int, key: Key | None) -> Sequence[Node]:
        """The nodes under a key, the oldest first. key: None has none."""
        found = self._nodes[index].get(key) if key is not None else None
        if found is None:
            return ()
        return found if isinstance(found, list) else (found,)

    def add(self, index: int, keys: Collection[Key], node: Node) -> None:
        """Remember a node under these keys, each given once; the oldest under a key gives way."""
        nodes = self._nodes[index]
        for key in keys:
            under = nodes.setdefault(key, node)
            if under is node:
                continue
            if not isinstance(under, list):
                nodes[key] = [under, node]
                continue
            if len(under) == SAME_KEY:
                parts = under.pop(0).parts
                if index in parts:
                    parts[index] -= 1
            under.append(node)
        node.keys.append((index, keys))

    def forget(self, node: Node, kinds: Container[int] = KINDS) -> None:
        """Forget a node under all its keys of these kinds."""
        for index, keys in node.keys:
            if index in kinds:
                for key in keys:
                    self._remove(self._nodes[index], key, node)
        node.keys = [one for one in node.keys if one[0] not in kinds]

    @staticmethod
    def _remove(nodes: dict[Key, Node | list[Node]], key: Key, node: Node) -> None:
        under = nodes.get(key)
        if under is node:
            del nodes[key]
        elif isinstance(under, list) and node in under:  # else it gave way to a younger one
            under.remove(node)
            if len(under) == 1:
                nodes[key] = under[0]
