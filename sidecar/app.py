"""The FastAPI application behind the relay: health, metrics, the model list and feedback.

It listens on a unix socket only; the relay is its only client.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sidecar.access.admission import Keys
from sidecar.feedback import FeedbackReceiver, FeedbackRefusedError, Kind
from sidecar.metrics.proxy import Metrics
from sidecar.processes import Readiness
from sidecar.relay.refusals import upstream_failed, vllm_error
from sidecar.relay.watch import ReplicaWatch
from sidecar.routing.source import FollowedLines


def make_app(
    metrics: Metrics,
    lines: FollowedLines,
    watch: ReplicaWatch,
    keys: Keys | None = None,
    feedback: FeedbackReceiver | None = None,
    readiness: Readiness | None = None,
) -> FastAPI:
    """Build the application. keys: None when `access.mode` is not `keys`."""
    routing = lines.source.default
    readiness = readiness or Readiness()
    # Spans of scrapes and health checks would outnumber those of model requests.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, telemetry={"tracing": False})

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def healthz() -> dict[str, str]:
        """Liveness: the process runs."""
        return {"status": "ok"}

    @app.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz() -> JSONResponse:
        """Readiness: requests can be relayed, and the process does not end soon."""
        answers = await asyncio.gather(*(status.reachable() for status in watch.statuses))
        keys_read = keys is None or keys.ring is not None
        status_code = readiness.status(works=any(answers) and keys_read)
        state: dict[str, Any] = {
            "ready": status_code == 200,
            "upstreams": [
                {"url": status.url, "reachable": reachable}
                for status, reachable in zip(watch.statuses, answers, strict=True)
            ],
            "keys_read": keys_read,
            "routing": {"model": routing.table.model, "generation": routing.table.generation},
        }
        if lines.own:
            state["project_routing"] = {
                project: {"generation": own.table.generation}
                for project, (own, _) in lines.own.items()
            }
        return JSONResponse(state, status_code=status_code)

    @app.get("/health")
    @app.api_route("/ping", methods=["GET", "POST"])
    async def health() -> Response:
        """As vLLM answers its probes: nothing but the status. 200 while any vLLM is healthy."""
        answers = await asyncio.gather(*(status.reachable() for status in watch.statuses))
        return Response(status_code=readiness.status(works=any(answers)))

    @app.get("/metrics")
    async def exposition() -> Response:
        """Metrics in Prometheus's text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """vLLM's model list with the public model only: clients do not choose adapters."""
        vllm = watch.healthiest()
        sent = request.headers.get("authorization")
        # Starlette decodes headers as Latin-1; a key in UTF-8 must be sent on unchanged.
        as_sent = sent and sent.encode("latin-1").decode("utf-8", "surrogateescape")
        reply = await vllm.models(as_sent)
        if reply is None:
            refusal = upstream_failed(vllm.url, "no model list")
            return Response(refusal.body, refusal.status, media_type="application/json")
        body = public_only(reply.body, routing.table.model) if reply.status == 200 else reply.body
        return JSONResponse(body, status_code=reply.status)

    if feedback is not None:
        _add_feedback(app, feedback)
    return app


def _add_feedback(app: FastAPI, receiver: FeedbackReceiver) -> None:
    @app.post("/sidecar/v1/feedback")
    async def feedback(request: Request) -> Response:
        """How good an answer, a session or a trace was."""
        return await _take(receiver, "feedback", request)

    @app.post("/sidecar/v1/outcomes")
    async def outcomes(request: Request) -> Response:
        """How a task ended."""
        return await _take(receiver, "outcome", request)


async def _take(receiver: FeedbackReceiver, kind: Kind, request: Request) -> Response:
    headers: dict[bytes, bytes] = {}
    for name, value in request.headers.raw:
        headers.setdefault(name.lower(), value)
    try:
        feedback_id = await receiver.take(kind, await request.body(), headers)
    except FeedbackRefusedError as error:
        kinds = {401: "Unauthorized", 403: "Forbidden", 503: "ServiceUnavailableError"}
        kind_of_error = kinds.get(error.status, "Bad Request")
        refusal = vllm_error(error.status, str(error), kind=kind_of_error, param=error.param)
        extra = {"retry-after": "1"} if error.status == 503 else None
        return Response(refusal.body, error.status, extra, media_type="application/json")
    return JSONResponse({"id": feedback_id, "status": "queued"}, status_code=202)


def public_only(body: dict[str, Any], model: str) -> dict[str, Any]:
    """Return a model list without adapters. Pure."""
    cards = body.get("data")
    listed = cards if isinstance(cards, list) else []
    kept = [card for card in listed if isinstance(card, dict) and card.get("id") == model]
    return {**body, "data": kept}
