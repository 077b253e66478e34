"""LangChain's `ChatOpenAI`."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import KEY, MESSAGES, TIMEOUT_S, TOOL_NAME, Target, main

WEATHER = "What is the weather in Paris?"


class Capital(BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "Rome"]


@tool  # type: ignore[untyped-decorator]  # another environment has the types
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Today's weather in a city."""
    return f"Sunny in {city}."


def model(target: Target, **fields: Any) -> ChatOpenAI:
    fields = {"max_tokens": 12, **fields}
    return ChatOpenAI(
        model=target.model,
        base_url=f"{target.url}/v1",
        api_key=KEY,
        temperature=0,
        max_retries=0,
        timeout=TIMEOUT_S,
        **fields,
    )


def invoke(target: Target) -> Any:
    return model(target).invoke(MESSAGES).model_dump()


def invoke_with_logprobs(target: Target) -> Any:
    return model(target, logprobs=True, top_logprobs=1).invoke(MESSAGES).model_dump()


def stream(target: Target) -> Any:
    return [chunk.model_dump() for chunk in model(target, stream_usage=True).stream(MESSAGES)]


async def stream_asynchronous(target: Target) -> Any:
    return [chunk.model_dump() async for chunk in model(target).astream(MESSAGES)]


def bound_tool(target: Target) -> Any:
    bound = model(target, max_tokens=80).bind_tools(
        [get_weather], tool_choice=TOOL_NAME, strict=True
    )
    reply = bound.invoke(WEATHER)
    assert reply.tool_calls
    return reply.model_dump()


def bound_tool_streamed(target: Target) -> Any:
    bound = model(target, max_tokens=80).bind_tools(
        [get_weather], tool_choice="required", strict=True
    )
    return [chunk.model_dump() for chunk in bound.stream(WEATHER)]


def structured_output(target: Target) -> Any:
    asking = model(target, max_tokens=60).with_structured_output(Capital, method="json_schema")
    return asking.invoke(MESSAGES).model_dump()


def responses_api(target: Target) -> Any:
    return model(target, max_tokens=16, use_responses_api=True).invoke(MESSAGES).model_dump()


if __name__ == "__main__":
    main(
        [
            invoke,
            invoke_with_logprobs,
            stream,
            stream_asynchronous,
            bound_tool,
            bound_tool_streamed,
            structured_output,
            responses_api,
        ]
    )
