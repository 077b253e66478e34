"""The watch over the replicas outlives whatever a replica answers."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.metrics.proxy import Metrics
from sidecar.relay.replicas import Replica, Replicas
from sidecar.relay.upstream import endpoint
from sidecar.relay.watch import ModelsReply, ReplicaWatch

KNOWN = frozenset({"m", "m--v1"})


class Says:
    """A vLLM that answers one list."""

    def __init__(self, status: int, data: object) -> None:
        self._reply = ModelsReply(status, {"object": "list", "data": data})

    async def models(self, authorization: str | None, *, agent: str) -> ModelsReply:
        return self._reply


def make_watch() -> ReplicaWatch:
    replica = Replica(endpoint("http://127.0.0.1:9"), connect_timeout_s=1.0)
    return ReplicaWatch(Replicas([replica]), Metrics(), interval_s=1.0, api_key=None)


@pytest.mark.parametrize(
    ("status", "data", "expected"),
    [
        (200, [{"id": "m"}, {"id": "m--v2"}], frozenset({"m", "m--v2"})),
        (200, [{"id": "m"}, None, 3, "m--v2"], frozenset({"m"})),
        (200, [], frozenset()),
        (200, None, KNOWN),
        (200, 7, KNOWN),
        (200, {"id": "m"}, KNOWN),
        (401, [{"id": "m"}], None),
    ],
)
async def test_a_list_is_taken_and_what_is_none_leaves_the_last_one(
    status: int, data: object, expected: frozenset[str] | None
) -> None:
    says: Any = Says(status, data)

    assert await make_watch()._models(says, KNOWN) == expected
