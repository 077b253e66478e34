"""Ask each vLLM for what the sidecar needs: the model, the key, adapters, token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from deploy.engine.vllm_control import LORA_METRIC, read_room
from deploy.preflight.findings import Finding, error, warning
from sidecar.settings import Serving, Settings

TIMEOUT_S = 10.0
"""Limit of one call. The longest asks for one token, and vLLM may be busy with others' requests."""
SERVING, SAMPLING = "serving.upstreams", "groups.sampling_upstreams"


async def check_replicas(settings: Settings) -> AsyncIterator[Finding]:
    """Yield what is wrong with each vLLM of `serving.upstreams`, and of those that only sample."""
    async for finding in _check_serving(settings):
        yield finding
    async for finding in _check_sampling(settings):
        yield finding


async def _check_serving(settings: Settings) -> AsyncIterator[Finding]:
    serving = settings.serving
    for url in serving.upstreams:
        async with _client(serving, url) as client:
            try:
                async for finding in _check(client, url, serving):
                    yield finding
            except httpx.HTTPError as problem:
                if settings.engine.command:
                    yield warning(
                        "serving.upstreams",
                        f"{url} does not answer yet; `sidecar up` starts it by engine.command, so "
                        "check again while it runs",
                        "vllm_away",
                    )
                    continue
                why = str(problem) or type(problem).__name__
                yield error(
                    "serving.upstreams",
                    f"{url} does not answer ({why}); start vLLM, or correct it",
                    "vllm_away",
                )


async def _check_sampling(settings: Settings) -> AsyncIterator[Finding]:
    serving = settings.serving
    for url in settings.only_sampling:
        async with _client(serving, url) as client:
            try:
                names = _names(await client.get("/v1/models"))
                if names is None or serving.model not in names:
                    why = f"serves no {serving.model!r}, so no candidates are sampled; name a vLLM"
                    yield error(SAMPLING, f"{url} {why} that does", "sampling_away")
                    continue
                async for finding in _check_adapters(client, url, SAMPLING):
                    yield finding
            except httpx.HTTPError as problem:
                why = str(problem) or type(problem).__name__
                yield error(
                    SAMPLING,
                    f"{url} does not answer ({why}), so no candidates are sampled; start vLLM, or "
                    "correct it",
                    "sampling_away",
                )


def _client(serving: Serving, url: str) -> httpx.AsyncClient:
    key = serving.api_key
    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key.get_secret_value()}"} if key else {},
        timeout=TIMEOUT_S,
        trust_env=False,  # a web proxy must not be used for the operator's own vLLM
    )


async def _check(client: httpx.AsyncClient, url: str, serving: Serving) -> AsyncIterator[Finding]:
    models = await client.get("/v1/models")
    if models.status_code in (401, 403):
        yield error(
            "serving.api_key",
            f"{url} refuses the key ({models.status_code}); set SIDECAR_SERVING__API_KEY to vLLM's "
            "--api-key",
            "vllm_key",
        )
        return
    names = _names(models)
    if names is None:
        yield error(
            "serving.upstreams",
            f"{url}/v1/models answers {models.status_code} without a list of models; name a vLLM",
        )
        return
    if serving.model not in names:
        yield error(
            "serving.model",
            f"{url} does not serve {serving.model!r} but {', '.join(names) or 'no model'}; set it "
            "to vLLM's --served-model-name",
            "vllm_model",
        )
        return
    async for finding in _check_adapters(client, url, SERVING):
        yield finding
    async for finding in _check_tokens(client, url, serving.model):
        yield finding
    # Last: a vLLM that just started tells it after its first request.
    told = read_room((await client.get("/metrics")).text).max_loras
    if told is not None and told < serving.max_loras:
        yield error(
            "serving.max_loras",
            f"{url} runs with --max-loras {told}; start it with --max-loras {serving.max_loras}, "
            "or set serving.max_loras to what it has",
        )


async def _check_adapters(
    client: httpx.AsyncClient, url: str, setting: str
) -> AsyncIterator[Finding]:
    load = await client.post("/v1/load_lora_adapter", json={})  # no name: nothing is loaded
    if load.status_code in (404, 405):
        yield error(
            setting,
            f"{url} loads no adapters at run time; start vLLM with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment",
            "no_lora",
        )
    metrics = await client.get("/metrics")
    if metrics.status_code != 200:
        yield error(
            setting,
            f"{url}/metrics answers {metrics.status_code}; it gets no candidates while its load is "
            "not known, and --enable-lora cannot be checked; let the sidecar read it",
            "no_load",
        )
    elif LORA_METRIC not in metrics.text:
        yield error(setting, f"{url} runs without --enable-lora; start vLLM with it", "no_lora")


async def _check_tokens(client: httpx.AsyncClient, url: str, model: str) -> AsyncIterator[Finding]:
    path = "/v1/chat/completions"
    plain = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    reply = await client.post(path, json={**plain, "logprobs": True, "return_token_ids": True})
    refused = f"{reply.status_code}: {reply.text[:200]}"
    if reply.status_code != 200 and (await client.post(path, json=plain)).status_code == 200:
        yield error(
            "serving.upstreams",
            f"{url} fails when it is asked for log-probabilities and token ids ({refused}), so "
            "users are served without them, and nothing can be learned from its replies; "
            "use a vLLM that gives both (vLLM 0.32 does)",
            "fields_refused",
        )
    elif reply.status_code != 200:
        yield error(
            "serving.upstreams",
            f"{url} answers a request of one token with {refused}",
        )
    elif not _has_token_ids(reply):
        yield error(
            "serving.upstreams",
            f"{url} ignores return_token_ids, so nothing can be learned from its replies; use "
            "vLLM 0.32",
            "no_token_ids",
        )


def _names(reply: httpx.Response) -> list[str] | None:
    try:
        return [str(card["id"]) for card in reply.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def _has_token_ids(reply: httpx.Response) -> bool:
    try:
        found: Any = reply.json()
        choice = found["choices"][0]
        return bool(found["prompt_token_ids"]) and bool(choice["token_ids"])
    except (ValueError, LookupError, TypeError):
        return False
