"""A refund agent on the OpenAI Agents SDK, behind the sidecar.

python examples/agents/openai_agents.py ada bob
"""

import os
import sys
from dataclasses import dataclass, field
from uuid import uuid4

import httpx
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

PROXY = os.environ.get("PROXY_URL", "http://127.0.0.1:8080")
MODEL = os.environ.get("MODEL", "smollm2-135m")
KEY = os.environ.get("API_KEY", "none")
ORDERS = {"ada": "A7", "bob": "B2", "eve": "C5"}

# The SDK sends each run, with prompts and tool results, to OpenAI's trace server by default.
set_tracing_disabled(True)


@dataclass
class Ticket:
    customer: str
    session: str = field(default_factory=lambda: f"ticket-{uuid4()}")
    refunded: list[str] = field(default_factory=list)


@function_tool
def find_order(customer: str) -> str:
    """The id of a customer's last order."""
    return ORDERS.get(customer, "error: unknown customer")


@function_tool
def refund(ticket: RunContextWrapper[Ticket], order: str) -> str:
    """Refund an order."""
    ticket.context.refunded.append(order)
    return f"refunded {order}"


agent = Agent[Ticket](
    name="Support",
    instructions="You refund orders. Find the customer's order, then refund it.",
    model=OpenAIChatCompletionsModel(
        model=MODEL, openai_client=AsyncOpenAI(base_url=f"{PROXY}/v1", api_key=KEY)
    ),
    tools=[find_order, refund],
)


def work(ticket: Ticket) -> str:
    headers = {"x-sidecar-session": ticket.session, "x-sidecar-task": f"refund-{ticket.customer}"}
    every_request = RunConfig(model_settings=ModelSettings(extra_headers=headers))
    question = f"I am {ticket.customer}. Please refund my last order."
    try:
        result = Runner.run_sync(
            agent, question, context=ticket, max_turns=6, run_config=every_request
        )
        said = str(result.final_output)
    except (MaxTurnsExceeded, ModelBehaviorError) as error:  # the agent's own failures
        said = repr(error)
    report(ticket, success=ticket.refunded == [ORDERS.get(ticket.customer)])
    return said


def report(ticket: Ticket, success: bool) -> None:
    outcome = {"session_id": ticket.session, "success": success}
    key = {"Authorization": f"Bearer {KEY}"}
    httpx.post(f"{PROXY}/sidecar/v1/outcomes", json=outcome, headers=key).raise_for_status()


if __name__ == "__main__":
    for customer in sys.argv[1:]:
        print(work(Ticket(customer)))
