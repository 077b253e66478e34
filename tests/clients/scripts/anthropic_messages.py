"""The official `anthropic` client on vLLM's messages surface."""

from __future__ import annotations

from typing import Any

import anthropic
from steps import (
    CITY_SCHEMA,
    KEY,
    PIXEL,
    QUESTION,
    TIMEOUT_S,
    TOOL_NAME,
    TOOL_TEXT,
    UNKNOWN_MODEL,
    Target,
    main,
    refusal,
)

TURNS: list[Any] = [{"role": "user", "content": QUESTION}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: list[Any] = [
    {"name": TOOL_NAME, "description": TOOL_TEXT, "input_schema": CITY_SCHEMA, "strict": True}
]
NAMED: Any = {"type": "tool", "name": TOOL_NAME}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
"""This client has no argument for it any more."""


def client(target: Target) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=target.url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)


def ask(target: Target, **fields: Any) -> Any:
    fields = {"messages": TURNS, "max_tokens": 12, **GREEDY, **fields}
    return client(target).messages.create(model=target.model, **fields).model_dump()


def events(target: Target, **fields: Any) -> Any:
    fields = {"messages": TURNS, "max_tokens": 12, **GREEDY, **fields}
    stream = client(target).messages.create(model=target.model, stream=True, **fields)
    return [event.model_dump() for event in stream]


def message(target: Target) -> Any:
    return ask(target)


def message_with_a_system_text(target: Target) -> Any:
    return ask(target, system="You answer in one word.", stop_sequences=["."])


def message_stream_by_helper(target: Target) -> Any:
    with client(target).messages.stream(
        model=target.model, messages=TURNS, max_tokens=12, **GREEDY
    ) as stream:
        text = list(stream.text_stream)
        return {"text": text, "final": stream.get_final_message().model_dump()}


def tool_named(target: Target) -> Any:
    return ask(target, messages=WEATHER, tools=TOOLS, tool_choice=NAMED, max_tokens=80)


def tool_stream(target: Target) -> Any:
    return events(target, messages=WEATHER, tools=TOOLS, tool_choice=NAMED, max_tokens=80)


def turn_after_a_tool(target: Target) -> Any:
    use = {"type": "tool_use", "id": "toolu_1", "name": TOOL_NAME, "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny, 21 degrees."}
    turns = [
        *WEATHER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    return ask(target, messages=turns, tools=TOOLS)


def tokens_counted(target: Target) -> Any:
    counted = client(target).messages.count_tokens(
        model=target.model, messages=TURNS, system="You answer in one word.", tools=TOOLS
    )
    return counted.model_dump()


def unknown_model(target: Target) -> Any:
    return refusal(lambda: ask(Target(target.url, UNKNOWN_MODEL)))


def too_many_tokens(target: Target) -> Any:
    return refusal(lambda: ask(target, max_tokens=1_000_000))


def image_that_the_model_cannot_see(target: Target) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    return refusal(lambda: ask(target, messages=turns))


async def message_asynchronous(target: Target) -> Any:
    async with anthropic.AsyncAnthropic(
        base_url=target.url, auth_token=KEY, max_retries=0, timeout=TIMEOUT_S
    ) as asking:
        stream = await asking.messages.create(
            model=target.model, messages=TURNS, max_tokens=12, stream=True, **GREEDY
        )
        return [event.model_dump() async for event in stream]


if __name__ == "__main__":
    main(
        [
            message,
            message_with_a_system_text,
            message_stream_by_helper,
            message_asynchronous,
            tool_named,
            tool_stream,
            turn_after_a_tool,
            tokens_counted,
            unknown_model,
            too_many_tokens,
            image_that_the_model_cannot_see,
        ]
    )
