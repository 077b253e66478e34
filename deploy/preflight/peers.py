"""Ask what the sidecar depends on: each vLLM, the judge, and every verifier once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import httpx

from deploy.engine.vllm_control import LORA_METRIC, read_room
from deploy.examiner import examiner_of
from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.judge_watch import advice
from ingest.judges.build import each_judge
from ingest.ruler.group import SetAside, Unanswered, ask_probe
from ingest.ruler.judge import LiteLlmJudge
from ingest.verifiers.hook import prove_all
from ingest.verifiers.records import Failure
from ingest.verifiers.rewarding import BECOMES, close_checkers, kind_of, open_checkers
from ingest.verifiers.state import failure_words
from sidecar.processes import missing_packages
from sidecar.settings import HttpVerifier, Judge, Serving, Settings, VerifierSection
from sidecar.upstreams import Upstreams

# The record that every check of a preflight yields.

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not work, or works less well than it could."""

    level: Level
    """`error`: a process fails, or a whole stage does nothing. `warning`: it runs, with less."""
    setting: str
    """The setting to change, such as `learner.device`."""
    text: str
    """What is wrong, why, and what to do."""
    cause: str = ""
    """A short name of the fault, for programs; empty where nothing asks for it."""


def error(setting: str, text: str, cause: str = "") -> Finding:
    return Finding("error", setting, text, cause)


def warning(setting: str, text: str, cause: str = "") -> Finding:
    return Finding("warning", setting, text, cause)


# Ask the judge one small question, on the path that every group takes.

KEY_WORDS = re.compile(r"\b40[13]\b|authenticat|api[ _-]?key", re.IGNORECASE)
"""How LiteLLM and providers say that a key is missing or wrong."""
LONGEST_S = 30.0
"""Longest wait for the judge. A judge that takes longer for two lines is too slow for groups."""


_SETTINGS: Final[Mapping[str, str]] = {
    JudgeUnavailableError.reason: "api_base",
    JudgeGarbledError.reason: "api_base",
    JudgeNoCreditError.reason: "api_key",
    JudgeBusyError.reason: "requests_per_minute",
}
"""Reason for which a judge gave no scores -> the setting that concerns it."""
NO_JUDGE = warning(
    "judge.model",
    "there is no judge: only outcomes of whole tasks can be learned from (tasks.learn); name a "
    "LiteLLM model",
    "no_judge",
)


async def check_judges(settings: Settings) -> list[Finding]:
    """Ask every judge that the settings name, side by side: the reward's with its fallbacks, and
    the gate's own. Each is one paid call of about 600 tokens, outside of the budgets.

    All in one event loop, and closed when all have answered: LiteLLM keeps its connections in one
    table for all, which must not change while it is closed.
    """
    asked: list[_Asked] = []
    if settings.groups.rate > 0:
        first, *fallbacks = each_judge(settings.judge)
        asked.append(_Asked(first, "judge"))
        asked += [_Asked(one, f"judge.fallbacks[{n}]") for n, one in enumerate(fallbacks)]
    if settings.gate_judge.model:
        asked.append(_Asked(settings.judge_of_gate, "gate_judge"))
    try:
        found = await asyncio.gather(*(one.ask() for one in asked))
    finally:
        for one in asked:
            await one.judge.aclose()
    findings = [finding for finding in found if finding is not None]
    examiner = examiner_of(settings)
    if examiner.warning and not any(one.setting.startswith("gate_judge.") for one in findings):
        findings.append(warning("gate_judge.model", examiner.warning, "own_exam"))
    return findings


