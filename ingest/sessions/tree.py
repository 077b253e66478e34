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

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from ingest.sessions import marks
from ingest.sessions.messages import digest_of
from ingest.sessions.node import ALIKE, Agent, Node, Session
from ingest.sessions.records import Arrival, How, Place

MAX_NODES: Final = 100_000
"""Exchanges remembered; the oldest are forgotten first."""
TTL_S: Final = 24 * 3600.0
"""A conversation that pauses for longer begins a new session."""
SEARCHED: Final = 64
"""Messages and sentences of a request that are searched for, the newest first."""
TEXT_SEARCHED: Final = 65_536
"""Characters of a request that are searched for parts of replies, where nothing else is found."""
PARTS: Final = 2
WHOLE: Final = 0.8
"""A reply is repeated when so many parts of it are found, and this share of them."""
SKEW_S: Final = 1.0
"""How far the clocks of two proxies may be apart: a parent begins before its child."""
SAME_KEY: Final = 32
"""Nodes remembered under one key, the newest."""
KNOWN: Final = 0.9
"""A long message counts 1 divided by the sessions that hold it. The session with this sum
is the one."""
CERTAIN: Final = 64
"""Characters of a long message; a shorter one counts in proportion."""
EXACT: Final = frozenset({"answered", "asked"})
"""The parent is the exchange whose reply the request repeats last. A retry is taken for one that
may still have to be moved."""
ANSWERED, ASKED, REPLIED, HEARD, QUOTED, CALLED, CALL_IDS, WANTED = range(8)
"""Numbers of the indexes."""


