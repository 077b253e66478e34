"""Find the exchange that a request continues. Pure."""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import Final

from ingest.sessions import marks, traces
from ingest.sessions.indexes import (
    ANSWERED,
    ASKED,
    CALL_IDS,
    CALLED,
    GIVEN,
    HEARD,
    QUOTED,
    REPLIED,
    TOLD,
    WANTED,
    WANTED_ASKED,
    Indexes,
)
from ingest.sessions.messages import digest_of
from ingest.sessions.node import ALIKE, Agent, Key, Node, Session
from ingest.sessions.records import Arrival, How
from sidecar.routing.opening import mark, opening

SKEW_S: Final = 1.0
"""How far the clocks of two proxies may be apart: a parent begins before its child."""

PIECES: Final = 4
"""Parts of a reply that are searched for in its own prompt."""


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
        self._owner = digest_of("\x00".join(owner))
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

    def opening(self) -> tuple[str | None, bool]:
        """Return a digest of how the conversation begins (`sidecar.routing.opening`), and whether
        the request holds nothing after it. None: the client names its sessions, or there is no
        message.

        All requests of a conversation have the same opening, as long as the client does not shorten
        it, and so have all conversations of one user that begin alike.
        """
        if self._arrival.session_header or not self._messages:
            return None, False
        # Many clients put a greeting of their own before the first question.
        asked = next((at for at, one in enumerate(self._messages) if one.role == "user"), 0)
        replied = (end - 1 for end in self._replied if end > asked)
        end = next(replied, len(self._messages))
        said, _ = opening((one.role, mark(one.text)) for one in self._messages)
        # Without a user's words, all of the beginning tells it.
        scope = said or marks.chain(self._owner, self._messages[:end])[-1]
        return blake2b(self._owner + scope, digest_size=8).hexdigest(), end == len(self._messages)

    def find(self) -> tuple[Node | None, How, bool]:
        """Return the parent, how it was found, and whether it is exact."""
        retried = self._retried()
        if retried is not None:
            self.session = retried.session
            return retried.parent, "retry", not retried.may_move
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
        kept, weight = traces.kept(self._indexes, self._scope, self._messages, self._before)
        if kept is not None and (
            prefix is None or kept.session is prefix.session or weight > length
        ):
            return kept, "kept" if prefix is None else "prefix", False
        if prefix is not None:
            return prefix, "prefix", False
        called = self._called()
        if called is not None:
            return called, "called", False
        texts = [message.text for message in self._messages[: traces.SEARCHED]]
        texts.append(self._arrival.conversation.system)
        summary = traces.quoted(self._indexes, self._scope, texts, self._before)
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
        indexes.add(ASKED, (whole,), node)
        answered = list(dict.fromkeys(marks.link(whole, reply) for reply in self._arrival.replies))
        indexes.add(ANSWERED, answered, node)
        if self._replied and node.may_move:
            last = self._replied[-1]
            indexes.add(WANTED, (self._chain[last],), node)
            if not node.exact:
                indexes.add(WANTED_ASKED, (self._chain[last - 1],), node)
        new = self._messages[self._replied[-1] if node.exact and self._replied else 0 :]
        found: dict[int, set[Key]] = defaultdict(set)
        for message in new[-traces.SEARCHED :]:
            if message.role != "assistant" and message.length >= marks.LONG:
                found[HEARD].add(marks.link(self._scope, message))
        if node.how != "kept" or self._replied:  # else it is a record of what others heard
            heard = self._messages[self._replied[-1] if self._replied else 0 :]
            for message in heard[-traces.SEARCHED :]:
                parts = found[GIVEN if message.role == "tool" else TOLD]
                if len(parts) < marks.SHINGLES:
                    parts.update(marks.of_heard(self._scope, message.text))
        for reply in self._arrival.replies:
            found[REPLIED].add(marks.link(self._scope, reply))
            by_ids = marks.calls(self._scope, reply)
            if by_ids is not None:
                found[CALL_IDS].add(by_ids)
            found[CALLED].update(marks.arguments(self._scope, reply))
            if not self._dictates(reply.text):
                found[QUOTED].update(marks.of_reply(self._scope, reply.text))
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
        texts += [one.text for one in self._messages[: traces.SEARCHED] if one.role != "assistant"]
        left = traces.TEXT_SEARCHED
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

    def _before(self, node: Node) -> bool:
        return node.at <= self._arrival.at + SKEW_S

    def _caller(self) -> Node | None:
        """Return whose reply made the calls that the request repeats last, if their ids tell."""
        by_ids = marks.calls(self._scope, self._messages[self._replied[-1] - 1])
        nodes = self._indexes.under(CALL_IDS, by_ids)
        return nodes[0] if len(nodes) == 1 else None  # some models number the calls of a reply

    def _pick(
        self, index: int, key: bytes | None, *, least: int = 0, caller: Node | None = None
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
            if likeness < least:
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

    def _longest(self) -> tuple[Node | None, int]:
        """Return who shares the longest beginning that ends with a reply, and its length."""
        for length in reversed(self._replied[:-1]):
            node = self._pick(ANSWERED, self._chain[length])
            if node is None:
                node = self._pick(ASKED, self._chain[length - 1], least=ALIKE)
            if node is not None:
                return node, length
        return None, 0

    def _called(self) -> Node | None:
        """Return whose reply called for this: the text is an argument of one of its calls."""
        for message in self._messages[:4]:
            if message.role == "user":
                node = self._pick(CALLED, marks.whole(self._scope, message.text))
                if node is not None:
                    return node
        return None
