"""Ask for a metric's value: a Prometheus query, or a number in a JSON document over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from deploy.outside.http import Caller, OutsideError, Reply, secret_of
from sidecar.settings import Metric

_PLACE = re.compile(r"\{(adapter|champion|canary)\}")
_SHOWN = 200
"""Characters of a provider's own words that are repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the placeholders of a query stand for."""

    adapter: str
    """The adapter that is looked at: the candidate, or after its promotion the champion."""
    champion: str
    """What it is compared with: the champion when the canary began."""
    canary: str
    """Id of the canary."""


class MetricSource(Protocol):
    """Where the value of a metric comes from."""

    async def read(self, metric: Metric, names: Names) -> float | None:
        """Return the value; None when the provider has no data. Raises: OutsideError."""
        ...


class HttpMetrics:
    """Both kinds of metrics, over HTTP."""

    def __init__(self, caller: Caller, environment: Mapping[str, str] | None = None) -> None:
        """environment: None takes that of the process."""
        self._caller = caller
        self._environment = environment

    async def read(self, metric: Metric, names: Names) -> float | None:
        """See `MetricSource.read`."""
        token = secret_of(metric.token_env, self._environment)
        if metric.kind == "prometheus":
            url = f"{metric.url.rstrip('/')}/api/v1/query"
            params = {"query": filled_query(metric.query, names)}
            reply = await self._caller.get(
                url, timeout_s=metric.timeout_s, token=token, params=params
            )
            return prometheus_value(reply)
        reply = await self._caller.get(
            filled_url(metric.url, names), timeout_s=metric.timeout_s, token=token
        )
        return json_value(reply, metric.pointer)


def filled_query(query: str, names: Names) -> str:
    """Put names into a query, escaped for a text between double quotes of PromQL."""

    def name(match: re.Match[str]) -> str:
        text: str = getattr(names, match[1])
        return json.dumps(text, ensure_ascii=False)[1:-1]

    return _PLACE.sub(name, query)


def filled_url(url: str, names: Names) -> str:
    """Put names into a URL, percent-encoded whole: a slash in one opens no other path."""
    return _PLACE.sub(lambda match: quote(getattr(names, match[1]), safe=""), url)


def prometheus_value(reply: Reply) -> float | None:
    """Return the number of an instant query's reply, None for an empty one.

    Raises: OutsideError.
    """
    found = _json(reply.body) if reply.status in (200, 400, 422) else None
    if not isinstance(found, dict) or found.get("status") not in ("success", "error"):
        raise OutsideError(f"status {reply.status} and no reply of Prometheus; check url and token")
    if found["status"] == "error":
        why = str(found.get("error", ""))[:_SHOWN]
        raise OutsideError(f"Prometheus refuses the query ({why}); correct query")
    data = found.get("data")
    kind = data.get("resultType") if isinstance(data, dict) else None
    result = data.get("result") if isinstance(data, dict) else None
    if kind == "vector" and isinstance(result, list):
        if not result:
            return None
        if len(result) > 1:
            raise OutsideError(
                f"the query gives {len(result)} series; aggregate them, as with sum() or max()"
            )
        sample = result[0].get("value") if isinstance(result[0], dict) else None
    elif kind == "scalar":
        sample = result
    else:
        raise OutsideError("the query gives no number but a range or a text; ask for an instant")
    try:
        return float(sample[1])  # type: ignore[index]  # a list of time and text, else TypeError
    except (TypeError, ValueError, IndexError, KeyError):
        raise OutsideError("the sample is no number; check that url is a Prometheus") from None


def json_value(reply: Reply, pointer: str) -> float | None:
    """Return the number at a JSON pointer; None for null, an absent key, and status 204.

    Raises: OutsideError.
    """
    if reply.status == 204:
        return None
    if reply.status != 200:
        raise OutsideError(f"status {reply.status}; check url and token")
    value: Any = _json(reply.body)
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 10:
            value = value[int(key)] if int(key) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(key)
        elif value is None:
            return None
        else:
            raise OutsideError(f"nothing is below {part!r} in the document; correct pointer")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OutsideError(f"a {type(value).__name__} is at the pointer and no number; correct it")
    try:
        return float(value)
    except OverflowError:
        raise OutsideError("the number has over 300 digits; correct pointer") from None


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise OutsideError("the reply is no JSON; check url") from None