class _Asked:
    """One judge, and the section of the settings that names it."""

    def __init__(self, settings: Judge, section: str) -> None:
        timeout_s = min(settings.timeout_s, LONGEST_S)
        self.judge = LiteLlmJudge(settings.model_copy(update={"timeout_s": timeout_s}))
        self._settings = settings
        self._section = section

    async def ask(self) -> Finding | None:
        """Send one group of two answers, on the path that every group takes."""
        settings, section = self._settings, self._section
        if not settings.model:
            return NO_JUDGE
        if lacks := missing_packages("judge"):
            return error(f"{section}.model", lacks, section)
        outcome = await ask_probe(self.judge, settings, seed=0, on_call=lambda _: None)
        if not isinstance(outcome, (SetAside, Unanswered)):
            return None
        key = _about_key(outcome)
        setting = f"{section}.{'api_key' if key else _SETTINGS.get(outcome.reason, 'model')}"
        detail = f"{outcome.detail}{_wait_of(outcome)}"
        to_do = (
            f"set {section}.api_key, or the variable of the judge's provider, to a key that it "
            "takes, and restart score and control"
            if key
            else advice(outcome.reason, section)
        )
        if section.startswith("judge.fallbacks"):  # while others work, its fault costs nothing yet
            text = f"the fallback {settings.model} would not help: {detail}; {to_do}"
            return warning(setting, text, "judge_fallback")
        return error(setting, f"{detail}; {to_do}", f"{section}_key" if key else section)


def _wait_of(outcome: SetAside | Unanswered) -> str:
    """Say what a rate limit is, and until when its provider wants to be left alone."""
    if outcome.reason != JudgeBusyError.reason:
        return ""
    wait_s = outcome.retry_after_s if isinstance(outcome, Unanswered) else 0.0
    until = datetime.now(UTC) + timedelta(seconds=wait_s)
    asked = f"; it asks to wait {wait_s:,.0f} s, until {until:%H:%M:%S} UTC" if wait_s else ""
    return f" (a rate limit of the provider, no wrong setting{asked})"


def _about_key(outcome: SetAside | Unanswered) -> bool:
    about_key = KEY_WORDS.search(outcome.detail) is not None
    return outcome.reason == JudgeRejectedError.reason and about_key


# Try every verifier once: load its code, ask its service about one small answer of our own.

CAUSE = "verifier"
KEYS = {"http": "url", "entry_point": "entry_point"}
"""Kind -> the setting that is wrong most likely."""


async def check_verifiers(settings: Settings) -> list[Finding]:
    """Return the verifiers that cannot be used, as errors: without them the reward is another."""
    verifiers = settings.reward.verifiers
    if not verifiers:
        return []
    checkers, processes = open_checkers(settings)
    try:
        tried = await prove_all(checkers, verifiers)
    finally:
        await close_checkers(checkers, processes)
    return [
        error(f"reward.verifiers.{name}.{KEYS.get(kind_of(one), 'kind')}", _text(one, found), CAUSE)
        for name, found in tried.items()
        if isinstance(found, Failure)
        for one in (verifiers[name],)
    ]


def _text(one: VerifierSection, found: Failure) -> str:
    to_do = (
        "start the service, or correct url, token or timeout_s"
        if isinstance(one, HttpVerifier)
        else "install its package beside the sidecar, or correct it"
    )
    why, becomes = failure_words(found), BECOMES[one.on_error]
    return f"the verifier gives no finding ({why}), so {becomes}; {to_do}"


TIMEOUT_S = 10.0
"""Limit of one call. The longest asks for one token, and vLLM may be busy with others' requests."""
SERVING, SAMPLING = "serving.upstreams", "groups.sampling_upstreams"


async def check_replicas(settings: Settings) -> list[Finding]:
    """Return what is wrong with each vLLM of `serving.upstreams`, and of those that only sample."""
    return [*await _check_serving(settings), *await _check_sampling(settings)]


async def _check_serving(settings: Settings) -> list[Finding]:
    serving, found = settings.serving, list[Finding]()
    for url in Upstreams(serving.upstreams).now():
        async with _client(serving, url) as client:
            try:
                await _check(client, url, serving, found)
            except httpx.HTTPError as problem:
                if settings.engine.command:
                    said = (
                        f"{url} does not answer yet; `sidecar up` starts it by engine.command, so "
                        "check again while it runs"
                    )
                    found.append(warning(SERVING, said, "vllm_away"))
                    continue
                said = f"{url} does not answer ({_why(problem)}); start vLLM, or correct it"
                found.append(error(SERVING, said, "vllm_away"))
    return found