class SessionTree:
    """Remembers the exchanges of the last day. For one thread."""

    def __init__(self, *, max_nodes: int = MAX_NODES, ttl_s: float = TTL_S) -> None:
        self._max_nodes = max_nodes
        self._ttl_s = ttl_s
        self._nodes: OrderedDict[str, Node] = OrderedDict()
        self._indexes: tuple[dict[bytes, list[Node]], ...] = tuple({} for _ in range(8))
        self._sessions: dict[str, Session] = {}
        self._named: dict[bytes, Session] = {}
        """Sessions that the client named, by header or trace."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def keys(self) -> int:
        """Entries of all indexes."""
        return sum(len(nodes) for index in self._indexes for nodes in index.values())

    def place(self, arrival: Arrival, *, now: float) -> list[Place]:
        """Add an exchange. Returns: its place, then the new places of exchanges that it moves.

        now: Unix seconds, by the clock of the caller: a client's clock may be wrong.
        """
        known = self._nodes.get(arrival.exchange_id)
        if known is not None:
            return [known.place()]
        self._forget(now)
        search = _Search(self, arrival)
        parent, how, exact = search.find()
        session = self._session(arrival, search, parent)
        node = Node(arrival.exchange_id, arrival.at, search.agent, session)
        node.placed_at = now
        node.trace_id, node.turn_id, node.exact = arrival.trace_id, arrival.turn_id, exact
        node.has_reply = bool(arrival.replies)
        node.how = how
        if parent is not None:
            node.join(parent, how)
            node.turn = parent.turn + 1
            node.segment = parent.segment + (how == "kept")
        self._nodes[arrival.exchange_id] = node
        answered = search.register(node)
        return [node.place(), *self._adopt(node, answered)]

    def restore(self, arrival: Arrival, place: Place, *, now: float) -> None:
        """Remember an exchange whose place is known, after a restart. In the order in which they
        were placed.

        now: when it was placed.
        """
        if arrival.exchange_id in self._nodes:
            return
        self._forget(now)
        search = _Search(self, arrival)
        parent = self._nodes.get(place.parent) if place.parent is not None else None
        session = self._sessions.get(place.session)
        if session is None:
            session = self._sessions[place.session] = Session(place.session)
        self._name(session, search.names)
        node = Node(arrival.exchange_id, arrival.at, search.agent, session)
        node.placed_at = now
        node.trace_id, node.turn_id = arrival.trace_id, arrival.turn_id
        node.exact = place.how in EXACT
        node.has_reply = bool(arrival.replies)
        if parent is not None:
            node.join(parent, place.how)
        node.how, node.branch = place.how, place.branch
        node.turn, node.segment = place.turn, place.segment
        self._nodes[arrival.exchange_id] = node
        search.register(node)

    def nodes_under(self, index: int, key: bytes) -> list[Node]:
        return self._indexes[index].get(key, [])

    def add(self, index: int, key: bytes, node: Node) -> None:
        under = self._indexes[index].setdefault(key, [])
        if len(under) == SAME_KEY:
            under.pop(0).keys.remove((index, key))
        under.append(node)
        node.keys.append((index, key))

    def named(self, name: bytes) -> Session | None:
        """The session of a header or a trace."""
        return self._named.get(name)

    def _session(self, arrival: Arrival, search: _Search, parent: Node | None) -> Session:
        session = search.session if parent is None else parent.session
        for name in search.names:
            session = session or self._named.get(name)
        if session is None:
            name_of = arrival.session_header or arrival.exchange_id
            session = self._sessions.get(name_of)
            if session is None:
                session = self._sessions[name_of] = Session(name_of)
        self._name(session, search.names)
        return session

    def _name(self, session: Session, names: Iterable[bytes]) -> None:
        for name in names:
            if name not in self._named:
                self._named[name] = session
                session.names.append(name)

    def _adopt(self, node: Node, answered: Iterable[bytes]) -> list[Place]:
        """Move those under `node` that arrived before it."""
        moved: list[Place] = []
        for key in answered:
            for child in list(self.nodes_under(WANTED, key)):
                if child.exact or child is node:
                    continue
                freed = node.come_above(child)
                child.join(node, "answered")
                child.exact = True
                before = child.session
                moved += child.settle(node.session, node.segment)
                if freed is not None:
                    moved += freed.settle(node.session, freed.segment)
                if not before.nodes:
                    self._rename(before, node.session)
        return moved

    def _rename(self, before: Session, session: Session) -> None:
        """Give the names of a session that became part of another one to that one."""
        for name in before.names:
            self._named[name] = session
        session.names += before.names
        before.names.clear()
        del self._sessions[before.name]

    def _forget(self, now: float) -> None:
        while self._nodes:
            oldest = next(iter(self._nodes.values()))
            if len(self._nodes) < self._max_nodes and now - oldest.placed_at <= self._ttl_s:
                return
            del self._nodes[oldest.exchange_id]
            for index, key in oldest.keys:
                under = self._indexes[index][key]
                under.remove(oldest)
                if not under:
                    del self._indexes[index][key]
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
            del self._sessions[session.name]


class _Search:
    """The search for the place of one exchange."""

    def __init__(self, tree: SessionTree, arrival: Arrival) -> None:
        self._tree = tree
        self._arrival = arrival
        self.session: Session | None = None
        """Found without a parent."""
        self._messages = arrival.conversation.messages
        self.agent = Agent(arrival.conversation)
        owner = (arrival.project, arrival.key_id, arrival.user)
        self._scope = digest_of("\x00".join((*owner, arrival.session_header)))
        self._chain = marks.chain(self._scope, self._messages)
        self._replied = [
            at for at, message in enumerate(self._messages, 1) if message.role == "assistant"
        ]
        """Lengths of the beginnings that end with a reply."""
        self.names: list[bytes] = []
        if arrival.session_header:
            self.names.append(
                digest_of("\x00".join(("header", arrival.project, arrival.session_header)))
            )
        if arrival.trace_id:
            self.names.append(digest_of("\x00".join(("trace", *owner, arrival.trace_id))))

    def find(self) -> tuple[Node | None, How, bool]:
        """Return the parent, how it was found, and whether it is exact."""
        retried = self._retried()
        if retried is not None:
            self.session = retried.session
            return retried.parent, "retry", retried.exact
        if self._replied:
            last = self._replied[-1]
            caller = self._caller()
            node = self._pick(ANSWERED, self._chain[last], caller=caller)
            if node is not None:
                return node, "answered", True
            if caller is not None:
                return caller, "kept", True
            node = self._pick(ASKED, self._chain[last - 1], least=ALIKE)
            if node is not None:
                return node, "asked", True
        prefix, length = self._longest()
        kept, weight = self._kept()
        if kept is not None and (
            prefix is None or kept.session is prefix.session or weight > length
        ):
            return kept, "kept" if prefix is None else "prefix", False
        if prefix is not None:
            return prefix, "prefix", False
        called = self._called()
        if called is not None:
            return called, "called", False
        summary = self._summary()
        if summary is not None:
            return summary, "kept", False
        if any(map(self._tree.named, self.names)):
            return None, "header" if self._arrival.session_header else "trace", False
        return None, "root", False

    def register(self, node: Node) -> list[bytes]:
        """Remember the exchange. Returns: its `answered` digests."""
        tree, whole = self._tree, self._chain[-1]
        node.asked = whole
        tree.add(ASKED, whole, node)
        answered = list(dict.fromkeys(marks.link(whole, reply) for reply in self._arrival.replies))
        for key in answered:
            tree.add(ANSWERED, key, node)
        if self._replied and not node.exact:
            tree.add(WANTED, self._chain[self._replied[-1]], node)
        new = self._messages[self._replied[-1] if node.exact and self._replied else 0 :]
        found: dict[int, set[bytes]] = defaultdict(set)
        for message in new[-SEARCHED:]:
            if message.role != "assistant" and message.length >= marks.LONG:
                found[HEARD].add(marks.said(self._scope, message))
        for reply in self._arrival.replies:
            found[REPLIED].add(marks.said(self._scope, reply))
            by_ids = marks.calls(self._scope, reply)
            if by_ids is not None:
                found[CALL_IDS].add(by_ids)
            found[CALLED].update(marks.arguments(self._scope, reply))
            quotes = islice(marks.shingles(self._scope, reply.text), marks.SHINGLES)
            found[QUOTED].update(mark.to_bytes(8, "big") for mark in quotes)
        node.quotes = len(found[QUOTED])
        for index, keys in found.items():
            for key in keys:
                tree.add(index, key, node)
        return answered

    def _retried(self) -> Node | None:
        """Return the newest exchange that this one repeats because it got no reply, or because the
        client says so."""
        turn_id = self._arrival.turn_id
        for node in reversed(self._tree.nodes_under(ASKED, self._chain[-1])):
            if (not node.has_reply or (turn_id and node.turn_id == turn_id)) and self._before(node):
                return node
        return None

    def _before(self, node: Node) -> bool:
        return node.at <= self._arrival.at + SKEW_S

    def _caller(self) -> Node | None:
        """Return whose reply made the calls that the request repeats last, if their ids tell."""
        by_ids = marks.calls(self._scope, self._messages[self._replied[-1] - 1])
        nodes = self._tree.nodes_under(CALL_IDS, by_ids) if by_ids is not None else []
        return nodes[0] if len(nodes) == 1 else None  # some models number the calls of a reply

    def _pick(
        self, index: int, key: bytes, *, least: int = 0, caller: Node | None = None
    ) -> Node | None:
        """Choose among conversations that are the same up to here: the same trace, the agent that
        is most alike, one that nobody has continued yet, and of these the one that waits longest:
        conversations that are the same are likely to go on in the order in which they began."""
        best: Node | None = None
        best_rank: tuple[float, ...] = ()
        trace = self._arrival.trace_id
        for node in self._tree.nodes_under(index, key):
            likeness = self.agent.likeness(node.agent)
            if likeness < least:
                continue
            is_open = not node.children
            rank = (
                self._before(node),
                node is caller,
                bool(trace) and node.trace_id == trace,
                likeness,
                is_open,
                -node.at if is_open else node.at,
            )
            if best is None or rank > best_rank:
                best, best_rank = node, rank
        return best

    def _longest(self) -> tuple[Node | None, int]:
        """Return who shares the longest beginning that ends with a reply, and its length."""
        for length in reversed(self._replied[:-1]):
            node = self._pick(ANSWERED, self._chain[length])
            if node is None:
                node = self._pick(ASKED, self._chain[length - 1], least=ALIKE)
            if node is not None:
                return node, length
        return None, 0

    def _kept(self) -> tuple[Node | None, float]:
        """Return who gave the same replies, wherever they stand, and the weight of what is the same
        in its session. Only replies that vLLM gave count: many clients begin with a greeting of
        their own."""
        weights: dict[Session, float] = defaultdict(float)
        newest: dict[Session, Node] = {}
        for message in reversed(self._messages[-SEARCHED:]):
            by_assistant = message.role == "assistant"
            index = REPLIED if by_assistant else HEARD
            under = self._tree.nodes_under(index, marks.said(self._scope, message))
            nodes = [node for node in under if self._before(node)]
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

    def _called(self) -> Node | None:
        """Return whose reply called for this: the text is an argument of one of its calls."""
        for message in self._messages[:4]:
            if message.role == "user":
                mark = marks.whole(self._scope, message.text)
                if mark is not None:
                    node = self._pick(CALLED, mark)
                    if node is not None:
                        return node
        return None

    def _summary(self) -> Node | None:
        """Return whose reply is repeated within another text: a summary, or a record of the
        conversation. Of the session with the most such replies the newest one counts."""
        found: dict[Node, int] = defaultdict(int)
        for mark in self._quoted():
            for node in self._tree.nodes_under(QUOTED, mark):
                found[node] += 1
        whole = [
            node
            for node, parts in found.items()
            if parts >= PARTS and parts >= WHOLE * node.quotes and self._before(node)
        ]
        size: dict[Session, int] = defaultdict(int)
        for node in whole:
            size[node.session] += 1
        return max(whole, key=lambda node: (size[node.session], node.at), default=None)

    def _quoted(self) -> Iterator[bytes]:
        """Yield marks of parts of the messages and of the system prompt, each mark once."""
        conversation = self._arrival.conversation
        texts = [message.text for message in self._messages[:SEARCHED]]
        found: dict[int, None] = {}
        left = TEXT_SEARCHED
        for text in (*texts, conversation.system):
            found.update(dict.fromkeys(marks.shingles(self._scope, text[-left:])))
            left -= len(text)
            if left <= 0:
                break
        for mark in found:
            yield mark.to_bytes(8, "big")
