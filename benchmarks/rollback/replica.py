"""A stand-in for one vLLM: `python -m benchmarks.rollback.replica PORT`.

It lists, loads and unloads adapters, refuses an unknown name with vLLM's own 404, and answers every
chat with the name that was asked. It holds a request for ANSWER_S, as an engine would.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

BASE = "m"
ANSWER_S = 0.02


class Replica:
    def __init__(self) -> None:
        self.adapters: set[str] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *fields = head.split("\r\n")
                method, path, _ = line.split(" ", 2)
                sizes = [one for one in fields if one.lower().startswith("content-length:")]
                body = await reader.readexactly(int(sizes[0].split(":")[1])) if sizes else b""
                status, found = await self._answer(method, path, body)
                text = json.dumps(found).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(text)}\r\n\r\n".encode()
                    + text
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        asked = json.loads(body) if body else {}
        if path == "/v1/models":
            cards = [{"id": BASE, "object": "model"}]
            cards += [{"id": name, "object": "model", "parent": BASE} for name in self.adapters]
            return 200, {"object": "list", "data": cards}
        if path == "/v1/load_lora_adapter":
            self.adapters.add(asked["lora_name"])
            return 200, {}
        if path == "/v1/unload_lora_adapter":
            self.adapters.discard(asked["lora_name"])
            return 200, {}
        if path == "/v1/chat/completions":
            return await self._chat(asked)
        return (200, {}) if method == "GET" else (404, {"detail": "Not Found"})

    async def _chat(self, asked: dict[str, Any]) -> tuple[int, Any]:
        model = asked["model"]
        if model != BASE and model not in self.adapters:
            message = f"The model `{model}` does not exist."
            return 404, {
                "error": {
                    "message": message,
                    "type": "NotFoundError",
                    "param": "model",
                    "code": 404,
                }
            }
        await asyncio.sleep(ANSWER_S)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": f"said by {model}"},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        return 200, {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": model,
            "choices": [choice],
            "usage": usage,
        }


async def main(port: int) -> None:
    server = await asyncio.start_server(Replica().serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
