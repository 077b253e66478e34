"""A small customer-support agent, written as its owner would write it: the official `openai`
client and nothing of the sidecar's. The only thing that was ever changed is `base_url`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from demo.questions import Conversation

MAX_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the customer got for one turn."""

    text: str
    adapter: str
    """From the reply's `x-sidecar-adapter` header, for the demo's report only."""
    leaked_fields: bool
    """True if a field that this agent did not ask for came through."""


class SupportAgent:
    """Answers customers of Northwind Outfitters."""

    def __init__(
        self, *, base_url: str, model: str, system: str, max_tokens: int = MAX_TOKENS
    ) -> None:
        self._client = AsyncOpenAI(base_url=base_url, api_key="not-needed", timeout=120.0)
        self._model = model
        self._system = system
        self._max_tokens = max_tokens

    async def serve(self, conversation: Conversation, *, customer: str) -> list[Reply]:
        """Hold one conversation to its end. Returns one reply per turn."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}]
        replies = []
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn})
            if conversation.looked_up is not None:
                messages += _lookup_messages(conversation)
            reply = await self._ask(messages, conversation, customer)
            messages.append({"role": "assistant", "content": reply.text})
            replies.append(reply)
        return replies

    async def close(self) -> None:
        await self._client.close()

    async def _ask(
        self, messages: list[dict[str, Any]], conversation: Conversation, customer: str
    ) -> Reply:
        request: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": 1.0,
            "user": customer,
        }
        if conversation.tools:
            request["tools"] = list(conversation.tools)
        if conversation.stream:
            return await self._stream(request)
        raw = await self._client.chat.completions.with_raw_response.create(**request)
        completion = raw.parse()
        choice = completion.choices[0]
        leaked = choice.logprobs is not None or bool((choice.model_extra or {}).get("token_ids"))
        return Reply(
            text=choice.message.content or _called(choice.message.tool_calls),
            adapter=raw.headers.get("x-sidecar-adapter", ""),
            leaked_fields=leaked,
        )

    async def _stream(self, request: dict[str, Any]) -> Reply:
        raw = await self._client.chat.completions.with_raw_response.create(**request, stream=True)
        text, leaked = "", False
        async for event in raw.parse():
            for choice in event.choices:
                text += choice.delta.content or ""
                leaked |= choice.logprobs is not None
                leaked |= bool((choice.model_extra or {}).get("token_ids"))
        return Reply(
            text=text, adapter=raw.headers.get("x-sidecar-adapter", ""), leaked_fields=leaked
        )


def _lookup_messages(conversation: Conversation) -> list[dict[str, Any]]:
    lookup = conversation.looked_up
    assert lookup is not None
    call_id = f"call_{conversation.id}"
    function = {"name": lookup.tool, "arguments": json.dumps(lookup.arguments)}
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": lookup.result},
    ]


def _called(tool_calls: Any) -> str:  # Any: the client's own union of call types
    names = [call.function.name for call in tool_calls or ()]
    return f"(called {', '.join(names)})" if names else ""
