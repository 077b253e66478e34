"""The OpenAI Agents SDK: a run in which the agent calls a tool and answers, on both of its APIs."""

from __future__ import annotations

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from steps import KEY, TIMEOUT_S, TOOL_NAME, Target, main

QUESTION = "What is the weather in Paris?"


@function_tool  # type: ignore[untyped-decorator]  # another environment has the types
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Today's weather in a city."""
    return f"Sunny in {city}, 21 degrees."


def agent(target: Target, kind: type[Any]) -> Agent[None]:
    asking = AsyncOpenAI(base_url=f"{target.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    return Agent(
        name="Weather",
        instructions="Answer in one short sentence.",
        model=kind(model=target.model, openai_client=asking),
        # The SDK asks for the tool in the first turn only, so the second turn is an answer.
        model_settings=ModelSettings(temperature=0, max_tokens=60, tool_choice=TOOL_NAME),
        tools=[get_weather],
    )


async def ran(target: Target, kind: type[Any]) -> Any:
    result = await Runner.run(agent(target, kind), QUESTION, max_turns=3)
    outputs = [item for item in result.new_items if item.type == "tool_call_output_item"]
    assert len(outputs) == 1, result.new_items
    return {"final": result.final_output, "turns": result.to_input_list()}


async def tool_run_on_chat_completions(target: Target) -> Any:
    return await ran(target, OpenAIChatCompletionsModel)


async def tool_run_on_responses(target: Target) -> Any:
    return await ran(target, OpenAIResponsesModel)


async def tool_run_streamed(target: Target) -> Any:
    run = Runner.run_streamed(agent(target, OpenAIChatCompletionsModel), QUESTION, max_turns=3)
    raw = [
        event.data.model_dump()
        async for event in run.stream_events()
        if event.type == "raw_response_event"
    ]
    return {"final": run.final_output, "events": raw}


if __name__ == "__main__":
    set_tracing_disabled(True)
    main([tool_run_on_chat_completions, tool_run_on_responses, tool_run_streamed])
