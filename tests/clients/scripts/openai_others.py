"""The official `openai` client on models, completions, responses and embeddings."""

from __future__ import annotations

from typing import Any

from openai_chat import Capital, client
from steps import (
    CHOICES,
    CITY_SCHEMA,
    QUESTION,
    TOOL_NAME,
    TOOL_TEXT,
    UNKNOWN_MODEL,
    Target,
    by_choice,
    main,
    refusal,
)

PROMPT = "The capital of France is"
TOKENS = [504, 3575, 282, 4649, 314]
"""The same prompt as SmolLM2's token ids."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": TOOL_NAME,
        "description": TOOL_TEXT,
        "parameters": CITY_SCHEMA,
        "strict": True,
    }
]


def complete(target: Target, prompt: Any = PROMPT, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 8, **fields}
    made = client(target).completions.create(model=target.model, prompt=prompt, **fields)
    return made.model_dump()


def chunks(target: Target, prompt: Any = PROMPT, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 8, **fields}
    stream = client(target).completions.create(
        model=target.model, prompt=prompt, stream=True, **fields
    )
    return [chunk.model_dump() for chunk in stream]


def respond(target: Target, **fields: Any) -> Any:
    fields = {"input": QUESTION, "temperature": 0, "max_output_tokens": 16, **fields}
    return client(target).responses.create(model=target.model, **fields)


def events(target: Target, **fields: Any) -> Any:
    return [event.model_dump() for event in respond(target, stream=True, **fields)]


def models(target: Target) -> Any:
    return [card.id for card in client(target).models.list()]


def completion(target: Target) -> Any:
    return complete(target)


def completion_with_logprobs(target: Target) -> Any:
    return complete(target, logprobs=2)


def completion_of_tokens(target: Target) -> Any:
    return complete(target, TOKENS, extra_body={"return_token_ids": True})


def completion_stream(target: Target) -> Any:
    return chunks(target)


def completion_stream_of_several(target: Target) -> Any:
    return by_choice(chunks(target, [PROMPT, "Two plus two is"], **CHOICES))


def completion_stream_with_logprobs(target: Target) -> Any:
    return chunks(target, logprobs=1)


def completion_of_an_unknown_model(target: Target) -> Any:
    return refusal(lambda: complete(Target(target.url, UNKNOWN_MODEL)))


def response(target: Target) -> Any:
    return respond(target).model_dump()


def response_of_a_conversation(target: Target) -> Any:
    turns = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    return respond(target, input=turns, instructions="Answer in one word.").model_dump()


def response_stream(target: Target) -> Any:
    return events(target)


def response_stream_by_helper(target: Target) -> Any:
    with client(target).responses.stream(
        model=target.model, input=QUESTION, temperature=0, max_output_tokens=16
    ) as stream:
        seen = [event.model_dump() for event in stream]
        return {"events": seen, "final": stream.get_final_response().model_dump()}


def response_with_logprobs(target: Target) -> Any:
    asked: Any = ["message.output_text.logprobs"]
    return respond(target, include=asked, top_logprobs=1).model_dump()


def response_with_a_tool(target: Target) -> Any:
    return respond(target, tools=TOOLS, tool_choice="required", max_output_tokens=80).model_dump()


def response_stream_with_a_tool(target: Target) -> Any:
    return events(target, tools=TOOLS, tool_choice="required", max_output_tokens=80)


def response_parsed(target: Target) -> Any:
    reply = client(target).responses.parse(
        model=target.model,
        input=QUESTION,
        temperature=0,
        max_output_tokens=60,
        text_format=Capital,
    )
    assert reply.output_parsed is not None
    return reply.model_dump()


def response_of_an_unknown_model(target: Target) -> Any:
    return refusal(lambda: respond(Target(target.url, UNKNOWN_MODEL)))


def response_after_one_that_is_not_kept(target: Target) -> Any:
    return refusal(lambda: respond(target, previous_response_id="resp_0000"))


if __name__ == "__main__":
    main(
        [
            models,
            completion,
            completion_with_logprobs,
            completion_of_tokens,
            completion_stream,
            completion_stream_of_several,
            completion_stream_with_logprobs,
            completion_of_an_unknown_model,
            response,
            response_of_a_conversation,
            response_stream,
            response_stream_by_helper,
            response_with_logprobs,
            response_with_a_tool,
            response_stream_with_a_tool,
            response_parsed,
            response_of_an_unknown_model,
            response_after_one_that_is_not_kept,
        ]
    )
