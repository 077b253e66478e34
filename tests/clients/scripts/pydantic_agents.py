"""`pydantic-ai`: structured output by a tool and by a schema, a tool run, and a stream."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import KEY, QUESTION, Target, main


class Capital(BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "Rome"]


def agent(target: Target, output: Any = str, length: int = 60) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=f"{target.url}/v1", api_key=KEY)
    return Agent(
        OpenAIChatModel(target.model, provider=provider),
        output_type=output,
        instructions="Answer in one short sentence.",
        model_settings={"temperature": 0, "max_tokens": length},
        retries=0,
    )


def dump(result: Any) -> Any:
    return json.loads(result.all_messages_json())


async def text(target: Target) -> Any:
    return dump(await agent(target, length=12).run(QUESTION))


async def output_by_a_tool(target: Target) -> Any:
    result = await agent(target, ToolOutput(Capital, strict=True), 100).run(QUESTION)
    assert isinstance(result.output, Capital)
    return dump(result)


async def output_by_a_schema(target: Target) -> Any:
    result = await agent(target, NativeOutput(Capital, strict=True)).run(QUESTION)
    assert isinstance(result.output, Capital)
    return dump(result)


async def streamed_text(target: Target) -> Any:
    async with agent(target, length=12).run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        return {"pieces": pieces, "messages": dump(result)}


if __name__ == "__main__":
    main([text, output_by_a_tool, output_by_a_schema, streamed_text])