async def _check_sampling(settings: Settings) -> list[Finding]:
    serving, found = settings.serving, list[Finding]()
    for url in Upstreams(settings.only_sampling).now():
        async with _client(serving, url) as client:
            try:
                names = _names(await client.get("/v1/models"))
                if names is not None and serving.model in names:
                    await _check_adapters(client, url, SAMPLING, found)
                    continue
                said = f"serves no {serving.model!r}, so no candidates are sampled; name a vLLM"
                said = f"{url} {said} that does"
            except httpx.HTTPError as problem:
                said = (
                    f"{url} does not answer ({_why(problem)}), so no candidates are sampled; start "
                    "vLLM, or correct it"
                )
            found.append(error(SAMPLING, said, "sampling_away"))
    return found


def _why(problem: httpx.HTTPError) -> str:
    return str(problem) or type(problem).__name__


def _client(serving: Serving, url: str) -> httpx.AsyncClient:
    key = serving.api_key
    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key.get_secret_value()}"} if key else {},
        timeout=TIMEOUT_S,
        trust_env=False,  # a web proxy must not be used for the operator's own vLLM
    )


async def _check(
    client: httpx.AsyncClient, url: str, serving: Serving, found: list[Finding]
) -> None:
    """Add what is wrong. A vLLM that breaks off half way keeps what was found before."""
    models = await client.get("/v1/models")
    if models.status_code in (401, 403):
        said = (
            f"{url} refuses the key ({models.status_code}); set SIDECAR_SERVING__API_KEY to vLLM's "
            "--api-key"
        )
        found.append(error("serving.api_key", said, "vllm_key"))
        return
    names = _names(models)
    if names is None:
        status = models.status_code
        said = f"{url}/v1/models answers {status} without a list of models; name a vLLM"
        found.append(error(SERVING, said))
        return
    if serving.model not in names:
        said = (
            f"{url} does not serve {serving.model!r} but {', '.join(names) or 'no model'}; set it "
            "to vLLM's --served-model-name"
        )
        found.append(error("serving.model", said, "vllm_model"))
        return
    await _check_adapters(client, url, SERVING, found)
    found += await _check_tokens(client, url, serving.model)
    # Last: a vLLM that just started tells it after its first request.
    told = read_room((await client.get("/metrics")).text).max_loras
    if told is not None and told < serving.max_loras:
        said = (
            f"{url} runs with --max-loras {told}; start it with --max-loras {serving.max_loras}, "
            "or set serving.max_loras to what it has"
        )
        found.append(error("serving.max_loras", said))


async def _check_adapters(
    client: httpx.AsyncClient, url: str, setting: str, found: list[Finding]
) -> None:
    load = await client.post("/v1/load_lora_adapter", json={})  # no name: nothing is loaded
    if load.status_code in (404, 405):
        said = (
            f"{url} loads no adapters at run time; start vLLM with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
        )
        found.append(error(setting, said, "no_lora"))
    metrics = await client.get("/metrics")
    if metrics.status_code != 200:
        said = (
            f"{url}/metrics answers {metrics.status_code}; it gets no candidates while its load is "
            "not known, and --enable-lora cannot be checked; let the sidecar read it"
        )
        found.append(error(setting, said, "no_load"))
    elif LORA_METRIC not in metrics.text:
        said = f"{url} runs without --enable-lora; start vLLM with it"
        found.append(error(setting, said, "no_lora"))


async def _check_tokens(client: httpx.AsyncClient, url: str, model: str) -> list[Finding]:
    path = "/v1/chat/completions"
    plain = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    reply = await client.post(path, json={**plain, "logprobs": True, "return_token_ids": True})
    refused = f"{reply.status_code}: {reply.text[:200]}"
    if reply.status_code == 200:
        said = (
            f"{url} ignores return_token_ids, so nothing can be learned from its replies; use "
            "vLLM 0.32"
        )
        return [] if _has_token_ids(reply) else [error(SERVING, said, "no_token_ids")]
    if (await client.post(path, json=plain)).status_code != 200:
        return [error(SERVING, f"{url} answers a request of one token with {refused}")]
    said = (
        f"{url} fails when it is asked for log-probabilities and token ids ({refused}), so "
        "users are served without them, and nothing can be learned from its replies; "
        "use a vLLM that gives both (vLLM 0.32 does)"
    )
    return [error(SERVING, said, "fields_refused")]


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
