"""The agent of `with_art.py` as a runner of the sidecar: it plays recorded tasks again.

    python examples/rehearsals/runner.py

with `[rehearsals] runner = "http://127.0.0.1:8090"` in `sidecar.toml` (docs/rehearsals.md).
"""

from __future__ import annotations

import json

from ingest import serve_runner

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


async def rollout(model, scenario) -> float:
    shop = StagingShop()
    messages = list(scenario.messages)
    client = model.openai_client()
    for _ in range(MOST_TURNS):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=messages, tools=TOOLS
        )
        choice = completion.choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if not choice.message.tool_calls:
            break
        for call in choice.message.tool_calls:
            said = shop.call(call.function.name, call.function.arguments)
            result = {"role": "tool", "tool_call_id": call.id, "content": said}
            messages.append(result)
    # No ground truth: any one refund counts. Find yours by the text of `scenario.messages`.
    return float(len(shop.refunded) == 1)


if __name__ == "__main__":
    serve_runner(rollout)
