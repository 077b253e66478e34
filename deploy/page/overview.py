"""The first screen: what users get, what happened, what needs somebody, whether the guards see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import RedirectResponse, Response

from deploy.admin.auth import Grant
from deploy.admin.evidence.out import EvidenceOut
from deploy.admin.models import AuditOut, CanaryOut, Page, StatusOut
from deploy.admin.out import FunnelOut
from deploy.admin.wire.scopes import EVERY_SCOPE
from deploy.page.desk import Asked, Desk, View
from deploy.page.shown.attention import Need, needs
from deploy.page.shown.changes import KEPT_S, Change, Looked, changes, is_of_line, read_looked
from deploy.page.shown.traffic import ArmRow, Sight, arm_rows, lost_captures, sights
from deploy.page.shown.words import headline, serves_since, waits_for
from sidecar.routing.table import is_adapter_name

LOOKED: Final = "sidecar_admin_looked"
"""Cookie of the last visit."""
PAUSE: Final = "learner.pause"
NEWEST = 200
"""Audit rows and canaries that are read."""
LIVE_S = 5
"""Seconds after which an open page asks for its live part, told of a change or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What the first screen shows."""

    seq: int
    """`seq` of the newest row of the audit that is shown."""
    status: StatusOut
    headline: str
    looked: Looked
    changes: list[Change]
    more_changes: bool
    """Older ones than the rows that were read happened since the last visit too."""
    needs: list[Need]
    sights: list[Sight]
    arms: list[ArmRow]
    fresh: bool
    """Nothing has been asked yet."""


def overview_views(desk: Desk) -> dict[str, View]:
    async def whole(asked: Asked) -> Response:
        found = await _read(desk, asked, looks=True)
        response = _show(desk, asked, "overview.html", found, _tag(desk, asked, found))
        _remember(response, found.looked)
        return response

    async def live(asked: Asked) -> Response:
        """The same without its frame, for a page that is open; 204 when nothing has changed."""
        found = await _read(desk, asked, looks=False)
        tag = _tag(desk, asked, found)
        if asked.query.get("tag") == tag:
            return Response(status_code=204)
        return _show(desk, asked, "live.html", found, tag)

    async def seen(asked: Asked) -> Response:
        lost = lost_captures(await asked.ask.get(FunnelOut, "funnel"))
        response = RedirectResponse(asked.link("/"), status_code=303)
        _remember(response, read_looked(None, asked.now).seen(asked.now, lost))
        return response

    return {"whole": whole, "live": live, "seen": seen}


async def read_figures(desk: Desk, asked: Asked, canary: CanaryOut | None) -> Mapping[str, Any]:
    """Return the figures of a canary's evidence, for visitors who may not read what was said.

    The API asks for the scope `content`, because it shows the answers of the gate in the same
    reply. They go no further than this function.
    """
    if canary is None or not is_adapter_name(canary.canary_id):  # damaged: control ends it
        return {}
    ask = desk.ask_as(asked.request, Grant("page", EVERY_SCOPE), asked.line)
    found = await ask.get(EvidenceOut, "canaries", canary.canary_id, "evidence")
    return found.evidence


async def _read(desk: Desk, asked: Asked, *, looks: bool) -> Overview:
    ask, now = asked.ask, asked.now
    # First: a change that comes while the others are read is told to the page again.
    audit = await ask.get(Page[AuditOut], "audit", limit=NEWEST)
    status = await ask.get(StatusOut, "status")
    funnel = await ask.get(FunnelOut, "funnel")
    canaries = await ask.get(Page[CanaryOut], "canaries", limit=NEWEST)
    evidence = await read_figures(desk, asked, status.canary)
    lost = lost_captures(funnel)
    looked = read_looked(asked.request.cookies.get(LOOKED), now)
    looked = looked.again(now, lost) if looks or looked.last <= 0.0 else looked
    candidates = {one.canary_id: one.candidate for one in canaries.items}
    waits = ""
    if status.canary is not None:
        waits = waits_for(status.canary, evidence, desk.context.rules)
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
        needs=needs(
            status,
            next((one for one in canaries.items if one.state not in ("queued", "withdrawn")), None),
            lost=lost_now,
            now=now,
            paused=next((row for row in rows if row.action == PAUSE), None),
        ),
        sights=sights(funnel, status, now, lost=lost_now),
        arms=arm_rows(status.canary, evidence),
        fresh=not status.exchanges and not status.adapters,
    )


def _show(desk: Desk, asked: Asked, template: str, found: Overview, tag: str) -> Response:
    return desk.html(asked, template, found=found, tag=tag, live_s=LIVE_S)


def _tag(desk: Desk, asked: Asked, found: Overview) -> str:
    return desk.tag(asked, "live.html", found=found, live_s=LIVE_S)


def _remember(response: Response, looked: Looked) -> None:
    response.set_cookie(
        LOOKED, looked.cookie(), max_age=KEPT_S, path="/", httponly=True, samesite="strict"
    )
