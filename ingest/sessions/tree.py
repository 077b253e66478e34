"""Find the place of each exchange in a tree of conversations, without help of the client. Pure.

A request repeats its conversation: the messages of an earlier request, that one's reply, and then
new ones. So each exchange is remembered by two digests, of its request (`asked`) and of the request
with the reply (`answered`), and a new request looks its own beginnings up, the longest first.
System prompts and tools are no part of the digests: a clock in the prompt changes nothing. They
decide between conversations that are the same up to here.

Where no beginning is known, the client has shortened the conversation, or another agent works for
it: messages are then searched for wherever they stand, and texts in replies and in calls.

An exchange that arrives before its parent is moved when the parent arrives.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from ingest.sessions.messages import Arrival, Family, How, Kin, Place
from ingest.sessions.node import (
    ALIKE,
    GUESSED,
    WANTED,
    WANTED_ASKED,
    Agents,
    Indexes,
    Node,
    Session,
)
from ingest.sessions.search import SKEW_S, Search

MAX_NODES: Final = 50_000
"""Exchanges remembered, in 3 kB each; the oldest are forgotten first."""
MAX_GUESSED: Final = 10_000
"""Exchanges whose parts of texts are remembered too, the newest, in 10 kB each."""
TTL_S: Final = 24 * 3600.0
"""A conversation that pauses for longer begins a new session."""
COMMON: Final = 8
"""Sessions of a day from which an opening is common: a greeting, or a task that a timer starts."""
KIN: Final = 8
"""Siblings before an exchange, and after it, that `kin` names."""
KIN_OF: Final = 64
"""Exchanges under one parent, or without one in a session, that are a family."""
EXACT: Final = frozenset({"answered", "asked"})
"""The parent is the exchange whose reply the request repeats last. A retry is taken for one that
may still have to be moved."""


class SessionTree:
    """Remembers the exchanges of the last day. For one thread."""

    def __init__(
        self,
        *,
        is_held_out: Callable[[str], bool] = lambda _: False,
        max_nodes: int = MAX_NODES,
        ttl_s: float = TTL_S,
    ) -> None:
        """is_held_out: whether a session is held out, by a name: the same for the same name."""
        self._is_held_out = is_held_out
        self._max_nodes = max_nodes
        self._ttl_s = ttl_s
        self._nodes: OrderedDict[str, Node] = OrderedDict()
        self._indexes = Indexes()
        self._agents = Agents()
        self._guessed: deque[Node] = deque()
        """Nodes that parts of their texts name, the oldest first."""
        self._sessions: dict[str, Session] = {}
        self._named: dict[bytes, Session] = {}
        """Sessions that the client named, by header or trace."""
        self._openings: Counter[str] = Counter()
        """Sessions that begin with each opening."""
        self._regrouped: dict[Node | Session, None] = {}
        """Parents whose children a move has changed, and sessions whose first exchanges it has."""
        self._waiting: dict[str, list[Node]] = {}
        """Restored exchanges whose parent was stored after them, by its exchange id."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def keys(self) -> int:
        """Entries of all indexes."""
        return len(self._indexes)

    def place(self, arrival: Arrival, *, now: float) -> list[Place]:
        """Add an exchange. Returns: its place, then the new places of exchanges that it moves.

        now: Unix seconds, by the clock of the caller: a client's clock may be wrong.
        """
        known = self._nodes.get(arrival.exchange_id)
        if known is not None:
            return [known.place()]
        self._waiting.clear()
        self._forget(now)
        search = Search(self._indexes, arrival, self._agents.of(arrival.conversation))
        parent, how, exact = search.find()
        found = self._found(search, parent)
        if how == "root" and found is not None:
            how = "header" if arrival.session_header else "trace"
        full = None if found is None else found.refuses(search, parent)
        if full is not None:
            parent, how, exact = None, "root", False
            session = self._new(arrival.exchange_id, search)
        else:
            name = arrival.session_header or arrival.exchange_id
            session = found or self._sessions.get(name) or self._new(name, search)
            self._name(session, search.names)
        session.admit(search, parent)
        node = Node(arrival, search.agent, session, now)
        if session.opening is not None and session.name == node.exchange_id:
            by_opening = self._is_held_out(session.opening)
            node.shares_opening = session.held_out != by_opening and search.opening()[1]
        if parent is not None:
            node.turn = parent.turn + 1
            node.segment = parent.segment + (how == "kept")
        answered = self._add(node, search, parent, how, exact=exact)
        moved = self._adopt(node, answered, search.asked)
        return [replace(node.place(), full=full), *moved]

    def kin(self, exchange_id: str) -> Kin | None:
        """Return who stands beside an exchange; None when it is not remembered any more."""
        node = self._nodes.get(exchange_id)
        if node is None:
            return None
        family = _family(node.session if node.parent is None else node.parent)
        siblings: tuple[str, ...] = ()
        if len(family) > 1:
            order = sorted({*family, node}, key=lambda one: (one.at, one.exchange_id))
            own = order.index(node)
            near = order[max(0, own - KIN) : own] + order[own + 1 : own + 1 + KIN]
            siblings = tuple(one.exchange_id for one in near)
        return Kin(
            node.session.name,
            None if node.parent is None else node.parent.exchange_id,
            siblings,
        )

    def regrouped(self) -> list[Family]:
        """Return the families that moves have changed since `forget_regrouped`, as they are now."""
        return [
            Family(
                one.session.name if isinstance(one, Node) else one.name,
                one.exchange_id if isinstance(one, Node) else None,
                tuple(child.exchange_id for child in _family(one)),
            )
            for one in self._regrouped
        ]

    def forget_regrouped(self) -> None:
        """Begin a new list of families that moves change."""
        self._regrouped.clear()

    def restore(self, arrival: Arrival, place: Place, *, now: float) -> None:
        """Remember an exchange whose place is known, after a restart. In the order in which they
        were stored: a parent that came late comes after its children.

        now: when it was placed.
        """
        if arrival.exchange_id in self._nodes:
            return
        self._forget(now)
        search = Search(self._indexes, arrival, self._agents.of(arrival.conversation))
        parent = self._nodes.get(place.parent) if place.parent is not None else None
        session = self._sessions.get(place.session)
        # What was stored counts, not the rule: it may be another one since.
        held_out = place.held_out or (place.shares_opening and self._is_held_out(place.session))
        if session is None:
            is_first = place.how == "root" and place.session == place.exchange_id
            session = self._begin(
                place.session, search.opening()[0] if is_first else None, held_out
            )
        session.held_out = session.held_out and held_out
        self._name(session, search.names)
        session.admit(search, parent)
        node = Node(arrival, search.agent, session, now)
        node.shares_opening = place.shares_opening
        self._add(node, search, parent, place.how, exact=place.how in EXACT)
        node.turn, node.branch, node.segment = place.turn, place.branch, place.segment
        if parent is None and place.parent is not None:
            self._waiting.setdefault(place.parent, []).append(node)
        for child in self._waiting.pop(node.exchange_id, ()):
            # Damage may have made a circle: a node never stands under itself.
            if child.exchange_id in self._nodes and not child.is_above(node):
                child.parent = node
                node.children.append(child)

    def _add(
        self, node: Node, search: Search, parent: Node | None, how: How, *, exact: bool
    ) -> list[bytes]:
        """Put a node into the tree and the indexes. Returns: its `answered` digests."""
        node.how, node.exact = how, exact
        if parent is not None:
            node.join(parent, how)
        self._nodes[node.exchange_id] = node
        self._guessed.append(node)
        if len(self._guessed) > MAX_GUESSED:
            self._indexes.forget(self._guessed.popleft(), GUESSED)
        return search.register(node)

    def _found(self, search: Search, parent: Node | None) -> Session | None:
        session = search.session if parent is None else parent.session
        for name in search.names:
            session = session or self._named.get(name)
        return session

    def _new(self, name: str, search: Search) -> Session:
        """Begin a session. Sessions with one opening are all held out, or none of them, because
        they may be taken for each other, and their first requests are the same prompt. Only of an
        opening that is used again and again each session goes by its own name: else an agent that
        always begins alike would be held out as a whole, or never."""
        opening, _ = search.opening()
        by_name = opening is None or self._openings[opening] >= COMMON
        return self._begin(name, opening, self._is_held_out(name if by_name else str(opening)))

    def _begin(self, name: str, opening: str | None, held_out: bool) -> Session:
        session = self._sessions[name] = Session(name, opening, held_out)
        if opening is not None:
            self._openings[opening] += 1
        return session

    def _end(self, session: Session) -> None:
        """Forget a session that is empty."""
        del self._sessions[session.name]
        if session.opening is not None:
            self._openings[session.opening] -= 1
            if not self._openings[session.opening]:
                del self._openings[session.opening]

    def _name(self, session: Session, names: Iterable[bytes]) -> None:
        for name in names:
            if name not in self._named:
                self._named[name] = session
                session.names.append(name)

    def _adopt(self, node: Node, answered: Iterable[bytes], asked: bytes) -> list[Place]:
        """Move those under `node` that arrived before it."""
        moved: list[Place] = []
        for key in answered:
            waiting = [
                child
                for child in self._indexes.under(WANTED, key)
                if child.may_move and child is not node
            ]
            for child in _later(waiting, node):
                moved += self._move(child, node, "answered")
        waiting = [
            child
            for child in self._indexes.under(WANTED_ASKED, asked)
            if not child.exact and child.agent.likeness(node.agent) >= ALIKE
        ]
        for child in _later(waiting, node):
            moved += self._move(child, node, "asked")
        return moved

    def _move(self, child: Node, node: Node, how: How) -> list[Place]:
        """Put `child` under `node`. Returns: the new places of all that this moves."""
        before = child.session
        freed = node.come_above(child)
        self._regrouped[node] = self._regrouped[child.parent or before] = None
        child.join(node, how)
        child.exact = True
        # What may have been trained on is never asked in an exam again.
        node.session.held_out = node.session.held_out and before.held_out
        moved = child.settle(node.session, node.segment)
        if freed is not None:
            below, left = freed
            self._regrouped[left] = None
            moved += below.settle(node.session, below.segment)
        if not before.nodes:
            self._rename(before, node.session)
        return moved

    def _rename(self, before: Session, session: Session) -> None:
        """Give the names of a session that became part of another one to that one."""
        for name in before.names:
            self._named[name] = session
        session.names += before.names
        before.names.clear()
        self._end(before)

    def _forget(self, now: float) -> None:
        while self._nodes:
            oldest = next(iter(self._nodes.values()))
            if len(self._nodes) < self._max_nodes and now - oldest.placed_at <= self._ttl_s:
                return
            del self._nodes[oldest.exchange_id]
            self._indexes.forget(oldest)
            for child in oldest.children:
                child.parent = None
            if oldest.parent is not None:
                oldest.parent.children.remove(oldest)
            self._leave(oldest)

    def _leave(self, node: Node) -> None:
        """Take a node out of its session, and forget a session that is empty."""
        session = node.session
        del session.nodes[node]
        if not session.nodes:
            for name in session.names:
                del self._named[name]
            self._end(session)


def _later(waiting: list[Node], node: Node) -> list[Node]:
    """Return the requests that may have waited for `node` as their parent: none that began before
    it. Where there is such a one, its client gives the words that `node` was answered in; then one
    other may be a true child, and more are not."""
    later = [one for one in waiting if one.at + SKEW_S >= node.at]
    if len(later) == len(waiting):
        return later
    return [] if node.children else sorted(later, key=lambda one: one.at)[:1]


def _family(parent: Node | Session) -> list[Node]:
    """Return the newest children of an exchange, or the exchanges without a parent in a session:
    none of a session of more than `KIN_OF` exchanges."""
    if isinstance(parent, Node):
        return parent.children[-KIN_OF:]
    nodes = parent.nodes
    return [] if len(nodes) > KIN_OF else [one for one in nodes if one.parent is None]
