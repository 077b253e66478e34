"""Error replies that the sidecar writes itself, in vLLM's format. Pure.

The texts of 400 and 404 are those of vLLM 0.32 for the same mistake, so that a client's error
handling works as it does with vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from http import HTTPStatus
from typing import Any, Final

from sidecar.access.denials import Denial
from sidecar.records import Surface
from sidecar.relay.heads import Header, header_lines, reply_head, reply_lines
from sidecar.relay.surfaces import BY_PATH, Failure, SurfaceRule

# Which paths exist, and who answers them. Pure. Everything else is 404 and never relayed.

PROBE_PATHS: Final = frozenset({b"/health", b"/ping"})
"""vLLM's health, which needs no key in vLLM either. The application answers for all replicas."""
FEEDBACK_PATHS: Final = frozenset({b"/sidecar/v1/feedback", b"/sidecar/v1/outcomes"})
"""What clients tell of answers. These paths need a key, and take a short body."""
APP_PATHS: Final = (
    frozenset({b"/healthz", b"/readyz", b"/metrics", b"/v1/models"}) | PROBE_PATHS | FEEDBACK_PATHS
)
VLLM_PATHS: Final = frozenset({b"/version", b"/load", b"/tokenize", b"/detokenize"})
"""Paths of vLLM that change nothing there and sample nothing."""
_PATHS: Final = APP_PATHS | VLLM_PATHS | frozenset(BY_PATH)


class Destination(Enum):
    VLLM = "vllm"
    """vLLM gets the request unchanged. So it also answers other methods on the path of a model
    (CORS preflight, 405)."""
    APP = "app"
    """The FastAPI application behind the relay."""
    NOWHERE = "nowhere"


def destination(method: bytes, target: bytes) -> Destination | SurfaceRule:
    """Who answers `method target`; a surface: vLLM, with routing and capture. Paths match byte for
    byte, without decoding. A trailing slash leads nowhere; see `without_slash`."""
    path = target.partition(b"?")[0]
    rule = BY_PATH.get(path)
    if rule is not None:
        return rule if method == b"POST" else Destination.VLLM
    if path in APP_PATHS:
        return Destination.APP
    return Destination.VLLM if path in VLLM_PATHS else Destination.NOWHERE


def without_slash(target: bytes) -> bytes | None:
    """Where vLLM redirects a target whose path exists but for slashes at its end; None: no such
    path exists."""
    path, mark, query = target.partition(b"?")
    known = path.rstrip(b"/")
    return known + mark + query if known != path and known in _PATHS else None


MAX_ECHO_CHARS = 200
"""vLLM repeats at most this much of a wrong value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error reply, ready to be sent."""

    status: int
    body: bytes
    close: bool = False
    """Close the connection after this reply, because its next bytes cannot be trusted."""
    headers: tuple[bytes, ...] = ()
    """Further header lines, each `name: value`."""
    reason: str = ""
    """Label for the metric of unreadable bodies; empty when the body can be read."""


def vllm_error(
    status: int,
    message: str,
    *,
    kind: str,
    param: str | None = None,
    code: str | int | None = None,
    close: bool = False,
) -> Refusal:
    """Make an error in vLLM's format. code: None is the status."""
    error = {"message": message, "type": kind, "param": param, "code": code or status}
    body = json.dumps({"error": error}, separators=(",", ":"), ensure_ascii=False)
    return Refusal(status=status, body=body.encode("utf-8", "replace"), close=close)


def anthropic_error(status: int, message: str, *, kind: str) -> Refusal:
    """Make an error in the format of vLLM's `/v1/messages`: Anthropic's members, vLLM's names."""
    error = {"type": "error", "error": {"type": kind, "message": message}}
    body = json.dumps(error, separators=(",", ":"), ensure_ascii=False)
    return Refusal(status=status, body=body.encode("utf-8", "replace"))


def surface_error(
    surface: Surface, status: int, message: str, *, kind: str, param: str | None = None
) -> Refusal:
    if surface == "messages":
        return anthropic_error(status, message, kind=kind)
    return vllm_error(status, message, kind=kind, param=param)


def invalid_json(error: json.JSONDecodeError) -> Refusal:
    where = f"body.{error.pos}"
    detail = {
        "type": "json_invalid",
        "loc": where,
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": error.msg},
    }
    return _validation_error(detail, where, "not_json")


def not_an_object(value: Any) -> Refusal:  # Any: whatever JSON the client sent
    """The body is JSON but no object. `value` is None for an empty body too."""
    if value is None:
        detail = {"type": "missing", "loc": "body", "msg": "Field required", "input": "None"}
        return _validation_error(detail, "body", "not_an_object")
    text = f"<list of {len(value)} items>" if isinstance(value, list) else str(value)
    if len(text) > MAX_ECHO_CHARS:
        text = text[:MAX_ECHO_CHARS] + "...[truncated]"
    detail = {
        "type": "model_attributes_type",
        "loc": "body",
        "msg": "Input should be a valid dictionary or object to extract fields from",
        "input": text,
    }
    return _validation_error(detail, "body", "not_an_object")


def _validation_error(detail: dict[str, Any], param: str, reason: str) -> Refusal:
    message = f"1 validation error:\n  {detail}"
    return replace(vllm_error(400, message, kind="Bad Request", param=param), reason=reason)


def unreadable_body(reason: str) -> Refusal:
    """Python's json fails on the body for a reason other than its syntax: it is not text in an
    encoding that JSON allows, it is nested too deep, or an integer in it is too long."""
    body = b'{"detail":"There was an error parsing the body"}'
    return Refusal(status=400, body=body, reason=reason)


