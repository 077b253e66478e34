"""The API surfaces that the relay serves: where they are and what is special about each. Pure.

`chat` and `completions` can be asked for token ids and log-probabilities; `responses`, `messages`
give neither (vLLM 0.32), so they are recorded as text. `embeddings` and the counting of tokens
sample nothing: they are relayed to the base and not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sidecar.records import Surface

Failure = Literal["done", "event", "cut"]
"""done: an error event, then `[DONE]`; event: an error event; cut: the connection breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfaceRule:
    """What the relay must know of one surface."""

    surface: Surface
    operation: str
    """`gen_ai.operation.name` of its spans."""
    adapted: bool = True
    """An adapter answers it, by the routing table; False: always the base."""
    captured: bool = True
    gives_ids: bool = False
    """`return_token_ids` and `logprobs` can be asked for."""
    logprobs_ask: bytes = b"true"
    """What to set `logprobs` to: for one log-probability per sampled token and nothing more."""
    needs_model: bool = False
    """vLLM refuses a request without `model`; elsewhere the served one is meant."""
    failure: Failure = "cut"
    """How a stream ends when vLLM fails in its middle; as vLLM 0.32 ends it itself."""


CHAT = SurfaceRule(surface="chat", operation="chat", gives_ids=True, failure="done")
COMPLETIONS = SurfaceRule(
    surface="completions",
    operation="text_completion",
    gives_ids=True,
    logprobs_ask=b"0",
    failure="done",
)
RESPONSES = SurfaceRule(surface="responses", operation="chat")
MESSAGES = SurfaceRule(surface="messages", operation="chat", needs_model=True, failure="event")
COUNT_TOKENS = SurfaceRule(
    surface="messages",
    operation="count_tokens",
    adapted=False,
    captured=False,
    needs_model=True,
)
EMBEDDINGS = SurfaceRule(
    surface="embeddings", operation="embeddings", adapted=False, captured=False
)

BY_PATH = {
    b"/v1/chat/completions": CHAT,
    b"/v1/completions": COMPLETIONS,
    b"/v1/responses": RESPONSES,
    b"/v1/messages": MESSAGES,
    b"/v1/messages/count_tokens": COUNT_TOKENS,
    b"/v1/embeddings": EMBEDDINGS,
}
