"""The scripted judge as an OpenAI-compatible server, a process of its own.

    python -m benchmarks.ruler.server --truth TRUTH.json [--tokenizer tokenizer.json] [--delay 2.0]

It prints its base URL. The model's name says how it judges (`conditions.py`); `NAME--SIDE` judges
as `NAME`, and its calls are told apart. `GET /said` gives what it was asked and meant, by model;
`GET /load` what is in flight. Without a tokenizer tokens are words.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from benchmarks.ruler.conditions import condition_of
from benchmarks.ruler.scripted import ScriptedReply, reply_to

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
Json = dict[str, Any]  # Any: JSON


@dataclass(slots=True)
class Account:
    """What the judge was asked."""

    said: dict[str, list[Json]] = field(default_factory=dict)
    """Model -> its calls, in the order of their replies."""
    in_flight: int = 0
    peak: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """Cases of a question, sorted -> how often it began to be asked, in whatever order."""

    def note(
        self, model: str, said: ScriptedReply, attempt: int, prompt: int, completion: int
    ) -> None:
        self.said.setdefault(model, []).append(
            {
                "cases": said.cases,
                "attempt": attempt,
                "meant": said.meant,
                "prompt_tokens": prompt,
                "completion_tokens": completion,
            }
        )


def build_app(
    truth: dict[str, float], count: Callable[[str], int], *, delay_s: float, seed: str = ""
) -> FastAPI:
    """The server. count: tokens of a text."""
    app = FastAPI(title="Scripted judge of the ruler benchmark")
    account = Account()

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> JSONResponse:
        account.in_flight += 1
        account.peak = max(account.peak, account.in_flight)
        try:
            return await _answer(await request.json())
        finally:
            account.in_flight -= 1

    async def _answer(body: Json) -> JSONResponse:
        model, messages = body["model"], body["messages"]
        condition = condition_of(model)
        prompt = sum(count(message["content"]) for message in messages)
        wanted = prompt + (body.get("max_tokens") or 0)
        if condition.limit is not None and wanted > condition.limit:
            return JSONResponse(_too_long(condition.limit, wanted), status_code=400)
        said = reply_to(messages, condition.traits, truth, seed=seed)
        account.asked[" ".join(sorted(said.cases))] += 1
        if delay_s:
            await asyncio.sleep(delay_s)
        completion = count(said.text)
        if not delay_s:  # a run that is timed would fill the memory with them
            account.note(model, said, len(messages) // 2, prompt, completion)
        return JSONResponse(_completion(model, said.text, prompt, completion))

    @app.get("/said")
    async def said() -> dict[str, list[Json]]:
        return account.said

    @app.get("/load")
    async def load() -> Json:
        found = {"in_flight": account.in_flight, "peak": account.peak, "asked": account.asked}
        account.peak = account.in_flight
        return found

    return app


def _too_long(limit: int, prompt: int) -> Json:
    """As OpenAI and vLLM say it."""
    message = (
        f"This model's maximum context length is {limit} tokens, but the request has {prompt}."
    )
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


def _completion(model: str, text: str, prompt: int, completion: int) -> Json:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    usage["total_tokens"] = prompt + completion
    made = {"id": "c", "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**made, "choices": [choice], "usage": usage}


def token_counter(path: Path | None) -> Callable[[str], int]:
    """Return what counts the tokens of a text: the model's tokenizer, or words without one."""
    if path is None or not path.is_file():
        return lambda text: len(text.split())
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text).ids)


@dataclass(frozen=True, slots=True)
class RunningJudge:
    """The server of `running`, as its starter sees it."""

    url: str
    """Base URL for a client of the OpenAI API."""
    process: subprocess.Popen[str]

    def said(self) -> dict[str, list[Json]]:
        """Model -> its calls so far."""
        return self._get("said")

    def load(self) -> Json:
        """`in_flight` now, `peak` since the last look, and `asked` in all."""
        return self._get("load")

    def _get(self, name: str) -> Json:
        reply = httpx.get(f"{self.url.removesuffix('/v1')}/{name}", timeout=60.0, trust_env=False)
        reply.raise_for_status()
        found: Json = reply.json()
        return found


@contextmanager
def running(
    folder: Path, truth: dict[str, float], *, tokenizer: Path | None = None, delay_s: float = 0.0
) -> Iterator[RunningJudge]:
    """Start the server in a process of its own. Raises: RuntimeError when it does not come up."""
    table = folder / "truth.json"
    table.write_text(json.dumps(truth))
    command = [sys.executable, "-m", "benchmarks.ruler.server", "--truth", str(table)]
    command += ["--delay", str(delay_s)]
    if tokenizer is not None:
        command += ["--tokenizer", str(tokenizer)]
    with (folder / "judge.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        url = process.stdout.readline().strip() if ready else ""
        if not url:
            raise RuntimeError(f"the scripted judge did not start; see {folder / 'judge.log'}")
        yield RunningJudge(url, process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ruler.server", description=__doc__)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each reply")
    options = parser.parse_args(argv)
    truth = json.loads(options.truth.read_text())
    app = build_app(truth, token_counter(options.tokenizer), delay_s=options.delay)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=60)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
