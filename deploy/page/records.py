"""The pages of records: canaries, funnel, groups, runs, adapters, audit."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from deploy.admin.evidence.out import EvidenceOut
from deploy.admin.filters import GROUP_STATUSES
from deploy.admin.learning.runs import RunStepOut
from deploy.admin.models import (
    AdapterOut,
    AuditOut,
    CanaryOut,
    ExchangeOut,
    GroupDetailOut,
    GroupOut,
    Page,
    RunOut,
    StatusOut,
)
from deploy.admin.out import FunnelOut
from deploy.page.desk import Asked, Desk, View
from deploy.page.overview import read_figures
from deploy.page.shown.charts import Compared, difference_chart, run_charts
from deploy.page.shown.proof import evidence_rows, proof_chart

SHOWN = 50
"""Rows of a listing."""
MOST_STEPS = 2_000
"""Steps of a run that are read for its curves."""


def record_views(desk: Desk) -> dict[str, View]:
    async def canaries(asked: Asked) -> Response:
        found = await _page(asked, CanaryOut, "canaries")
        return desk.html(asked, "canaries.html", found=found)

    async def canary(asked: Asked) -> Response:
        canary_id = asked.part("canary_id")
        one = await asked.ask.get(CanaryOut, "canaries", canary_id)
        etag = await asked.ask.etag("canaries", canary_id)
        figures = await read_figures(desk, asked, one)
        told = None
        if asked.visitor.may("content"):
            told = await asked.ask.get(EvidenceOut, "canaries", canary_id, "evidence")
        difference = None
        if told is not None:
            rules, quality = desk.context.rules, figures.get("quality")
            ends = quality if isinstance(quality, dict) else {}
            difference = difference_chart(
                (
                    Compared(place=c.place, difference=c.difference, fault=c.fault)
                    for c in told.comparisons
                ),
                rules.gate_margin if rules.promote_on == "quick" else rules.margin,
                made=told.comparisons_made,
                whole=(ends.get("low"), ends.get("high")),
            )
        return desk.html(
            asked,
            "canary.html",
            canary=one,
            etag=etag,
            proof=proof_chart(figures),
            difference=difference,
            rows=evidence_rows(figures, asked.now),
            told=told,
        )

    async def funnel(asked: Asked) -> Response:
        found = await asked.ask.get(FunnelOut, "funnel")
        return desk.html(asked, "funnel.html", found=found)

    async def groups(asked: Asked) -> Response:
        status = asked.query.get("status", "")
        found = await _page(asked, GroupOut, "groups", status=status)
        return desk.html(asked, "groups.html", found=found, status=status, statuses=GROUP_STATUSES)

    async def group(asked: Asked) -> Response:
        found = await asked.ask.get(GroupDetailOut, "groups", asked.part("group_id"))
        exchange = await asked.ask.get(ExchangeOut, "exchanges", found.exchange_id)
        return desk.html(asked, "group.html", group=found, exchange=exchange)

    async def runs(asked: Asked) -> Response:
        found = await _page(asked, RunOut, "runs")
        status = await asked.ask.get(StatusOut, "status")
        etag = await asked.ask.etag("learner")
        return desk.html(
            asked,
            "runs.html",
            found=found,
            learner=status.learner,
            by_hand=desk.context.by_hand,
            etag=etag,
        )

    async def run(asked: Asked) -> Response:
        run_id = asked.part("run_id")
        found = await asked.ask.get(RunOut, "runs", run_id)
        steps = await _steps(asked, run_id)
        return desk.html(asked, "run.html", run=found, charts=run_charts(steps), steps=steps)

    async def adapters(asked: Asked) -> Response:
        found = await _page(asked, AdapterOut, "adapters")
        return desk.html(asked, "adapters.html", found=found)

    async def audit(asked: Asked) -> Response:
        found = await _page(asked, AuditOut, "audit")
        return desk.html(asked, "audit.html", found=found)

    return {
        "canaries": canaries,
        "canary": canary,
        "funnel": funnel,
        "groups": groups,
        "group": group,
        "runs": runs,
        "run": run,
        "adapters": adapters,
        "audit": audit,
    }


async def _page(asked: Asked, kind: Any, name: str, **query: str) -> Any:
    """One page of a listing, from the cursor of the query."""
    cursor = asked.query.get("cursor", "")
    return await asked.ask.get(Page[kind], name, limit=SHOWN, cursor=cursor, **query)


async def _steps(asked: Asked, run_id: str) -> list[dict[str, Any]]:
    """The figures of a run's steps, the first first: of a long run the newest."""
    found: list[RunStepOut] = []
    cursor = ""
    while len(found) < MOST_STEPS:
        page = await asked.ask.get(
            Page[RunStepOut], "runs", run_id, "steps", limit=200, cursor=cursor
        )
        found += page.items
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
    return [{**one.figures, "step": one.step} for one in reversed(found)]
