"""The first screen in four blocks: who serves, is it better, what is learned, what to do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import RedirectResponse, Response

from deploy.admin.auth import Grant
from deploy.admin.models import (
    AdapterOut,
    AuditOut,
    CanaryOut,
    ExchangeOut,
    GroupDetailOut,
    GroupOut,
    Page,
    RunDetailOut,
    RunOut,
    StatusOut,
)
from deploy.admin.out import ConditionOut, EvidenceOut, FunnelOut, ProgressOut
from deploy.admin.paging import GROUP_STATUSES
from deploy.admin.wire import EVERY_SCOPE
from deploy.page.curve import Curve, draw_curve
from deploy.page.sessions import Asked, PageServer, View
from deploy.page.text import (
    KEPT_S,
    ArmRow,
    Change,
    Compared,
    Sight,
    Visits,
    arm_rows,
    changes,
    difference_chart,
    evidence_rows,
    headline,
    is_down,
    is_of_line,
    learning,
    lost_captures,
    progressing,
    proof_chart,
    read_looked,
    run_charts,
    serves_since,
    serving,
    waits_for,
)
from deploy.text import capital
from sidecar.conditions import Condition
from sidecar.routing.table import is_adapter_name
from sidecar.visible import counted

LOOKED: Final = "sidecar_admin_looked"
"""Cookie of the last visit."""
NEWEST = 200
"""Audit rows and canaries that are read."""
LIVE_S = 5
"""Seconds after which an open page asks for its live part, told of a change or not."""


LINKS: Final = {
    "paused": "/runs",
    "learner_away": "/runs",
    "adapter_refused": "/adapters",
    "pile_up": "/funnel",
    "captures_lost": "/funnel",
    "dead_letters": "/funnel",
}
"""Code of a condition -> the page with more; one of a canary or a run names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A condition that a person should look at."""

    of: ConditionOut
    key: str
    """Stays while the same thing needs somebody: the browser finds the card again by it."""
    what: str
    to_do: str
    link: str
    """Empty: no page has more."""


def cards(status: StatusOut, *, lost: int) -> list[Card]:
    """Return the conditions of the line at hand, of no line, and those that stop another line.

    lost: captures lost since the visitor looked.
    """
    found = [
        one
        for one in status.conditions
        if one.state == "act" or (one.state == "look" and one.project in (None, status.project))
    ]
    if lost > 0:
        words = f"{counted(lost, 'capture')} lost since you last looked; agents got their answers"
        gone = Condition(kind="captures", state="look", code="captures_lost", message=words)
        found.append(ConditionOut.of(gone))
    return [_card(one) for one in found]


def _card(one: ConditionOut) -> Card:
    link, prefix = LINKS.get(one.code, ""), f"/project/{one.project}" if one.project else ""
    for name, page in (("canary_id", "/canaries/"), ("run_id", "/runs/")):
        if name in one.data:
            link = page + str(one.data[name])
    key = hashlib.sha256(f"{one.project}\n{one.kind}".encode(errors="replace")).hexdigest()[:12]
    return Card(
        of=one,
        key=key,
        what=capital(one.message),
        to_do=f"{capital(one.to_do)}." if one.to_do else "",
        link=prefix + link if link else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What the first screen shows."""

    seq: int
    """`seq` of the newest row of the audit that is shown."""
    status: StatusOut
    headline: str
    looked: Visits
    changes: list[Change]
    more_changes: bool
    """Older ones than the rows that were read happened since the last visit too."""
    needs: list[Card]
    serves: list[Sight]
    down: bool
    """Nobody answers users."""
    progress: ProgressOut
    curve: Curve | None
    better: list[Sight]
    learning: list[Sight]
    arms: list[ArmRow]
    fresh: bool
    """Nothing has been asked yet."""


def overview_views(server: PageServer) -> dict[str, View]:
    async def whole(asked: Asked) -> Response:
        found = await _read(server, asked, looks=True)
        response = _show(server, asked, "overview.html", found, _tag(server, asked, found))
        _remember(response, found.looked)
        return response

    async def live(asked: Asked) -> Response:
        """The same without its frame, for a page that is open; 204 when nothing has changed."""
        found = await _read(server, asked, looks=False)
        tag = _tag(server, asked, found)
        if asked.query.get("tag") == tag:
            return Response(status_code=204)
        return _show(server, asked, "live.html", found, tag)

    async def seen(asked: Asked) -> Response:
        lost = lost_captures(await asked.ask.get(FunnelOut, "funnel"))
        response = RedirectResponse(asked.link("/"), status_code=303)
        _remember(response, read_looked(None, asked.now).seen(asked.now, lost))
        return response

    return {"whole": whole, "live": live, "seen": seen}


async def read_figures(
    server: PageServer, asked: Asked, canary: CanaryOut | None
) -> Mapping[str, Any]:
    """Return the figures of a canary's evidence, for visitors who may not read what was said.

    The API asks for the scope `content`, because it shows the answers of the gate in the same
    reply. They go no further than this function.
    """
    if canary is None or not is_adapter_name(canary.canary_id):  # damaged: control ends it
        return {}
    ask = server.ask_as(asked.request, Grant("page", EVERY_SCOPE), asked.line)
    found = await ask.get(EvidenceOut, "canaries", canary.canary_id, "evidence")
    return found.evidence


