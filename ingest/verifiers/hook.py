"""A verifier over HTTP: a service of the operator's that is asked about each answer.

`POST url` with `{"verifier", "project", "request", "answer": {"message", "finish_reason",
"tokens"}}`; status 200 and `{"score": 0..1 | true | false | null, "why": "..."}` come back. Unless
`redact` is off, request and answers have placeholders where the judge sees some.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from ingest.errors import JudgeReplyError
from ingest.judge_prompt import unique_names
from ingest.privacy.texts import JudgeView, NotRedactedError, View
from ingest.records import Answer
from ingest.verifiers.checkers import MAX_TASK_BYTES, Checker, NotLoadedError
from ingest.verifiers.records import Failure, Result, read_result
from sidecar.settings import HttpVerifier, VerifierSection

MAX_REPLY_BYTES = 64 * 2**10
AT_ONCE = 8
"""Answers that one service is asked about at once."""
KEEPALIVE_S = 30.0


class HttpChecker:
    """Asks the service. See `ingest.verifiers.checkers.Checker`."""

    def __init__(self, name: str, settings: HttpVerifier, view: JudgeView) -> None:
        self._name = name
        self._settings = settings
        self._view = view
        token = settings.token
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token.get_secret_value()}"} if token else {},
            timeout=None,  # the whole exchange has a limit of its own
            limits=httpx.Limits(max_connections=AT_ONCE, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,  # what was said goes to the named service and through no web proxy
        )
        self._room = asyncio.Semaphore(AT_ONCE)

    async def version(self) -> str:
        """See `Checker.version`: that of the settings."""
        return self._settings.version

    async def check(self, request: bytes, answers: Sequence[Answer], project: str) -> list[Result]:
        # In a thread: a megabyte takes tens of milliseconds to decode and to search.
        bodies = await asyncio.to_thread(self._bodies, request, answers, project)
        if isinstance(bodies, Failure):
            return [bodies] * len(answers)
        return list(await asyncio.gather(*map(self._ask, bodies)))

    async def aclose(self) -> None:
        await self._client.aclose()

    def _bodies(
        self, request: bytes, answers: Sequence[Answer], project: str
    ) -> list[bytes] | Failure:
        if len(request) * len(answers) > MAX_TASK_BYTES:
            return Failure(reason="too_large", why=f"over {MAX_TASK_BYTES} bytes to send")
        try:
            asked, messages = _object(request), [_object(one.message) for one in answers]
        except (ValueError, RecursionError):
            return Failure(reason="unreadable", why="a body is no JSON object")
        try:
            if self._settings.redact:
                seen = self._view(View(context=[asked], tools=[], answers=messages))
                asked, messages = dict(seen.context[0]), [dict(one) for one in seen.answers]
        except NotRedactedError as error:
            return Failure(reason="not_redacted", why=str(error))
        return [
            json.dumps(
                {
                    "verifier": self._name,
                    "project": project,
                    "request": asked,
                    "answer": {
                        "message": message,
                        "finish_reason": one.finish_reason,
                        "tokens": len(one.token_ids) or None,
                    },
                }
            ).encode()
            for message, one in zip(messages, answers, strict=True)
        ]

    async def _ask(self, body: bytes) -> Result:
        async with self._room:
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    return await self._post(body)
            except TimeoutError:
                why = f"no whole reply in {self._settings.timeout_s:g} s"
                return Failure(reason="timeout", why=why)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                # Its text is left out: it may quote the URL, and with it a password.
                return Failure(reason="unreachable", why=type(error).__name__)

    async def _post(self, body: bytes) -> Result:
        # Not packed, so that the limit below is one of what is unpacked too.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        asked = self._client.stream("POST", self._settings.url, content=body, headers=headers)
        async with asked as reply:
            if reply.status_code != 200:
                return Failure(reason="refused", why=f"status {reply.status_code}")
            if reply.headers.get("content-encoding", "identity") != "identity":
                return Failure(reason="bad_finding", why="the reply is packed, and was not to be")
            said = bytearray()
            async for part in reply.aiter_bytes():
                said += part
                if len(said) > MAX_REPLY_BYTES:
                    return Failure(reason="bad_finding", why=f"over {MAX_REPLY_BYTES} bytes")
        try:
            found = _object(bytes(said), names=unique_names)
        except JudgeReplyError as error:  # a score that is given twice, for one
            return Failure(reason="bad_finding", why=str(error))
        except (ValueError, RecursionError):
            return Failure(reason="bad_finding", why="the reply is no JSON object")
        if "score" not in found:
            return Failure(reason="bad_finding", why="the reply has no score")
        return read_result(found["score"], found.get("why", ""))


def _object(
    body: bytes, names: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict
) -> dict[str, Any]:
    value = json.loads(body, object_pairs_hook=names)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


# Try a verifier once, before the first group: is its code loaded, does its service answer?

REQUEST = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 3?"}]}).encode()
ANSWER = Answer(
    index=0,
    origin="served",
    message=json.dumps({"role": "assistant", "content": "2 + 3 = 5"}).encode(),
    finish_reason="stop",
)
DEFAULT_PROJECT = "default"


async def prove(checker: Checker, settings: VerifierSection) -> str | Failure:
    """Try a verifier. Returns: its version, or why it cannot be used."""
    try:
        version = await checker.version()
    except NotLoadedError as error:
        return Failure(reason="not_loaded", why=str(error))
    if not isinstance(checker, HttpChecker):
        return version
    project = settings.projects[0] if settings.projects else DEFAULT_PROJECT
    (result,) = await checker.check(REQUEST, [ANSWER], project)
    return result if isinstance(result, Failure) else version


async def prove_all(
    checkers: Mapping[str, Checker], settings: Mapping[str, VerifierSection]
) -> dict[str, str | Failure]:
    """Try all verifiers at once. Returns: version, or failure, by name."""
    tried = await asyncio.gather(*(prove(one, settings[name]) for name, one in checkers.items()))
    return dict(zip(checkers, tried, strict=True))
