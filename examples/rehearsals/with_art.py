"""A refund agent as ART trains it: `rollout(model, scenario)` plays one attempt to its end.

The same agent as a runner of the sidecar is in `runner.py`; `diff with_art.py runner.py` shows what
changes. This file needs `pip install openpipe-art`; it is here to be compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import art

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "refund",
            "description": "Refund an order.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "string"}},
                "required": ["order"],
            },
        },
    }
]
MOST_TURNS = 6


class StagingShop:
    """Books nothing: it remembers what was asked of it."""

    def __init__(self) -> None:
        self.refunded: list[str] = []

    def call(self, name: str, arguments: str) -> str:
        order = str(json.loads(arguments).get("order", ""))
        if name != "refund" or not order:
            return "error: unknown order"
        self.refunded.append(order)
        return f"refunded {order}"


@dataclass
class Scenario:
    question: str


async def rollout(model: art.Model, scenario: Scenario) -> art.Trajectory:
    shop = StagingShop()
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": scenario.question}], tools=TOOLS
    )
    client = model.openai_client()
    for _ in range(MOST_TURNS):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), tools=TOOLS
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        if not choice.message.tool_calls:
            break
        for call in choice.message.tool_calls:
            said = shop.call(call.function.name, call.function.arguments)
            result = {"role": "tool", "tool_call_id": call.id, "content": said}
            trajectory.messages_and_choices.append(result)
    trajectory.reward = float(len(shop.refunded) == 1)
    return trajectory
