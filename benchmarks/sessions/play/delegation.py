"""A course of a conversation whose agent has sub-agents do parts of a turn."""

from __future__ import annotations

from benchmarks.sessions.play.agent import Agent, Conversation
from benchmarks.sessions.tasks import Call, Task, Turn, tool

DELEGATED = 0.6
"""Share of the turns with calls that go to sub-agents."""
VERBATIM = 0.3
"""Share of single sub-agents that are told just what the user said."""
MOST = 3
"""Sub-agents at once."""
_SYSTEM = "You are a sub-agent. Do what you are told with the tools and report what you found."
_TOOL = tool(
    "run_agent",
    "Have a sub-agent do a part of the work",
    {"description": {"type": "string"}, "prompt": {"type": "string"}},
)


def sub_agents(conversation: Conversation, task: Task, now: float) -> None:
    """Some turns become calls of sub-agents, up to three at once. A call's `prompt` is the
    sub-agent's first message, and its last reply is the result of the call."""
    agent = Agent.of(conversation, task, now)
    agent.tools.append(_TOOL)
    for turn in task.turns:
        agent.hear(turn)
        if turn.steps and agent.rng.random() < DELEGATED:
            _delegate(agent, turn)
            agent.ask(turn)
        else:
            agent.work(turn)


def _delegate(agent: Agent, turn: Turn) -> None:
    jobs = _jobs(agent, turn)
    calls = [
        Call(name="run_agent", arguments={"description": f"part {n + 1}", "prompt": job.user})
        for n, job in enumerate(jobs)
    ]
    reply = agent.ask(turn, calls)
    ends = []
    for asked, job in zip(reply["tool_calls"], jobs, strict=True):
        sub = Agent(
            conversation=agent.conversation,
            task=agent.task,
            now=agent.now + agent.rng.uniform(0.01, 0.1),
            system=_SYSTEM,
            tools=list(agent.task.tools),
            messages=[{"role": "user", "content": job.user}],
            parent=agent.parent,
        )
        sub.work(job)
        ends.append(sub.now)
        agent.result(asked["id"], sub.messages[-1]["content"])
    agent.now = max(ends)


def _jobs(agent: Agent, turn: Turn) -> list[Turn]:
    """Share the steps of a turn among sub-agents."""
    count = min(MOST, len(turn.steps))
    if count == 1 and agent.rng.random() < VERBATIM:
        return [turn]
    jobs = []
    for number in range(count):
        steps = turn.steps[number::count]
        parts = "; ".join(call.text() for step in steps for call in step)
        jobs.append(Turn(user=f"{turn.user}\nYour part: {parts}", steps=steps))
    return jobs
