"""Where exchanges are remembered: by digests of what they asked, were answered, said and called."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Final

from ingest.sessions.node import Key, Node

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
