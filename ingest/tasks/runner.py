"""What the sidecar and a runner say to each other, and a runner made of one Python function.

A runner is the agent team's own program: it plays one attempt at a recorded task to its end, with
its own tools, and tells how it ended. The sidecar sends `POST <runner>/attempts` with a `Scenario`
and waits for an `Answer`, one attempt at a time; both are JSON. `Authorization: Bearer <token>` is
sent and asked for where `SIDECAR_RUNNER_TOKEN` is set on both sides.

`serve_runner` needs no more than fastapi, uvicorn and msgspec, and is served alone: it imports
nothing else of the sidecar.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ingest.errors import IngestError

PATH: Final = "/attempts"
TOKEN_VARIABLE: Final = "SIDECAR_RUNNER_TOKEN"
LONGEST_ERROR: Final = 500
"""Characters of a runner's own words that are kept."""
MAX_ANSWER_BYTES: Final = 64 * 1024
LARGEST: Final = 1e12
"""Bound of an outcome, as of those that clients report (`sidecar.feedback`)."""


class RunnerError(IngestError):
    """The runner gave no answer that counts; the message says why."""


class RunnerAwayError(RunnerError):
    """The runner cannot be reached, or does not take attempts: no attempt began."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """sidecar -> runner. Play one attempt at a task; the `scenario` of a rollout."""

    task_id: str
    """The recorded exchange that the task begins with."""
    task_name: str = ""
    """What the agent sent as `x-sidecar-task` when it was recorded; empty: nothing."""
    attempt: int
    """Its number in the group, from 0: the attempts at one task begin alike."""
    session_id: str
    project: str
    model: str
    """What the agent sends as `model`."""
    base_url: str
    """Of the proxy, with `/v1`."""
    headers: dict[str, str]
    """To be sent with each model request, as they are: they mark the attempt's session."""
    messages: list[dict[str, Any]]  # Any: JSON, as it was recorded
    tools: list[dict[str, Any]]
    timeout_s: float
    """After this the attempt is given up."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """runner -> sidecar. How the attempt ended. Nothing set: the outcome is not known."""

    outcome: float | None = None
    success: bool | None = None
    error: str | None = None
    """The attempt failed for a reason that is not the model's: it counts for nothing."""


def read_answer(body: bytes) -> Answer:
    """Read a runner's reply. Raises: RunnerError for anything but one answer that counts."""
    if len(body) > MAX_ANSWER_BYTES:
        raise RunnerError(f"its answer has {len(body)} bytes; {MAX_ANSWER_BYTES} are read")
    try:
        answer = msgspec.json.decode(body, type=Answer)
        fields = [name for name, _ in json.loads(body, object_pairs_hook=list)]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RunnerError(f"its answer cannot be read: {error}") from error
    if len(set(fields)) < len(fields):
        raise RunnerError("it answered twice")
    return checked(answer)


def checked(answer: Answer) -> Answer:
    """Return the answer. Raises: RunnerError when it has an error, or no number that counts."""
    if answer.error is not None:
        raise RunnerError(answer.error[:LONGEST_ERROR] or "it told of an error")
    value = answer.outcome
    if value is not None and not (math.isfinite(value) and abs(value) <= LARGEST):
        raise RunnerError(f"its outcome is {value}; give a number up to {LARGEST:.0e}, or null")
    return answer


def read_result(result: object) -> Answer:
    """Return what a `rollout` returned as an answer: a trajectory stands for its `reward`, a
    boolean says whether the task succeeded.

    Raises: RunnerError for anything else, and for a number that is not finite.
    """
    found = getattr(result, "reward", result)
    if found is None:
        return Answer()
    if isinstance(found, bool):
        return Answer(success=found)
    if isinstance(found, int | float):
        return checked(Answer(outcome=float(found)))
    raise RunnerError(
        f"rollout returned a {type(result).__name__}: return a trajectory with a reward, a number, "
        "a boolean, or None"
    )


# A runner made of one function, of the shape of ART's `rollout(model, scenario)`.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerModel:
    """The model that an attempt asks: the sidecar's proxy, with the headers of the attempt."""

    name: str
    base_url: str
    """With `/v1`."""
    headers: Mapping[str, str]
    """To be sent with each request: `default_headers` of most client libraries."""
    inference_api_key: str

    @property
    def inference_base_url(self) -> str:
        """The same as `base_url`, under ART's name."""
        return self.base_url

    def get_inference_name(self) -> str:
        """What to send as `model`; ART's name."""
        return self.name

    def openai_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` that sends the headers. Needs the package `openai`."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.inference_api_key,
            default_headers=dict(self.headers),
        )


Rollout = Callable[[RunnerModel, Scenario], Awaitable[object]]
"""Plays an attempt. Returns: a trajectory with a `reward` (ART's, or `ingest.Trajectory`), a
number, a boolean, or None where the outcome is not known."""


async def play(rollout: Rollout, scenario: Scenario, *, api_key: str) -> Answer:
    """Play one attempt. What fails becomes the answer's error."""
    model = RunnerModel(
        name=scenario.model,
        base_url=scenario.base_url,
        headers=scenario.headers,
        inference_api_key=api_key,
    )
    try:
        async with asyncio.timeout(scenario.timeout_s):
            return read_result(await rollout(model, scenario))
    except Exception as error:  # noqa: BLE001 - whatever the team's code raises is told
        return Answer(error=f"{type(error).__name__}: {error}"[:LONGEST_ERROR])


def runner_app(rollout: Rollout, *, token: str = "", api_key: str = "rehearsal") -> Any:
    """Return the runner as an ASGI application, for a server of your own.

    token: callers must send it; empty: anybody may ask. api_key: what `inference_api_key` says; the
    proxy admits an attempt by its headers, so any value serves.
    """
    from fastapi import FastAPI, Request, Response

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    expected = f"Bearer {token}".encode()

    async def attempts(request: Request) -> Response:
        sent = request.headers.get("authorization", "").encode("utf-8", "replace")
        if token and not hmac.compare_digest(sent, expected):
            return _reply(401, Answer(error=f"the token is not that of {TOKEN_VARIABLE}"))
        # A web page cannot send this type without asking first, and is not answered then.
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _reply(415, Answer(error="send application/json"))
        try:
            scenario = msgspec.json.decode(await request.body(), type=Scenario)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _reply(400, Answer(error=f"this is no attempt: {error}"))
        return _reply(200, await play(rollout, scenario, api_key=api_key))

    def _reply(status: int, answer: Answer) -> Response:
        body = msgspec.json.encode(answer)
        return Response(body, status_code=status, media_type="application/json")

    app.add_route(PATH, attempts, methods=["POST"])
    return app


def serve_runner(
    rollout: Rollout, *, host: str = "127.0.0.1", port: int = 8090, api_key: str = "rehearsal"
) -> None:
    """Serve a `rollout` to the sidecar until the process is stopped (`rehearsals.runner =
    "http://127.0.0.1:8090"`). Use staging tools: it plays users' tasks again.

    api_key: see `runner_app`. Raises: RunnerError for a host that others reach without a token.
    """
    import uvicorn

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and host not in ("127.0.0.1", "::1", "localhost"):
        raise RunnerError(f"others reach {host}: set {TOKEN_VARIABLE} here and at the sidecar")
    uvicorn.run(
        runner_app(rollout, token=token, api_key=api_key), host=host, port=port, log_level="warning"
    )
