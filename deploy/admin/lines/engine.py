"""What the status says of vLLM: the adapters of all lines that its replicas have loaded."""

from __future__ import annotations

from deploy.admin.out import Out
from deploy.engine.reconcile import EngineView


class ReplicaOut(Out):
    """One vLLM replica."""

    away: str | None
    """Reason why it is unreachable; null when it is reachable."""
    loaded: list[str]
    refused: dict[str, str]
    """Wanted adapters that it refuses -> reason."""

    @classmethod
    def of(cls, view: EngineView) -> ReplicaOut:
        return cls(away=view.away, loaded=sorted(view.loaded), refused=dict(view.refused))


class EngineOut(Out):
    """All vLLM replicas together."""

    away: str | None
    """Reason why no replica is reachable; null when one is."""
    loaded: list[str]
    """Adapters loaded in every reachable replica."""
    refused: dict[str, str]
    """Wanted adapters that a replica refuses -> reason."""
    replicas: dict[str, ReplicaOut]
    """Replicas by base URL."""

    @classmethod
    def of(cls, view: EngineView) -> EngineOut:
        return cls(
            away=view.away,
            loaded=sorted(view.loaded),
            refused=dict(view.refused),
            replicas={url: ReplicaOut.of(one) for url, one in view.replicas.items()},
        )
