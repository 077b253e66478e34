"""What the demo's agent asks is learned from: no reason to mask applies to its requests."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from demo.agent import SupportAgent
from demo.questions import load_questions
from demo.stack import MODEL, MODEL_FOLDER
from ingest.grouping.request import EngineFacts, read_defaults
from ingest.grouping.selection import Rules, StoreState, select_exchanges
from sidecar.capture.assemble import assemble
from sidecar.records import BASE, Assignment, Exchange, RawCapture, Timings, read_prompt_ids

REPLY: dict[str, Any] = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "prompt_token_ids": [1, 2, 3],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Yes."},
            "finish_reason": "stop",
            "token_ids": [7, 2],
            "logprobs": {
                "content": [
                    {"token": "Yes.", "logprob": -0.5, "bytes": None, "top_logprobs": []},
                    {"token": "", "logprob": -0.1, "bytes": None, "top_logprobs": []},
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
EVENT = {**REPLY, "object": "chat.completion.chunk", "choices": []}


async def requests_of_the_agent() -> list[bytes]:
    """The bodies that the demo sends for all its conversations."""
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        if not json.loads(request.content).get("stream"):
            return httpx.Response(200, json=REPLY)
        events = f"data: {json.dumps(EVENT)}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, text=events, headers={"content-type": "text/event-stream"})

    questions = load_questions()
    agent = SupportAgent(base_url="http://sidecar/v1", model=MODEL, system=questions.system)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        agent._client = agent._client.with_options(http_client=client)
        for conversation in questions.traffic:
            await agent.serve(conversation, customer="somebody")
    return bodies


def exchange_of(number: int, body: bytes) -> Exchange:
    return assemble(
        RawCapture(
            exchange_id=f"e{number}",
            public_model=MODEL,
            route=Assignment(adapter=BASE, arm="champion", propensity=1.0, upstream_model=MODEL),
            replica="http://vllm",
            session_key=f"m:{number}",
            user="",
            request=body,
            reply=[json.dumps(REPLY).encode()],
            streamed=False,
            status=200,
            outcome="ok",
            timings=Timings(started_at=float(number)),
        )
    )


async def test_every_answer_of_the_demos_agent_is_chosen_and_trained_on() -> None:
    if not MODEL_FOLDER.exists():
        pytest.skip("no model here: `make test` makes it")
    bodies = await requests_of_the_agent()
    assert any("tools" in json.loads(body) for body in bodies)
    assert any(json.loads(body).get("stream") for body in bodies)
    rules = Rules(
        size=8,
        rate=1.0,
        max_groups_per_session=4,
        max_pending_groups=len(bodies),
        logprobs_mode="processed_logprobs",
        facts=EngineFacts(defaults=read_defaults(str(MODEL_FOLDER)), grammar="as_asked"),
    )
    store_state = StoreState(
        live_adapters=frozenset({BASE}), pending_groups=0, groups_by_session={}
    )

    exchanges = [read_prompt_ids(exchange_of(n, body)) for n, body in enumerate(bodies)]
    decisions = select_exchanges([(exchange, False) for exchange in exchanges], store_state, rules)

    assert {decision.reason for decision in decisions} == {"chosen"}
    answers = [answer for one in decisions if one.group for answer in one.group.answers]
    assert {answer.untrainable_reason for answer in answers} == {None}
