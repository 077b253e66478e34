"""The API's description: how to authenticate, the scope of each route, and every status it answers.

FastAPI describes the replies of a success. The errors of this API have one form and one media type
(RFC 9457), and come from middleware as well as from routes, so they are added here for all routes.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from deploy.admin.out import Problem
from deploy.admin.wire.scopes import NEEDED, OPEN, PREFIX

MEDIA_TYPE = "application/problem+json"
ANY = (400, 401, 403, 404, 408, 413, 422, 500, 502, 503)
"""Errors of every route that needs a token."""
OF_CHANGES = (409, 412, 428)
OF_OPEN = (400, 500, 503)
KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same request gets the first reply again, for 24 hours.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
Json = dict[str, Any]
ETAGS = frozenset(
    {("GET", "/learner"), ("POST", "/learner/{action}"), ("POST", "/canaries")}
    | {("GET", "/canaries/{canary_id}"), ("POST", "/canaries/{canary_id}/{action}")}
    | {("GET", "/aliases/{name}"), ("PUT", "/aliases/{name}")}
)
"""Routes whose reply has the ETag that a change of the same resource sends as If-Match."""


def _header(description: str) -> Json:
    return {"description": description, "schema": {"type": "string"}}


REQUEST_ID = _header("The request's own, if it is plain text, else a new one; the audit has it.")
REPLAYED = _header("`true` when this is the first reply to the same Idempotency-Key.")
ETAG = _header("Of the state that the reply shows: If-Match of a change. Not weak.")
LOCATION = _header("The path of the canary.")


def _headers(method: str, path: str) -> Json:
    """Describe the headers of a success."""
    found = {"x-request-id": REQUEST_ID}
    if (method, path.removeprefix(PREFIX)) in ETAGS:
        found["etag"] = ETAG
    if (method, path) == ("POST", f"{PREFIX}/canaries"):
        found["location"] = LOCATION
    if method != "GET":
        found["idempotency-replayed"] = REPLAYED
    return found


def describe(app: FastAPI) -> Json:
    """Return the OpenAPI document. The caller keeps it: it does not change while the app runs."""
    document: Json = get_openapi(title=app.title, version=app.version, routes=app.routes)
    parts = document.setdefault("components", {})
    parts["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token whose SHA-256 digest is in admin.tokens. Without any there, "
            "processes of this machine need none.",
        }
    }
    schemas = parts.setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(operation, method.upper(), path)
    return document


def _complete(operation: Json, method: str, path: str) -> None:
    scope = NEEDED.get((method, path), NEEDED.get((method, path.replace("}", ":path}"))))
    is_open = scope is OPEN
    operation["security"] = [] if is_open else [{"token": []}]
    if not is_open:
        operation["x-scope"] = scope
        told = operation.get("description", "")
        operation["description"] = f"{told}\n\nNeeds the scope `{scope}`.".strip()
    statuses = OF_OPEN if is_open else ANY
    if method != "GET":
        statuses = (*statuses, *OF_CHANGES)
        operation.setdefault("parameters", []).append(KEY)
    replies = operation["responses"]
    for status, reply in replies.items():
        if status.startswith("2"):
            reply["headers"] = _headers(method, path)
    for status in statuses:
        if status != 422 and str(status) in replies:
            continue  # the route says itself what it answers; of 422 the framework says it
        replies[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
