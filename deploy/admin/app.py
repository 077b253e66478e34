"""The admin API under `/admin/v1`, with its own listener and its own tokens.

`reception` is middleware before every route: it authenticates the caller and limits the body.
Each route needs the scope that `wire.NEEDED` states.
Reads are in `reads` and `records`, changes in `actions` and `changes`; errors are problem+json.
Handlers that use the store run in threads, so that a slow one delays no other.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Depends, FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import select

from deploy.admin import problems
from deploy.admin.actions import action_router
from deploy.admin.auth import Caller, allowed
from deploy.admin.changes import change_router
from deploy.admin.context import AdminContext
from deploy.admin.events import event_router
from deploy.admin.metrics import StoreCollector, render
from deploy.admin.models import NO_VLLM
from deploy.admin.out import Out
from deploy.admin.reads import read_router
from deploy.admin.reception import Reception
from deploy.admin.records import record_router
from deploy.admin.wire import AsciiJSONResponse, describe
from sidecar.errors import StoreError
from sidecar.processes import installed_version
from sidecar.store.models import RoutingRow
from sidecar.visible import counted

NO_STORE = "the store does not answer; control's log says why"
NO_TABLE = (
    "the store has no routing table yet: the control that acts writes it at its start; look at its "
    "log, and whether store.url and serving.model are those of that control"
)


def create_app(context: AdminContext) -> FastAPI:
    """Build the ASGI application. A caller in this process may state the `grant` and the `source`
    of a request in its scope; whoever comes over the network is authenticated."""
    app = FastAPI(
        telemetry={"tracing": False},
        title="Learning sidecar: admin",
        version=installed_version(),
        openapi_url="/admin/openapi.json",
        # Swagger's page would load scripts from another host; the schema alone is enough.
        docs_url=None,
        redoc_url=None,
        default_response_class=AsciiJSONResponse,
        # A redirect for a trailing slash would be built from the untrusted Host header.
        redirect_slashes=False,
        dependencies=[Depends(allowed)],
    )
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(describe(app))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    problems.install(app)
    app.include_router(read_router(context))
    app.include_router(record_router(context))
    app.include_router(action_router(context))
    app.include_router(change_router(context))
    app.include_router(event_router(context))
    _add_probes(app, context)
    # The last one that is added is the first one that a request meets.
    app.add_middleware(Reception, tokens=context.tokens, refusals=context.refusals)
    return app


class ReadyOut(Out):
    """Whether this control can be asked; what is not known is left out."""

    status: Literal["ready", "not ready"]
    reason: str | None = None
    """Why it is not ready."""
    engine: str | None = None
    """`ok`, or why no vLLM is reachable."""
    loops: dict[str, str] | None = None
    """Loop of control -> `ok`, or how often it failed in a row."""
    conditions: list[str] | None = None
    """Codes of the conditions that a person has to act on."""


def _readiness(found: ReadyOut) -> JSONResponse:
    status = 200 if found.status == "ready" else 503
    return JSONResponse(found.model_dump(exclude_none=True), status_code=status)


def _add_probes(app: FastAPI, context: AdminContext) -> None:
    collector = StoreCollector(
        context.database,
        context.model,
        context.fleet.view,
        context.refusals.counts,
        loops=context.loops,
        judge=context.judge,
        lines=context.lines,
        conditions=lambda session: context.conditions(session, context.model, context.clock()),
        progress=context.progress,
    )

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answer as long as the process does."""
        return {"status": "ok"}

    @app.get("/readyz", responses={200: {"model": ReadyOut}, 503: {"model": ReadyOut}})
    def readyz() -> JSONResponse:
        """Ready when the store answers and holds a routing table.

        While vLLM is away or a loop of control fails, this API can still roll back, so it stays
        ready and the reply names the fault. `/admin/v1/status`, which needs a token, gives details.
        """
        try:
            with context.database.read() as session:
                table = session.scalar(
                    select(RoutingRow.generation).where(RoutingRow.model == context.model)
                )
                found = context.conditions(session, context.model, context.clock())
        except StoreError:  # control's loops log it
            return _readiness(ReadyOut(status="not ready", reason=NO_STORE))
        ready = table is not None
        # Anybody may ask: projects and addresses, which names of loops end with, are left out.
        worst_last = sorted(context.loops().items(), key=lambda one: one[1].failures)
        loops = {
            name.partition(" ")[0]: f"failed {counted(view.failures, 'time')} in a row"
            if view.failures
            else "ok"
            for name, view in worst_last
        }
        return _readiness(
            ReadyOut(
                status="ready" if ready else "not ready",
                reason=None if ready else NO_TABLE,
                engine=NO_VLLM if context.engine.away else "ok",
                loops=loops,
                conditions=sorted({one.code for one in found if one.state == "act"}),
            )
        )

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(_caller: Caller) -> Response:
        return Response(render(collector), media_type=CONTENT_TYPE_LATEST)
