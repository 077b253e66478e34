"""Told by `kafka-python` which partitions this process has. Imported only with Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kafka import ConsumerRebalanceListener

Assigned = Callable[[frozenset[int]], None]


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # the library has no types
    def __init__(self, assigned: Assigned) -> None:
        self._assigned = assigned

    def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        """Nothing: the batch in hand was committed, or comes again to whoever has it next."""

    def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        self._assigned(frozenset(one.partition for one in assigned))


def listener(assigned: Assigned) -> _Listener:
    """Return a listener that reports all partitions of this process after each change."""
    return _Listener(assigned)
