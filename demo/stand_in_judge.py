"""A stand-in judge: an OpenAI-compatible server that scores by a stated rule, not by judgement.

It lets the demo run without an account or a large model. To the rest of the system it is a judge
like any other: it knows nothing but the text of the prompt that it is sent over HTTP, reads the
blocks in it as a model would, and answers with the JSON that the prompt asks for. The rule is
`demo.stand_in_rule`; whoever wants real judgement sets `judge.model` to a real model.

    python -m demo.stand_in_judge --port 0      prints the port it chose
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from demo.stand_in_rule import score_answer

MODEL = "stand-in-judge"

_BLOCK = re.compile(
    r"^<(?P<name>conversation|tools|answer)-(?P<nonce>[0-9a-f]+)(?: id=\"(?P<id>\w+)\")?>\n"
    r"(?P<body>.*?)\n</(?P=name)-(?P=nonce)>$",
    re.DOTALL | re.MULTILINE,
)


class UnreadablePromptError(ValueError):
    """The text is not a prompt that asks for scores of answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a prompt asks to be scored."""

    question: str
    tool_names: tuple[str, ...]
    answers: tuple[tuple[str, Mapping[str, Any]], ...]
    """(id, answer) as shown, first to last."""


def read_prompt(text: str) -> Task:
    """Find the blocks of a prompt. Raises: UnreadablePromptError."""
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    answers: list[tuple[str, Mapping[str, Any]]] = []
    for block in _BLOCK.finditer(text):
        try:
            values = [json.loads(line) for line in block["body"].split("\n")]
        except ValueError as error:
            raise UnreadablePromptError(f"a {block['name']} block is not JSON lines") from error
        if block["name"] == "answer":
            answers.append((block["id"], values[0]))
        else:
            (messages if block["name"] == "conversation" else tools).extend(values)
    if not answers:
        raise UnreadablePromptError("no answer blocks: this stand-in judge only scores answers")
    return Task(
        question=_last_user_text(messages),
        tool_names=tuple(str(tool.get("function", {}).get("name")) for tool in tools),
        answers=tuple(answers),
    )


def judge_text(text: str) -> str:
    """Answer a prompt: the reply's text, a JSON object with one entry per id."""
    task = read_prompt(text)
    scores = []
    for name, answer in task.answers:
        score, why = score_answer(
            _text(answer.get("content")),
            task.question,
            answer.get("tool_calls"),
            task.tool_names,
        )
        scores.append({"id": name, "explanation": f"stand-in judge: {why}", "score": score})
    return json.dumps({"scores": scores})


def build_app() -> FastAPI:
    """The server: `POST /v1/chat/completions` and `GET /v1/models`."""
    app = FastAPI(title="Stand-in judge (a stated rule, not a model)")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "demo"}]}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> JSONResponse:
        try:
            body = await request.json()
            prompt = "\n\n".join(
                _text(message.get("content"))
                for message in body["messages"]
                if message.get("role") == "user"
            )
            reply = judge_text(prompt)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"{type(error).__name__}: {error}"
            return JSONResponse({"error": {"message": message, "code": 400}}, status_code=400)
        return JSONResponse(_completion(prompt, reply))

    return app


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m demo.stand_in_judge", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090, help="0 takes a free one and prints it")
    arguments = parser.parse_args(argv)
    listener = socket.create_server((arguments.host, arguments.port))
    port = listener.getsockname()[1]
    print(
        f"STAND-IN judge (scores by a stated rule, not a model) at "
        f"http://{arguments.host}:{port}/v1, model {MODEL}",
        flush=True,
    )
    config = uvicorn.Config(build_app(), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role") == "user":
            return _text(message.get("content"))
    return ""


def _text(content: Any) -> str:  # Any: a string, a list of parts, or null
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _completion(prompt: str, reply: str) -> dict[str, Any]:
    """An OpenAI chat completion. Token counts are words: it has no tokenizer."""
    prompt_tokens, completion_tokens = len(prompt.split()), len(reply.split())
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": reply},
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
