"""All vLLM replicas: one reconciler for each, and a combined view.

Adapters are loaded per replica, so each replica is reconciled on its own: one that is down is
retried without delaying the others, and one that restarted gets its adapters again. The proxy sends
an adapter's users only to replicas whose list of models has it, so an adapter can be served as soon
as one replica holds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from deploy.engine.reconcile import EngineView, Reconciler


class Fleet:
    """The replicas of one model, by base URL."""

    def __init__(self, reconcilers: Mapping[str, Reconciler]) -> None:
        """reconcilers: by base URL, at least one."""
        self.reconcilers = dict(reconcilers)

    def view(self) -> EngineView:
        """Combine the latest views of all replicas.

        The engine is away when no replica answers. An adapter is loaded when every reachable
        replica has it, and refused when one of them refuses it.
        """
        views = {url: one.view for url, one in self.reconcilers.items()}
        up = [view for view in views.values() if view.away is None]
        away = "; ".join(str(view.away) for view in views.values())
        refused = {
            name: reason if len(views) == 1 else f"{url}: {reason}"
            for url, view in views.items()
            for name, reason in view.refused.items()
        }
        return EngineView(
            away=None if up else away,
            loaded=frozenset.intersection(*(view.loaded for view in up)) if up else frozenset(),
            refused=refused,
            replicas=views,
        )
