"""Find the exchange that a request continues, also when it repeats no beginning. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

import msgspec

from ingest.sessions import messages, messages as marks
from ingest.sessions.messages import (
    LIST_KEYS,
    MESSAGE_KEYS,
    TOOL_KEYS,
    Arrival,
    Conversation,
    How,
    Message,
    digest_of,
    join,
    read_item,
    read_messages,
    read_tools,
)
from ingest.sessions.node import (
    ALIKE,
    ANSWERED,
    ASKED,
    CALL_IDS,
    CALLED,
    GIVEN,
    GROWN,
    HEARD,
    QUOTED,
    REPLIED,
    TOLD,
    WANTED,
    WANTED_ASKED,
    Agent,
    Indexes,
    Key,
    Node,
    Session,
    digests_of,
)
from sidecar.routing.opening import mark, opening

# Find the session of a request that repeats no beginning of a conversation. Pure.

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


def kept_traces(
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
    near = {at: digests_of(messages[max(0, at - 1) : at + 2]) for at in said}
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
    pair = digests_of(messages[max(0, at - 1) : at + 1])
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
        if digests_of(messages[begin:at]) not in node.told:
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
        for shingle in marks.shingles(scope, text[-left:]):
            found[shingle] = at
            at += 1
        left -= len(text)
        if left <= 0:
            break
    return found


SKEW_S: Final = 1.0
"""How far the clocks of two proxies may be apart: a parent begins before its child."""

PIECES: Final = 4
"""Parts of a reply that are searched for in its own prompt."""
MOST_BRANCHES: Final = 32
"""Requests that continue one exchange; agents that try several ways have fewer."""
BRANCHES: Final[Mapping[How, int]] = {"asked": 4, "prefix": 4, "kept": 4}
"""The same where the link is a guess: independent requests may share what it rests on."""
MOST_ENDS: Final = 64
"""Places in a message, the last, that are tried for the end of an earlier one with its reply."""
MOST_GROWN: Final = 4
"""The same where the link is within one message: examples in a prompt look like it."""
COPIES: Final = 8
"""Sub-agents with one task, word for word, from one exchange."""


class Search:
    """The search for the place of one exchange."""

    def __init__(self, indexes: Indexes, arrival: Arrival, agent: Agent) -> None:
        """agent: who sends this request."""
        self._indexes = indexes
        self._arrival = arrival
        self.session: Session | None = None
        """Found without a parent."""
        self._messages = arrival.conversation.messages
        self.agent = agent
        owner = (arrival.project, arrival.key_id, arrival.user)
        self.owner = digest_of("\x00".join(owner))
        self._scope = digest_of("\x00".join((*owner, arrival.session_header)))
        self._chain = messages.chain(self._scope, self._messages)
        self._replied = [
            at for at, message in enumerate(self._messages, 1) if message.role == "assistant"
        ]
        """Lengths of the beginnings that end with a reply."""
        # Many clients put a greeting of their own before the first question.
        asked = next((at for at, one in enumerate(self._messages) if one.role == "user"), 0)
        replied = (end - 1 for end in self._replied if end > asked)
        self._opening = next(replied, len(self._messages))
        """Length of the beginning up to the first reply to the user."""
        self.beginning = self._chain[self._opening]
        self.first = digests_of(self._messages[:1])
        self.names: list[bytes] = []
        if arrival.session_header:
            self.names.append(
                digest_of("\x00".join(("header", arrival.project, arrival.session_header)))
            )
        if arrival.trace_id:
            self.names.append(digest_of("\x00".join(("trace", *owner, arrival.trace_id))))

    def opening(self) -> tuple[str | None, bool]:
        """Return a digest of how the conversation begins (`sidecar.routing.opening`), and whether
        the request holds nothing after it. None: the client names its sessions, or there is no
        message.

        All requests of a conversation have the same opening, as long as the client does not shorten
        it, and so have all conversations of one user that begin alike.
        """
        if self._arrival.session_header or not self._messages:
            return None, False
        end = self._opening
        said, _ = opening((one.role, mark(one.text)) for one in self._messages)
        # Without a user's words, all of the beginning tells it.
        scope = said or messages.chain(self.owner, self._messages[:end])[-1]
        return blake2b(self.owner + scope, digest_size=8).hexdigest(), end == len(self._messages)

    def find(self) -> tuple[Node | None, How, bool]:
        """Return the parent, how it was found, and whether it is exact."""
        retried = self._retried()
        if retried is not None:
            self.session = retried.session
            return retried.parent, "retry", not retried.may_move
        given = False
        if self._replied:
            last = self._replied[-1]
            caller = self._caller()
            node = self._pick(ANSWERED, self._chain[last], "answered", caller=caller)
            if node is not None and not self._is_given(node):
                return node, "answered", True
            asked = self._pick(ASKED, self._chain[last - 1], "asked", least=ALIKE)
            given = bool(self._waiting())
            if caller is not None and not given:
                return caller, "kept", True
            if asked is not None and node is None and not self._is_given(asked):
                return asked, "asked", True
        grown = self._grown()
        if grown is not None:
            return grown, "answered", True
        if not given:
            prefix, length = self._longest()
            kept, weight = kept_traces(
                self._indexes,
                self._scope,
                self._messages,
                lambda node: self._before(node) and not self._is_spread(node, "kept"),
            )
            if kept is not None and (
                prefix is None or kept.session is prefix.session or weight > length
            ):
                return kept, "kept" if prefix is None else "prefix", False
            if prefix is not None:
                return prefix, "prefix", False
        called = self._called()
        if called is not None:
            return called, "called", False
        # What the assistant says in a message of its own was compared above, as a whole.
        texts = [
            message.text
            for at, message in enumerate(self._messages[:SEARCHED])
            if message.role != "assistant" or (at == 0 and not given)
        ]
        texts.append(self._arrival.conversation.system)
        summary = quoted(self._indexes, self._scope, texts, self._before)
        if summary is not None:
            return summary, "kept", False
        return None, "root", False

    @property
    def asked(self) -> bytes:
        """Digest of the conversation, without the reply."""
        return self._chain[-1]

    def register(self, node: Node) -> list[bytes]:
        """Remember the exchange. Returns: its `answered` digests."""
        indexes, whole = self._indexes, self._chain[-1]
        node.asked = whole
        indexes.add(ASKED, (whole,), node)
        answered = list(
            dict.fromkeys(messages.link(whole, reply) for reply in self._arrival.replies)
        )
        indexes.add(ANSWERED, answered, node)
        if self._replied and node.may_move:
            last = self._replied[-1]
            indexes.add(WANTED, (self._chain[last],), node)
            if not node.exact:
                indexes.add(WANTED_ASKED, (self._chain[last - 1],), node)
        new = self._messages[self._replied[-1] if node.exact and self._replied else 0 :]
        found: dict[int, set[Key]] = defaultdict(set)
        for message in new[-SEARCHED:]:
            if message.role != "assistant" and message.length >= messages.LONG:
                found[HEARD].add(messages.link(self._scope, message))
        if node.how != "kept" or self._replied:  # else it is a record of what others heard
            heard = self._messages[self._replied[-1] if self._replied else 0 :]
            for message in heard[-SEARCHED:]:
                parts = found[GIVEN if message.role == "tool" else TOLD]
                if len(parts) < messages.SHINGLES:
                    parts.update(messages.of_heard(self._scope, message.text))
        if self._messages and self._messages[-1].role == "user":
            before, last_text = self._chain[-2], self._messages[-1].text
            grown = [messages.grown(before, last_text, one.text) for one in self._arrival.replies]
            found[GROWN].update(one[0] for one in grown if one is not None)
            node.grown = tuple(one[1] for one in grown if one is not None)
        for reply in self._arrival.replies:
            found[REPLIED].add(messages.link(self._scope, reply))
            by_ids = messages.calls(self._scope, reply)
            if by_ids is not None:
                found[CALL_IDS].add(by_ids)
            found[CALLED].update(messages.arguments(self._scope, reply))
            if not self._dictates(reply.text):
                found[QUOTED].update(messages.of_reply(self._scope, reply.text))
        node.parts = {kind: len(found[kind]) for kind in (QUOTED, GIVEN, TOLD)}
        for index, keys in found.items():
            # A set takes several times the memory.
            indexes.add(index, tuple(keys), node)
        return answered

    def _dictates(self, reply: str) -> bool:
        """Return whether the prompt holds the reply, or half of it: then the reply stands in every
        request with this prompt, and names no conversation."""
        size = max(1, -(-len(reply) // PIECES))
        pieces = [reply[at : at + size] for at in range(0, len(reply), size)]
        texts = [self._arrival.conversation.system]
        texts += [one.text for one in self._messages[:SEARCHED] if one.role != "assistant"]
        left = TEXT_SEARCHED
        for text in texts:
            beginning = text[:left]
            pieces = [piece for piece in pieces if piece not in beginning]
            left -= len(text)
            if 2 * len(pieces) <= PIECES:
                return True
            if left <= 0:
                break
        return False

    def _retried(self) -> Node | None:
        """Return the newest exchange that this one repeats because it got no reply, or because the
        client says so."""
        turn_id = self._arrival.turn_id
        for node in reversed(self._indexes.under(ASKED, self._chain[-1])):
            if (not node.has_reply or (turn_id and node.turn_id == turn_id)) and self._before(node):
                return node
        return None

    def _waiting(self) -> list[Node]:
        """Return other requests that begin with the same messages, up to the last reply, and for
        which no exchange is known that gave this reply. One such request may have lost its
        parent, or be early. Where there are more, the client writes the beginning itself: it is
        given, and tells nothing."""
        whole = self._chain[-1]
        waiting = self._indexes.under(WANTED, self._chain[self._replied[-1]])
        return [one for one in waiting if one.may_move and one.asked != whole]

    def _is_given(self, node: Node) -> bool:
        """Return whether the beginning that `node` and its reply make was used before it, so that
        the reply only happens to have the same words. The first that continues it may be right
        all the same: of many conversations that begin alike one may have lost its parent."""
        whole = self._chain[-1]
        if not node.children or any(child.asked == whole for child in node.children):
            return False
        return any(one.at < node.at for one in self._waiting())

    def _before(self, node: Node) -> bool:
        return node.at <= self._arrival.at + SKEW_S

    def _grown(self) -> Node | None:
        """Return the exchange with whose message and reply the last message of this request
        begins: some agents write all of their work into one message. Of several, the one that
        makes up most of it."""
        if not self._messages or self._messages[-1].role != "user":
            return None
        before, text = self._chain[-2], self._messages[-1].text
        words = text.split()
        ends = [
            (at, nodes)
            for at, mark in enumerate(messages.shingles(before, text), messages.WORDS)
            if (nodes := self._indexes.under(GROWN, mark))
        ]
        for at, nodes in reversed(ends[-MOST_ENDS:]):
            whole = messages.whole_of(before, words[:at])
            for node in reversed(nodes):
                if whole in node.grown and not self._is_spread(node, "answered", MOST_GROWN):
                    return node
        return None

    def _caller(self) -> Node | None:
        """Return whose reply made the calls that the request repeats last, if their ids tell."""
        at = self._replied[-1] - 1
        by_ids = messages.calls(self._scope, self._messages[at])
        nodes = self._indexes.under(CALL_IDS, by_ids)
        # Some models number the calls of a reply.
        return nodes[0] if len(nodes) == 1 and is_new(nodes[0], self._messages, at) else None

    def _pick(
        self, index: int, key: bytes | None, how: How, *, least: int = 0, caller: Node | None = None
    ) -> Node | None:
        """Choose among conversations that are the same up to here: the same trace, the agent that
        is most alike, one that was answered, one that nobody has continued yet, and of these the
        one that waits longest: conversations that are the same are likely to go on in the order in
        which they began."""
        best: Node | None = None
        best_rank: tuple[float, ...] = ()
        trace = self._arrival.trace_id
        for node in self._indexes.under(index, key):
            likeness = self.agent.likeness(node.agent)
            if likeness < least or self._is_spread(node, how):
                continue
            is_open = not node.children
            rank = (
                self._before(node),
                node is caller,
                bool(trace) and node.trace_id == trace,
                likeness,
                node.has_reply,
                is_open,
                -node.at if is_open else node.at,
            )
            if best is None or rank > best_rank:
                best, best_rank = node, rank
        return best

    def _is_spread(self, node: Node, how: How, most: int = 0) -> bool:
        """Return whether so many requests were found to continue `node` in this way that it is no
        conversation: its words are in all prompts of a kind."""
        most = most or BRANCHES.get(how, MOST_BRANCHES)
        if len(node.children) < most or node.branches(how) < most:
            return False
        return all(child.asked != self._chain[-1] for child in node.children)

    def _longest(self) -> tuple[Node | None, int]:
        """Return who shares the longest beginning that ends with a reply, and its length."""
        for length in reversed(self._replied[:-1]):
            node = self._pick(ANSWERED, self._chain[length], "prefix")
            if node is None:
                node = self._pick(ASKED, self._chain[length - 1], "prefix", least=ALIKE)
            if node is not None:
                return node, length
        return None, 0

    def _called(self) -> Node | None:
        """Return whose reply called for this: the text is an argument of one of its calls."""
        for message in self._messages[:4]:
            if message.role == "user":
                node = self._pick(CALLED, messages.whole(self._scope, message.text), "called")
                if node is not None and not self._is_usual(node):
                    return node
        return None

    def _is_usual(self, node: Node) -> bool:
        """Return whether this request is made without `node` too: one like it began a session of
        its own before, or `node` has had its share of them."""
        same = self._indexes.under(ASKED, self._chain[-1])
        if sum(one.parent is node for one in same) >= COPIES:
            return True
        return any(
            one.parent is None
            and one.at < node.at
            and one.session is not node.session
            and one.agent.likeness(self.agent) >= ALIKE
            for one in same
        )


# Read requests, and remember what their parts say. Pure.

MESSAGE_BYTES: Final = 24 * 2**20
"""Memory of the messages remembered: some 25,000 of ordinary size."""
TOOL_BYTES: Final = 4 * 2**20
"""Memory of the names of tools."""
ENTRY_BYTES: Final = 600
"""Memory of an entry besides its texts."""
DIGESTED: Final = 1_024
"""Bytes of a part from which its digest stands for it: short ones are compared as they are."""
Part = TypeVar("Part")
_decode_parts: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Memory(Generic[Part]):
    """What parts of requests say, by their bytes; the least recently used are dropped first."""

    def __init__(
        self,
        read: Callable[[Any], Iterable[Part]],  # Any: decoded JSON
        size_of: Callable[[Part], int],
        max_bytes: int,
    ) -> None:
        self._read, self._size_of, self._max_bytes = read, size_of, max_bytes
        self._found: dict[bytes, tuple[tuple[Part, ...], int]] = {}
        self._bytes = 0

    def __call__(self, written: bytes) -> tuple[Part, ...]:
        """Read JSON. Raises: what `msgspec.json.decode` raises; RecursionError."""
        key = written
        if len(written) > DIGESTED:
            key = blake2b(written, digest_size=32).digest()
        entry = self._found.pop(key, None)
        if entry is None:
            parts = tuple(self._read(msgspec.json.decode(written)))
            entry = parts, ENTRY_BYTES + len(key) + sum(map(self._size_of, parts))
            self._bytes += entry[1]
        self._found[key] = entry  # now the most recently used
        while self._bytes > self._max_bytes:
            self._bytes -= self._found.pop(next(iter(self._found)))[1]
        return entry[0]


class RequestReader:
    """Reads the conversations of requests. For one thread."""

    def __init__(self, max_bytes: int = MESSAGE_BYTES) -> None:
        self._messages = Memory(read_item, _message_bytes, max_bytes)
        self._tools = Memory(read_tools, len, TOOL_BYTES)

    def read(self, request: bytes) -> Conversation:
        """Read the body of a request, JSON.

        Raises: msgspec.MsgspecError, ValueError or RecursionError when this is no JSON object that
            `msgspec` reads.
        """
        parts = _decode_parts(request)
        tools = [
            name for key in TOOL_KEYS if key in parts for name in self._tools(bytes(parts[key]))
        ]
        return join(self._found(parts), tools)

    def read_reply(self, message: bytes) -> Message | None:
        """Read an answer, JSON: many clients send it again in the same bytes. None: the bytes do
        not say whose message it is. Raises: as `read`."""
        found = self._messages(message)
        return found[0] if len(found) == 1 and found[0].role == "assistant" else None

    def _found(self, parts: dict[str, msgspec.Raw]) -> Iterator[Message]:
        for key in MESSAGE_KEYS:
            if key not in parts:
                continue
            if key in LIST_KEYS and bytes(parts[key])[:1] == b"[":
                for item in _decode_list(parts[key]):
                    yield from self._messages(bytes(item))
            else:
                yield from read_messages(key, msgspec.json.decode(parts[key]))


def _message_bytes(message: Message) -> int:
    return 100 + message.length
