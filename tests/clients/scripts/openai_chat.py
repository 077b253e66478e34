"""The official `openai` client on chat completions: everything that its users send there."""

from __future__ import annotations

from typing import Any, Literal

import openai
from pydantic import BaseModel
from steps import (
    CHOICES,
    CITY_SCHEMA,
    KEY,
    MESSAGES,
    PIXEL,
    TIMEOUT_S,
    TOOL_NAME,
    TOOL_TEXT,
    UNKNOWN_MODEL,
    Target,
    by_choice,
    main,
    refusal,
)

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": TOOL_TEXT,
            "parameters": CITY_SCHEMA,
            "strict": True,
        },
    }
]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
NAMED: Any = {"type": "function", "function": {"name": TOOL_NAME}}


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]


def client(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{target.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)


def ask(target: Target, **fields: Any) -> Any:
    fields = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **fields}
    return client(target).chat.completions.create(model=target.model, **fields).model_dump()


def chunks(target: Target, **fields: Any) -> Any:
    fields = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **fields}
    stream = client(target).chat.completions.create(model=target.model, stream=True, **fields)
    return [chunk.model_dump() for chunk in stream]


def plain(target: Target) -> Any:
    return ask(target)


def headers_and_text(target: Target) -> Any:
    raw = client(target).chat.completions.with_raw_response.create(
        model=target.model, messages=MESSAGES, temperature=0, max_tokens=4
    )
    kept = {name: raw.headers.get(name) for name in ("content-type", "server", "vary")}
    return {"status": raw.status_code, "headers": kept, "text": raw.text}


def choices_and_logprobs(target: Target) -> Any:
    return ask(target, logprobs=True, top_logprobs=2, **CHOICES)


def extra_parameters_of_vllm(target: Target) -> Any:
    extra = {"top_k": 5, "repetition_penalty": 1.1, "return_token_ids": True, "not_known": [1]}
    return ask(target, extra_body=extra)


def stream(target: Target) -> Any:
    return chunks(target)


def stream_of_choices_with_logprobs(target: Target) -> Any:
    return by_choice(chunks(target, logprobs=True, top_logprobs=1, **CHOICES))


def stream_cut_inside_characters(target: Target) -> Any:
    emoji = [{"role": "user", "content": "Repeat: 😀😁😂🤣😃"}]
    return chunks(target, messages=emoji, max_tokens=24)


def tool_named(target: Target) -> Any:
    return ask(target, messages=WEATHER, tools=TOOLS, tool_choice=NAMED, max_tokens=60)


def tools_in_parallel(target: Target) -> Any:
    return ask(
        target,
        messages=WEATHER,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=True,
        max_tokens=100,
    )


def stream_of_a_named_tool(target: Target) -> Any:
    return chunks(target, messages=WEATHER, tools=TOOLS, tool_choice=NAMED, max_tokens=60)


def stream_of_tools_in_parallel(target: Target) -> Any:
    return chunks(
        target,
        messages=WEATHER,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=100,
        stream_options={"include_usage": True},
    )


def turn_after_a_tool(target: Target) -> Any:
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": TOOL_NAME, "arguments": '{"city": "Paris"}'},
    }
    turns = [
        *WEATHER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "Sunny, 21 degrees."},
    ]
    return ask(target, messages=turns, tools=TOOLS)


def structured_output(target: Target) -> Any:
    reply = client(target).chat.completions.parse(
        model=target.model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=60,
        response_format=Capital,
    )
    assert reply.choices[0].message.parsed is not None
    return reply.model_dump()


def structured_output_streamed(target: Target) -> Any:
    with client(target).chat.completions.stream(
        model=target.model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=60,
        response_format=Capital,
    ) as events:
        return [event.model_dump() for event in events]


def image_that_the_model_cannot_see(target: Target) -> Any:
    url = {"url": f"data:image/png;base64,{PIXEL}"}
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": url}]
    return refusal(lambda: ask(target, messages=[{"role": "user", "content": content}]))


def unknown_model(target: Target) -> Any:
    return refusal(lambda: ask(Target(target.url, UNKNOWN_MODEL)))


def wrong_type(target: Target) -> Any:
    return refusal(lambda: ask(target, messages="not a list"))


if __name__ == "__main__":
    main(
        [
            plain,
            headers_and_text,
            choices_and_logprobs,
            extra_parameters_of_vllm,
            stream,
            stream_of_choices_with_logprobs,
            stream_cut_inside_characters,
            tool_named,
            tools_in_parallel,
            stream_of_a_named_tool,
            stream_of_tools_in_parallel,
            turn_after_a_tool,
            structured_output,
            structured_output_streamed,
            image_that_the_model_cannot_see,
            unknown_model,
            wrong_type,
        ]
    )
