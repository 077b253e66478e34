"""Every replica of vLLM: one reconciler each, and what all of them together can do.

Adapters are per replica, so each is compared with the store and mended on its own: one that is
down is asked again without holding up the others, and one that restarted gets its adapters again.
A replica that is down blocks nothing. The proxy sends an adapter's users only to replicas whose
list of models has it, so an adapter may be served as soon as one of them holds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from deploy.engine.reconcile import EngineView, Reconciler


class Fleet:
    """The replicas of one model, by base URL."""

    def __init__(self, reconcilers: Mapping[str, Reconciler]) -> None:
        """reconcilers: one at least."""
        self.reconcilers = dict(reconcilers)

    def view(self) -> EngineView:
        """What was last seen of all of them.

        It is away when no replica answers; an adapter is loaded when every replica that answers
        has it, and refused when one of them does not take it.
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
