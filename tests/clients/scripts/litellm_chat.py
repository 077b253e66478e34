"""`litellm`, in the version with which the judge is called."""

from __future__ import annotations

from typing import Any

import litellm
from openai_chat import NAMED, TOOLS, WEATHER
from steps import KEY, MESSAGES, QUESTION, TIMEOUT_S, UNKNOWN_MODEL, Target, main, refusal

FIXED: dict[str, Any] = {
    # For tools litellm imports its gateway's packages, which a client has no need of.
    "_skip_mcp_handler": True,
    "api_key": KEY,
    "temperature": 0,
    "max_tokens": 12,
    "timeout": TIMEOUT_S,
    "max_retries": 0,
}


def ask(target: Target, provider: str = "hosted_vllm", **fields: Any) -> Any:
    fields = {"messages": MESSAGES, **FIXED, **fields}
    return litellm.completion(
        model=f"{provider}/{target.model}", api_base=f"{target.url}/v1", **fields
    )


def chat(target: Target) -> Any:
    return ask(target).model_dump()


def chat_as_openai(target: Target) -> Any:
    return ask(target, "openai", logprobs=True, top_logprobs=1).model_dump()


def chat_stream(target: Target) -> Any:
    asked = {"include_usage": True}
    return [chunk.model_dump() for chunk in ask(target, stream=True, stream_options=asked)]


def tool_named(target: Target) -> Any:
    return ask(target, messages=WEATHER, tools=TOOLS, tool_choice=NAMED, max_tokens=60).model_dump()


def tool_stream(target: Target) -> Any:
    stream = ask(
        target, messages=WEATHER, tools=TOOLS, tool_choice=NAMED, max_tokens=60, stream=True
    )
    return [chunk.model_dump() for chunk in stream]


async def chat_asynchronous(target: Target) -> Any:
    reply = await litellm.acompletion(
        model=f"hosted_vllm/{target.model}",
        api_base=f"{target.url}/v1",
        messages=MESSAGES,
        **FIXED,
    )
    return reply.model_dump()


def text_completion(target: Target) -> Any:
    reply = litellm.text_completion(
        model=f"text-completion-openai/{target.model}",
        api_base=f"{target.url}/v1",
        prompt=QUESTION,
        **FIXED,
    )
    return reply.model_dump()


def unknown_model(target: Target) -> Any:
    return refusal(lambda: ask(Target(target.url, UNKNOWN_MODEL)))


if __name__ == "__main__":
    main(
        [
            chat,
            chat_as_openai,
            chat_stream,
            tool_named,
            tool_stream,
            chat_asynchronous,
            text_completion,
            unknown_model,
        ]
    )
