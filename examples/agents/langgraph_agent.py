"""A refund agent on LangGraph, behind the sidecar.

python examples/agents/langgraph_agent.py ada bob
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime, tools_condition
from langgraph.runtime import Runtime

PROXY = os.environ.get("PROXY_URL", "http://127.0.0.1:8080")
MODEL = os.environ.get("MODEL", "smollm2-135m")
KEY = os.environ.get("API_KEY", "none")
ORDERS = {"ada": "A7", "bob": "B2", "eve": "C5"}
INSTRUCTIONS = ("system", "You refund orders. Find the customer's order, then refund it.")


@dataclass
class Ticket:
    customer: str
    session: str = field(default_factory=lambda: f"ticket-{uuid4()}")
    refunded: list[str] = field(default_factory=list)


@tool
def find_order(customer: str) -> str:
    """The id of a customer's last order."""
    return ORDERS.get(customer, "error: unknown customer")


@tool
def refund(order: str, runtime: ToolRuntime[Ticket, Any]) -> str:
    """Refund an order."""
    runtime.context.refunded.append(order)
    return f"refunded {order}"


tools = [find_order, refund]
model = ChatOpenAI(model=MODEL, base_url=f"{PROXY}/v1", api_key=KEY).bind_tools(tools)


def support(state: MessagesState, runtime: Runtime[Ticket]) -> dict[str, Any]:
    ticket = runtime.context
    headers = {"x-sidecar-session": ticket.session, "x-sidecar-task": f"refund-{ticket.customer}"}
    return {"messages": [model.invoke([INSTRUCTIONS, *state["messages"]], extra_headers=headers)]}


builder = StateGraph(MessagesState, context_schema=Ticket)
builder.add_node("support", support)
builder.add_node("tools", ToolNode(tools))
builder.add_edge(START, "support")
builder.add_conditional_edges("support", tools_condition)
builder.add_edge("tools", "support")
graph = builder.compile()


def work(ticket: Ticket) -> str:
    question = ("user", f"I am {ticket.customer}. Please refund my last order.")
    try:
        end = graph.invoke({"messages": [question]}, {"recursion_limit": 12}, context=ticket)
        said = str(end["messages"][-1].content)
    except GraphRecursionError as error:  # the agent's own failure
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
