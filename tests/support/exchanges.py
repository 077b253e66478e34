"""Plain exchanges for tests of the data plane."""

from __future__ import annotations

from typing import Any

from sidecar.records import Assignment, Exchange, RawCapture, Sampling, Timings


def make_plain_exchange(name: str, **changes: Any) -> Exchange:
    """An exchange without content."""
    values: dict[str, Any] = {
        "exchange_id": name,
        "surface": "chat",
        "public_model": "m",
        "adapter": "base",
        "arm": "champion",
        "propensity": 1.0,
        "replica": "r",
        "session_key": f"m:{name}",
        "request": b"{}",
        "choices": (),
        "sampling": Sampling(),
        "stream": False,
        "status": 200,
        "outcome": "ok",
        "timings": Timings(started_at=0.0),
    }
    return Exchange(**{**values, **changes})


def make_raw_capture(
    name: str = "ex_1", reply: tuple[bytes, ...] | None = (b"{}",), **changes: Any
) -> RawCapture:
    """A whole reply of chat, as the relay hands it to the capture."""
    values: dict[str, Any] = {
        "exchange_id": name,
        "public_model": "m",
        "route": Assignment(adapter="base", arm="champion", propensity=1.0, upstream_model="m"),
        "replica": "http://vllm",
        "session_key": "h:s",
        "user": "",
        "request": b"{}",
        "reply": reply,
        "streamed": False,
        "status": 200,
        "outcome": "ok",
        "timings": Timings(started_at=1_000.0, first_byte_s=0.5, total_s=2.0, overhead_s=0.001),
    }
    return RawCapture(**{**values, **changes})
