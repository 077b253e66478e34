"""The names of the GenAI semantic conventions that the sidecar uses, in one table.

All of them have the status "Development" and change: the conventions moved to a repository of their
own (open-telemetry/semantic-conventions-genai), which renamed the metrics. For a backend that knows
only the names of 1.41, set `telemetry.semantic_conventions = "1.41"`. Names that are the same in
both stand where they are used (`sidecar/tracing/spans.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sidecar.records import Surface

Conventions = Literal["latest", "1.41"]

OPERATIONS: dict[Surface, str] = {
    "chat": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "embeddings": "embeddings",
}
"""`gen_ai.operation.name` of each surface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Names of the client metrics."""

    duration: str
    first_chunk: str
    input_tokens: str
    output_tokens: str
    tokens_are_histogram: bool
    """1.41 has one histogram of tokens, with input or output as an attribute."""


METRICS: dict[Conventions, MetricNames] = {
    "latest": MetricNames(
        duration="gen_ai.client.inference.duration",
        first_chunk="gen_ai.client.inference.time_to_first_chunk",
        input_tokens="gen_ai.client.inference.usage.input_tokens",
        output_tokens="gen_ai.client.inference.usage.output_tokens",
        tokens_are_histogram=False,
    ),
    "1.41": MetricNames(
        duration="gen_ai.client.operation.duration",
        first_chunk="gen_ai.client.operation.time_to_first_chunk",
        input_tokens="gen_ai.client.token.usage",
        output_tokens="gen_ai.client.token.usage",
        tokens_are_histogram=True,
    ),
}
