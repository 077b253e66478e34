"""Plain exchanges for tests of the data plane."""

from __future__ import annotations

from typing import Any

from sidecar.records import Exchange, Sampling, Timings


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
