"""Which paths exist, and who answers them. Pure. Everything else is 404 and never relayed.

vLLM serves the loading of adapters, sleeping and other controls on the port that answers users
(`/v1/load_lora_adapter`), so the data plane lists what is allowed, not what is forbidden.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from sidecar.relay.surface.surfaces import BY_PATH, SurfaceRule

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
    """Who answers `method target`; a surface: vLLM, with routing and capture.

    Paths match byte for byte, without decoding. A trailing slash leads nowhere; see
    `without_slash`.
    """
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
