"""Where exchanges are remembered: by digests of what they asked, were answered, said and called."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from ingest.sessions.node import Node

KINDS: Final = range(8)
SAME_KEY: Final = 32
"""Nodes remembered under one key, the newest."""
ANSWERED, ASKED, REPLIED, HEARD, QUOTED, CALLED, CALL_IDS, WANTED = KINDS
"""Kinds of keys: the conversation with its reply; without it; the reply wherever it stands; a
tool's result or a user's message wherever it stands; parts of a reply; an argument of its calls;
the ids of its calls; the `ANSWERED` that the parent of the exchange would have."""
GUESSED: Final = frozenset({HEARD, QUOTED, CALLED})
"""The many keys of a node; they serve while its conversation goes on."""


class Indexes:
    """Nodes by kind and key."""

    def __init__(self) -> None:
        self._nodes: tuple[dict[bytes, list[Node]], ...] = tuple({} for _ in KINDS)

    def __len__(self) -> int:
        return sum(len(nodes) for index in self._nodes for nodes in index.values())

    def under(self, index: int, key: bytes | None) -> list[Node]:
        """The nodes under a key, the oldest first. key: None has none."""
        return self._nodes[index].get(key, []) if key is not None else []

    def add(self, index: int, key: bytes, node: Node) -> None:
        """Remember a node; the oldest under this key gives way."""
        under = self._nodes[index].setdefault(key, [])
        if len(under) == SAME_KEY:
            under.pop(0).keys.remove((index, key))
        under.append(node)
        node.keys.append((index, key))

    def forget(self, node: Node, kinds: Container[int] = KINDS) -> None:
        """Forget a node under all its keys of these kinds."""
        for index, key in node.keys:
            if index in kinds:
                under = self._nodes[index][key]
                under.remove(node)
                if not under:
                    del self._nodes[index][key]
        node.keys = [one for one in node.keys if one[0] not in kinds]