def unknown_model(asked: str, public: str, surface: Surface = "chat") -> Refusal:
    """The model is not the public one. Adapters are chosen by the routing table, never by name."""
    message = f"The model `{asked}` does not exist. Valid aliases: {public}."
    return surface_error(surface, 404, message, kind="NotFoundError", param="model")


def no_such_path(target: bytes) -> Refusal:
    """The path is not on the list of allowed ones. vLLM (Starlette) redirects a path with slashes
    at its end to the one without; here the location is relative, because vLLM's would name
    vLLM's own address."""
    location = without_slash(target)
    if location is None:
        return vllm_error(404, "Not Found", kind="NotFoundError")
    return Refusal(status=307, body=b"", headers=(b"location: " + location,))


def bad_framing(why: str) -> Refusal:
    """The request's framing is broken or ambiguous."""
    return vllm_error(400, f"Invalid HTTP request received: {why}", kind="Bad Request", close=True)


def head_too_large(limit: int) -> Refusal:
    message = f"The request line and headers are longer than {limit} bytes, or too many."
    return vllm_error(431, message, kind="Bad Request", close=True)


def body_too_large(limit: int) -> Refusal:
    message = f"The request body is longer than proxy.max_body_bytes ({limit})."
    return vllm_error(413, message, kind="Bad Request", close=True)


def takes_no_body(target: bytes) -> Refusal:
    """A long body on a path of the sidecar's own application, which ignores a short one, or takes
    feedback."""
    message, param = "This path takes no body.", None
    if target.partition(b"?")[0] in FEEDBACK_PATHS:
        message, param = "The body of feedback is too long: shorten the comment.", "comment"
    return vllm_error(413, message, kind="Bad Request", param=param, close=True)


def too_slow() -> Refusal:
    return vllm_error(408, "The request did not arrive in time.", kind="Bad Request", close=True)


def upstream_failed(url: str, why: str, status: int = 502, surface: Surface = "chat") -> Refusal:
    """vLLM could not be reached, broke off, or was silent (504) before its reply began."""
    message = (
        f"The sidecar got no reply from vLLM at {url} ({why}). "
        "Check that vLLM is running and that serving.upstreams names its address."
    )
    kinds = {502: "BadGatewayError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "GatewayTimeoutError")
    return surface_error(surface, status, message, kind=kind)


def with_limits(refusal: Refusal, headers: tuple[Header, ...]) -> Refusal:
    """Add the rate-limit headers to a refusal: a refused request counts against the limits too."""
    return replace(refusal, headers=refusal.headers + header_lines(headers)) if headers else refusal


def denied(denial: Denial, surface: Surface) -> Refusal:
    """Make the reply for a denial, in the format that the surface's clients read."""
    if surface == "messages":
        refusal = anthropic_error(denial.status, denial.message, kind=denial.kind)
    else:
        refusal = vllm_error(denial.status, denial.message, kind=denial.kind, code=denial.code)
    return replace(refusal, headers=header_lines(denial.headers))


def unknown_adapter(name: str, surface: Surface) -> Refusal:
    message = (
        f"No adapter `{name}` is loaded: name base, champion, canary, a version such as v12, or "
        "an adapter as `sidecar adapters ls` shows it."
    )
    return surface_error(surface, 404, message, kind="NotFoundError", param="x-sidecar-adapter")


def too_busy(surface: Surface, why: str = "The sidecar has too many requests in flight") -> Refusal:
    refusal = surface_error(surface, 503, f"{why}; try again.", kind="ServiceUnavailableError")
    return replace(refusal, headers=(b"retry-after: 1",))


def bodies_full(limit: int, surface: Surface) -> Refusal:
    why = f"The request bodies in memory reach {limit} bytes (by proxy.max_body_bytes)"
    return too_busy(surface, why)


def stream_failure(why: str, failure: Failure) -> bytes:
    """Return the bytes that end a stream that vLLM broke off, as vLLM 0.32 reports a failure; empty
    for a surface on which vLLM closes the connection instead."""
    if failure == "cut":
        return b""
    message = f"The sidecar lost vLLM in the middle of its reply ({why})."
    if failure == "event":
        told = anthropic_error(500, message, kind="internal_error")
        return b"event: error\ndata: " + told.body + b"\n\n"
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"


def refusal_reply(
    refusal: Refusal, *, own: Sequence[bytes] = (), close: bool, head_only: bool = False
) -> bytes:
    """Return the whole reply. head_only: for a HEAD request."""
    lines = refusal.headers
    if refusal.body:
        lines = (b"content-type: application/json", *lines)
    head = reply_head(
        reply_lines(refusal.status, HTTPStatus(refusal.status).phrase.encode(), lines),
        own=own,
        content_length=len(refusal.body),
        chunked=False,
        close=close or refusal.close,
    )
    return head if head_only else head + refusal.body


def names_unknown_model(body: bytes) -> bool:
    """Return True when this 404, which answers an adapter's name, may mean that nobody knows it.
    Any 404 may, in whatever form a version of vLLM or a gateway before it says so, but two: an
    error that names another `param` (`/v1/responses` has one for an unknown `response_id`), and an
    object without an error, such as `{"detail": "Not Found"}` for a path that this vLLM lacks. vLLM
    0.32 says `"type": "NotFoundError", "param": "model"` for chat, completions, responses, tokenize
    and detokenize, and names no param for messages and count_tokens."""
    try:
        found = json.loads(body)
    except RecursionError:
        return False
    except ValueError:
        return True
    if not isinstance(found, dict):
        return True
    error = found.get("error", found)  # of an older vLLM the error is the whole object
    if error is found and "message" not in found:
        return False
    param = error.get("param") if isinstance(error, dict) else None
    return not isinstance(param, str) or param in ("", "model")
