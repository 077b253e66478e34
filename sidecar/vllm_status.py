"""The few questions that the sidecar asks vLLM on its own account."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import structlog

log = structlog.get_logger()
TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ModelsReply:
    """vLLM's answer to `GET /v1/models`."""

    status: int
    body: dict[str, Any]  # Any: the cards are passed on as they are


class VllmStatus:
    """One vLLM. Close it at the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    async def reachable(self) -> bool:
        """Whether vLLM says that it is healthy."""
        try:
            reply = await self._client.get("/health")
        except httpx.HTTPError as error:
            log.debug("vllm_unreachable", url=self.url, why=repr(error))
            return False
        return reply.status_code == 200

    async def models(
        self, authorization: str | None, *, agent: str = "learning-sidecar"
    ) -> ModelsReply | None:
        """vLLM's model list, asked with this key; None when it gives none.

        agent: who asks, as vLLM's log will show it.
        """
        headers = {"user-agent": agent}
        if authorization is not None:
            headers["authorization"] = authorization
        try:
            reply = await self._client.get("/v1/models", headers=headers)
            body = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            log.debug("vllm_unreachable", url=self.url, why=repr(error))
            return None
        return ModelsReply(reply.status_code, body) if isinstance(body, dict) else None

    async def close(self) -> None:
        await self._client.aclose()
