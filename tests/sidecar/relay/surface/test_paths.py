"""The data plane is a list of what is allowed."""

from __future__ import annotations

import pytest

from sidecar.relay.surface import surfaces
from sidecar.relay.surface.paths import Destination, destination


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        (b"POST", b"/v1/chat/completions", surfaces.CHAT),
        (b"POST", b"/v1/chat/completions?beta=1", surfaces.CHAT),
        (b"POST", b"/v1/completions", surfaces.COMPLETIONS),
        (b"POST", b"/v1/responses", surfaces.RESPONSES),
        (b"POST", b"/v1/messages?beta=true", surfaces.MESSAGES),
        (b"POST", b"/v1/messages/count_tokens", surfaces.COUNT_TOKENS),
        (b"POST", b"/v1/embeddings", surfaces.EMBEDDINGS),
        (b"OPTIONS", b"/v1/chat/completions", Destination.VLLM),
        (b"GET", b"/v1/models", Destination.APP),
        (b"GET", b"/metrics", Destination.APP),
        (b"HEAD", b"/healthz", Destination.APP),
    ],
)
def test_allowed_paths_have_one_destination(
    method: bytes, target: bytes, expected: Destination | surfaces.SurfaceRule
) -> None:
    assert destination(method, target) is expected


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/load_lora_adapter",
        b"/v1/unload_lora_adapter",
        b"/sleep",
        b"/v1/responses/resp_1",
        b"/v1/responses/resp_1/cancel",
        b"/v1/models/smollm2-135m",
        b"/collective_rpc",
        b"/v1/chat/completions/",
        b"/v1//chat/completions",
        b"/v1/chat/completions/../../v1/load_lora_adapter",
        b"/v1/chat%2fcompletions",
        b"/V1/CHAT/COMPLETIONS",
        b"http://127.0.0.1:8000/v1/load_lora_adapter",
        b"*",
        b"",
    ],
)
def test_every_other_path_leads_nowhere(target: bytes) -> None:
    assert destination(b"POST", target) is Destination.NOWHERE
