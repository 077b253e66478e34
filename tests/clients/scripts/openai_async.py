"""The official `openai` client, asynchronous: the same calls on another transport."""

from __future__ import annotations

from typing import Any

import openai
from openai_chat import NAMED, TOOLS, WEATHER
from steps import KEY, MESSAGES, QUESTION, TIMEOUT_S, UNKNOWN_MODEL, Target, main


def client(target: Target) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{target.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S
    )


async def chat(target: Target) -> Any:
    async with client(target) as asking:
        reply = await asking.chat.completions.create(
            model=target.model, messages=MESSAGES, temperature=0, max_tokens=12
        )
        return reply.model_dump()


async def several_on_one_connection(target: Target) -> Any:
    async with client(target) as asking:
        return [
            (
                await asking.chat.completions.create(
                    model=target.model, messages=MESSAGES, temperature=0, max_tokens=length
                )
            ).model_dump()
            for length in (1, 2, 3)
        ]


async def chat_stream(target: Target) -> Any:
    async with client(target) as asking:
        stream = await asking.chat.completions.create(
            model=target.model, messages=MESSAGES, temperature=0, max_tokens=12, stream=True
        )
        return [chunk.model_dump() async for chunk in stream]


async def chat_stream_with_a_tool(target: Target) -> Any:
    async with client(target) as asking:
        stream = await asking.chat.completions.create(
            model=target.model,
            messages=WEATHER,
            temperature=0,
            max_tokens=60,
            tools=TOOLS,
            tool_choice=NAMED,
            stream=True,
        )
        return [chunk.model_dump() async for chunk in stream]


async def response_stream(target: Target) -> Any:
    async with client(target) as asking:
        stream = await asking.responses.create(
            model=target.model, input=QUESTION, temperature=0, max_output_tokens=12, stream=True
        )
        return [event.model_dump() async for event in stream]


async def unknown_model(target: Target) -> Any:
    async with client(target) as asking:
        try:
            await asking.chat.completions.create(model=UNKNOWN_MODEL, messages=MESSAGES)
        except openai.NotFoundError as error:
            return {"status": error.status_code, "body": error.body}
        raise AssertionError("an error was expected, and a reply came")


if __name__ == "__main__":
    main(
        [
            chat,
            several_on_one_connection,
            chat_stream,
            chat_stream_with_a_tool,
            response_stream,
            unknown_model,
        ]
    )
