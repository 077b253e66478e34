"""The admin API: its own listener, its own tokens, under `/admin/v1`.

`admin_reception` stands before every route: it knows the caller and bounds the body.
Reads are in `admin_reads` and `admin_records`, changes in `admin_actions`; every error is a
problem+json. Handlers that touch the store run in threads, so that a slow one holds up no other.
"""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import select

from deploy.admin import problems
from deploy.admin.actions import action_router
from deploy.admin.auth import Caller
from deploy.admin.context import AdminContext
from deploy.admin.json import AsciiJSONResponse
from deploy.admin.metrics import StoreCollector, render
from deploy.admin.models import Problem
from deploy.admin.reads import read_router
from deploy.admin.reception import Reception
from deploy.admin.records import record_router
from sidecar.errors import StoreError
from sidecar.store.models import RoutingRow

VERSION = "0.1.0"


def create_app(context: AdminContext) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(
        telemetry={"tracing": False},
        title="Learning sidecar: admin",
        version=VERSION,
        openapi_url="/admin/openapi.json",
        # Swagger's page fetches scripts from elsewhere; the schema alone is enough.
        docs_url=None,
        redoc_url=None,
        default_response_class=AsciiJSONResponse,
        # A redirect to the path without its slash would be made from the Host header.
        redirect_slashes=False,
        responses={"default": {"model": Problem, "description": "RFC 9457 problem"}},
    )
    app.add_middleware(Reception, token_digests=context.token_digests, refusals=context.refusals)
    problems.install(app)
    app.include_router(read_router(context), prefix="/admin/v1")
    app.include_router(record_router(context), prefix="/admin/v1")
    app.include_router(action_router(context), prefix="/admin/v1")
    _add_probes(app, context)
    return app


def _add_probes(app: FastAPI, context: AdminContext) -> None:
    collector = StoreCollector(
        context.database,
        context.model,
        context.fleet.view,
        context.refusals.counts,
        loops=context.loops,
    )

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/readyz")
    def readyz() -> JSONResponse:
        """The store answers and holds a routing table.

        vLLM may be away, and a loop of control may fail: both are survived, and said. This API can
        still roll back, so it must not be taken for dead. Errors are told by `/admin/v1/status`,
        which asks for a token.
        """
        try:
            with context.database.read() as session:
                table = session.scalar(
                    select(RoutingRow.generation).where(RoutingRow.model == context.model)
                )
        except StoreError as error:
            return JSONResponse({"status": "not ready", "reason": str(error)}, status_code=503)
        ready = table is not None
        body = {
            "status": "ready" if ready else "not ready",
            "engine": context.engine.away or "ok",
            "loops": {
                name: f"failed {view.failures} times in a row" if view.failures else "ok"
                for name, view in context.loops().items()
            },
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    @app.get("/metrics")
    def metrics(_caller: Caller) -> Response:
        return Response(render(collector), media_type=CONTENT_TYPE_LATEST)