async def _read(server: PageServer, asked: Asked, *, looks: bool) -> Overview:
    ask, now = asked.ask, asked.now
    # First: a change that comes while the others are read is told to the page again.
    audit = await ask.get(Page[AuditOut], "audit", limit=NEWEST)
    status = await ask.get(StatusOut, "status")
    funnel = await ask.get(FunnelOut, "funnel")
    progress = await ask.get(ProgressOut, "progress")
    canaries = await ask.get(Page[CanaryOut], "canaries", limit=NEWEST)
    evidence = await read_figures(server, asked, status.canary)
    waits = waits_for(status)
    lost = lost_captures(funnel)
    looked = read_looked(asked.request.cookies.get(LOOKED), now)
    looked = looked.again(now, lost) if looks or looked.last <= 0.0 else looked
    candidates = {one.canary_id: one.candidate for one in canaries.items}
    lost_now = max(0, lost - looked.lost_before)
    rows = [row for row in audit.items if is_of_line(row, asked.line, candidates)]
    return Overview(
        seq=audit.items[0].seq if audit.items else 0,
        status=status,
        headline=headline(
            status,
            serves_since(status.champion, rows),
            waits,
            now,
            None if status.canary is None else status.canary.next_step_earliest_at,
        ),
        looked=looked,
        changes=changes(rows, candidates, looked.before),
        more_changes=len(audit.items) == NEWEST and audit.items[-1].at > looked.before,
        needs=cards(status, lost=lost_now),
        serves=serving(funnel, status, now, lost=lost_now),
        down=is_down(status),
        progress=progress,
        curve=draw_curve(progress),
        better=progressing(progress),
        learning=learning(status, progress.cost, now),
        arms=arm_rows(status.canary, evidence),
        fresh=not status.exchanges and not status.adapters,
    )


def _show(server: PageServer, asked: Asked, template: str, found: Overview, tag: str) -> Response:
    return server.html(asked, template, found=found, tag=tag, live_s=LIVE_S)


def _tag(server: PageServer, asked: Asked, found: Overview) -> str:
    return server.tag(asked, "live.html", found=found, live_s=LIVE_S)


def _remember(response: Response, looked: Visits) -> None:
    response.set_cookie(
        LOOKED, looked.cookie(), max_age=KEPT_S, path="/", httponly=True, samesite="strict"
    )


# The pages of records: canaries, funnel, groups, runs, adapters, audit.

SHOWN = 50
"""Rows of a listing."""
MISSING: Final = ("learner_cannot_run", "learner_lacks")
"""Codes of what the learner's machine lacks."""


def record_views(server: PageServer) -> dict[str, View]:
    async def canaries(asked: Asked) -> Response:
        found = await _page(asked, CanaryOut, "canaries")
        return server.html(asked, "canaries.html", found=found)

    async def canary(asked: Asked) -> Response:
        canary_id = asked.part("canary_id")
        one = await asked.ask.get(CanaryOut, "canaries", canary_id)
        etag = await asked.ask.etag("canaries", canary_id)
        figures = await read_figures(server, asked, one)
        told = None
        if asked.visitor.may("content"):
            told = await asked.ask.get(EvidenceOut, "canaries", canary_id, "evidence")
        difference = None
        if told is not None:
            rules, quality = server.context.rules, figures.get("quality")
            ends = quality if isinstance(quality, dict) else {}
            difference = difference_chart(
                (
                    Compared(place=c.place, difference=c.difference, fault=c.fault)
                    for c in told.comparisons
                ),
                rules.margin,
                made=told.comparisons_made,
                whole=(ends.get("low"), ends.get("high")),
            )
        return server.html(
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
        return server.html(asked, "funnel.html", found=found)

    async def groups(asked: Asked) -> Response:
        status = asked.query.get("status", "")
        found = await _page(asked, GroupOut, "groups", status=status)
        return server.html(
            asked, "groups.html", found=found, status=status, statuses=GROUP_STATUSES
        )

    async def group(asked: Asked) -> Response:
        found = await asked.ask.get(GroupDetailOut, "groups", asked.part("group_id"))
        exchange = await asked.ask.get(ExchangeOut, "exchanges", found.exchange_id)
        return server.html(asked, "group.html", group=found, exchange=exchange)

    async def runs(asked: Asked) -> Response:
        found = await _page(asked, RunOut, "runs")
        status = await asked.ask.get(StatusOut, "status")
        etag = await asked.ask.etag("learner")
        return server.html(
            asked,
            "runs.html",
            found=found,
            learner=status.learner,
            by_hand=status.by_hand,
            missing=[one for one in status.conditions if one.code in MISSING],
            etag=etag,
        )

    async def run(asked: Asked) -> Response:
        found = await asked.ask.get(RunDetailOut, "runs", asked.part("run_id"))
        steps = [{**one.figures, "step": one.step} for one in found.steps]
        return server.html(asked, "run.html", run=found, charts=run_charts(steps), steps=steps)

    async def adapters(asked: Asked) -> Response:
        found = await _page(asked, AdapterOut, "adapters")
        return server.html(asked, "adapters.html", found=found)

    async def audit(asked: Asked) -> Response:
        found = await _page(asked, AuditOut, "audit")
        return server.html(asked, "audit.html", found=found)

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
