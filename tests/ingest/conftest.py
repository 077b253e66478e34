"""Fakes of ingest's edges, shared by its tests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ingest.judge import JudgeReply

ANSWER_BLOCK = re.compile(r'<answer-[0-9a-f]{16} id="(\w+)">\n(.*)\n</answer-[0-9a-f]{16}>')

Reply = str | Exception | Callable[[Mapping[str, dict[str, Any]]], str]


class ScriptedJudge:
    """A judge that plays a script: texts, errors, or functions of the answers it was shown.

    The last entry is repeated. A function gets {id: shown answer} in the order shown.
    """

    model = "scripted"

    def __init__(self, *script: Reply) -> None:
        self.script = list(script)
        self.conversations: list[list[dict[str, str]]] = []
        self.schemas: list[Mapping[str, Any]] = []

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        self.conversations.append([dict(message) for message in messages])
        self.schemas.append(schema)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        text = step if isinstance(step, str) else step(shown_answers(messages))
        return JudgeReply(text=text, prompt_tokens=100, completion_tokens=10, seconds=0.5)


def shown_answers(messages: Sequence[Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """{id: answer} in the order shown, read as a model would read the prompt."""
    return {name: json.loads(body) for name, body in ANSWER_BLOCK.findall(messages[1]["content"])}


def scores_reply(scores: Mapping[str, Any]) -> str:
    """A well-formed reply with these scores by id."""
    entries = [{"id": name, "explanation": f"why {name}", "score": s} for name, s in scores.items()]
    return json.dumps({"scores": entries})


def score_by_content(table: Mapping[str, float]) -> Callable[[Mapping[str, Any]], str]:
    """A judge's reply that scores each answer by a table of contents."""
    return lambda shown: scores_reply({n: table[a["content"]] for n, a in shown.items()})


class ScriptedServer:
    """An HTTP server that plays (status, JSON or bytes) pairs, the last one again and again."""

    def __init__(self, *script: tuple[int, Any]) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()
        """A reply with status 0 waits for this, and is never sent; with a body, it drips."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                server.requests.append(json.loads(body))
                server.headers.append({k.lower(): v for k, v in self.headers.items()})
                status, reply = server.script.pop(0) if len(server.script) > 1 else server.script[0]
                if status == 0:
                    self._hang(drip=reply is not None)
                    return
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _hang(self, *, drip: bool) -> None:
                if drip:
                    self.send_response(200)
                    self.send_header("content-length", "100000")
                    self.end_headers()
                for _ in range(200):
                    if server.release.wait(0.05):
                        return
                    if drip:
                        try:
                            self.wfile.write(b" ")
                        except OSError:  # the client has given up, as it should
                            return

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def completion(text: str | None) -> dict[str, Any]:
    """An OpenAI chat completion, 12 prompt and 3 completion tokens."""
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15},
    }


class JudgeKit:
    """What the tests of RULER and of the judges use."""

    ScriptedJudge = ScriptedJudge
    shown_answers = staticmethod(shown_answers)
    scores_reply = staticmethod(scores_reply)
    score_by_content = staticmethod(score_by_content)
    completion = staticmethod(completion)

    def __init__(self) -> None:
        self.servers: list[ScriptedServer] = []
        self.judges: list[Any] = []

    def serve(self, *script: tuple[int, Any]) -> ScriptedServer:
        """Start a server for this test."""
        self.servers.append(ScriptedServer(*script))
        return self.servers[-1]

    def litellm_judge(self, server_url: str, **settings: Any) -> Any:
        """A real LiteLLM judge against a local server; closed after the test."""
        from ingest.judge import LiteLlmJudge
        from sidecar.settings import Judge

        values = {"model": "openai/local-judge", "api_key": "sk-test-key-1", "timeout_s": 10.0}
        self.judges.append(LiteLlmJudge(Judge(**{**values, "api_base": server_url, **settings})))
        return self.judges[-1]


@pytest.fixture
async def judge_kit() -> AsyncIterator[JudgeKit]:
    kit = JudgeKit()
    yield kit
    for judge in kit.judges:
        await judge.aclose()
    for server in kit.servers:
        server.close()
