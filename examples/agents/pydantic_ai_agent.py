"""A refund agent on pydantic-ai, behind the sidecar.

python examples/agents/pydantic_ai_agent.py ada bob
"""

import os
import sys
from dataclasses import dataclass, field
from uuid import uuid4

import httpx
from pydantic_ai import (
    Agent,
    ModelSettings,
    RunContext,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PROXY = os.environ.get("PROXY_URL", "http://127.0.0.1:8080")
MODEL = os.environ.get("MODEL", "smollm2-135m")
KEY = os.environ.get("API_KEY", "none")
ORDERS = {"ada": "A7", "bob": "B2", "eve": "C5"}


@dataclass
class Ticket:
    customer: str
    session: str = field(default_factory=lambda: f"ticket-{uuid4()}")
    refunded: list[str] = field(default_factory=list)


agent = Agent(
    OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{PROXY}/v1", api_key=KEY)),
    deps_type=Ticket,
    instructions="You refund orders. Find the customer's order, then refund it.",
)


@agent.tool_plain
def find_order(customer: str) -> str:
    """The id of a customer's last order."""
    return ORDERS.get(customer, "error: unknown customer")


@agent.tool
def refund(ticket: RunContext[Ticket], order: str) -> str:
    """Refund an order."""
    ticket.deps.refunded.append(order)
    return f"refunded {order}"


def work(ticket: Ticket) -> str:
    headers = {"x-sidecar-session": ticket.session, "x-sidecar-task": f"refund-{ticket.customer}"}
    try:
        said = agent.run_sync(
            f"I am {ticket.customer}. Please refund my last order.",
            deps=ticket,
            model_settings=ModelSettings(extra_headers=headers),
            usage_limits=UsageLimits(request_limit=6),
        ).output
    except (UsageLimitExceeded, UnexpectedModelBehavior) as error:  # the agent's own failures
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
