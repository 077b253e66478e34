"""The data plane is a list of what is allowed."""

from __future__ import annotations

import pytest

from sidecar.relay import surfaces
from sidecar.relay.refusals import Destination, destination, without_slash


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
        (b"GET", b"/health", Destination.APP),
        (b"POST", b"/ping", Destination.APP),
        (b"GET", b"/version", Destination.VLLM),
        (b"GET", b"/load?a=b", Destination.VLLM),
        (b"POST", b"/tokenize", Destination.VLLM),
        (b"POST", b"/detokenize", Destination.VLLM),
    ],
)
def test_allowed_paths_have_one_destination(
    method: bytes, target: bytes, expected: Destination | surfaces.SurfaceRule
) -> None:
    assert destination(method, target) is expected


@pytest.mark.parametrize(
    ("target", "location"),
    [
        (b"/v1/chat/completions/", b"/v1/chat/completions"),
        (b"/v1/models/?a=b", b"/v1/models?a=b"),
        (b"/health//", b"/health"),
        (b"/tokenize/?", b"/tokenize?"),
        (b"/health", None),
        (b"/", None),
        (b"/sleep/", None),
        (b"/v1/load_lora_adapter/", None),
        (b"//evil/health/", None),
        (b"/v1/chat/completions/?x=/", b"/v1/chat/completions?x=/"),
        (b"/x?/health/", None),
    ],
)
def test_slashes_at_the_end_lead_to_the_path_without_them(
    target: bytes, location: bytes | None
) -> None:
    assert without_slash(target) == location
