"""A canary that fails, seen by the proxy's breaker alone and by control alone.

The breaker counts every reply, whatever is captured and stored; control sees the captured share of
the sessions' turns, as late as it counts them. Both are the product's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.canary.traffic import World, reply_to, requests
from deploy.evidence.live import InOrder, Live, Turn
from deploy.registry.proof_rule import guard_harm, ratios_of
from sidecar.metrics.proxy import Metrics
from sidecar.routing.breaker import ERROR, Breaker, canary_tag
from sidecar.routing.table import BUCKETS, RoutingTable
from sidecar.settings import Canary as CanarySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Sessions of the canary until each noticed; None: it never did."""

    breaker: int | None
    control: int | None


def stop(
    world: World, rules: CanarySettings, *, seed: int, weight_bp: int, capture: float
) -> Stopped:
    """Play one ramp at a weight until both noticed. capture: share of the turns that control sees;
    0: ingest is dead."""
    rng = random.Random(seed)
    table = RoutingTable(
        model="m", champion="m--v1", canary="m--v2", canary_weight_bp=weight_bp, salt=f"s{seed}"
    )
    live, proxy, tag = Live(ratios_of()), Breaker(Metrics()), canary_tag(table)
    order = InOrder(rules.turn_wait_s)
    proxy.follow(table)
    units: set[str] = set()
    breaker: int | None = None
    control: int | None = None
    for place, request in enumerate(requests(world, rng)):
        reply = reply_to(request, world, salt=table.salt, weight_bp=weight_bp, rng=rng)
        if reply.canary:
            units.add(request.key)
        if breaker is None and not reply.nobody:
            bad = ERROR if "failed" in reply.bad else 0
            proxy.reply(tag, "canary" if reply.canary else "champion", request.key, bad)
            breaker = len(units) if proxy.is_open else None
        if control is None and rng.random() < capture:
            turn = Turn(
                unit=request.key,
                canary=reply.canary,
                weight=weight_bp / BUCKETS,
                bad=reply.bad,
                caller=request.key,
                shared=reply.nobody,
            )
            at = request.at  # a reply takes no time here
            order.add(turn, started_at=at, stored_at=at, took_s=0.0, place=place)
            live.read(order.take(at))
            if guard_harm(live.guards) is not None:
                control = len(units)
        if breaker is not None and (control is not None or capture == 0.0):
            break
    return Stopped(breaker=breaker, control=control)
