"""Which paths exist, and who answers them. Pure. Everything else is 404 and never relayed.

vLLM serves the loading of adapters, sleeping and other levers on the port that answers users
(`/v1/load_lora_adapter`), so the data plane is a list of what is allowed, not of what is not.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from sidecar.relay.surface.surfaces import BY_PATH, SurfaceRule

APP_PATHS: Final = frozenset({b"/healthz", b"/readyz", b"/metrics", b"/v1/models"})


class Destination(Enum):
    VLLM = "vllm"
    """vLLM as it came: other methods on a model path (CORS preflight, 405) are vLLM's to answer."""
    APP = "app"
    """The FastAPI application behind the relay."""
    NOWHERE = "nowhere"


def destination(method: bytes, target: bytes) -> Destination | SurfaceRule:
    """Who answers `method target`; a surface: vLLM, with routing and capture.

    Paths match byte for byte: no decoding, no trailing slash.
    """
    path = target.partition(b"?")[0]
    rule = BY_PATH.get(path)
    if rule is not None:
        return rule if method == b"POST" else Destination.VLLM
    if path in APP_PATHS:
        return Destination.APP
    return Destination.NOWHERE
