"""Courses of a conversation: how its turns become requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.sessions.play.agent import Agent, Conversation
from benchmarks.sessions.tasks import Task, Turn

Shape = Callable[[Conversation, Task, float], None]
"""Adds the requests of a task to a conversation that begins at a time in Unix seconds."""

RETRIED = 0.1
"""Share of requests that are sent twice."""
GAVE_UP_AFTER_S = 5.0
"""A client that gets no reply sends the request again after this time."""
REGENERATED = EDITED = PARALLEL = 0.25
"""Share of turns."""
_OPENER = Turn(user="hi")
_OPENER_REPLY = "Hello! How can I help you today?"
_SIDE_QUESTIONS = (
    "Suggest three short questions that I could ask next.",
    "Answer with yes or no: is the task finished?",
    "Name this conversation in five words.",
)


def plain(conversation: Conversation, task: Task, now: float) -> None:
    """Turn after turn."""
    agent = Agent.of(conversation, task, now)
    for turn in task.turns:
        agent.hear(turn)
        agent.work(turn)


def short_opener(conversation: Conversation, task: Task, now: float) -> None:
    """ "hi" and the same greeting from the model, then the task."""
    agent = Agent.of(conversation, replace(task, greeting=""), now)
    agent.hear(_OPENER)
    agent.ask(_OPENER, text=_OPENER_REPLY)
    for turn in task.turns:
        agent.hear(turn)
        agent.work(turn)


def retries(conversation: Conversation, task: Task, now: float) -> None:
    """Some requests are sent again, byte for byte. A first attempt got no reply; or, after the
    first request, a whole one that came too late for the client."""
    agent = Agent.of(conversation, task, now)
    for turn in task.turns:
        agent.hear(turn)
        for calls in (*turn.steps, ()):
            request = None
            if agent.rng.random() < RETRIED:
                request = agent.body()
                late = agent.parent is not None and agent.rng.random() < 0.5
                conversation.record(
                    request=request,
                    replies=agent.replies(turn, calls) if late else (),
                    parent=agent.parent,
                    at=agent.now,
                    ended=agent.now + GAVE_UP_AFTER_S + (agent.latency() if late else 0),
                )
                agent.now += GAVE_UP_AFTER_S
            reply = agent.ask(turn, calls, request=request)
            if calls:
                agent.use_tools(reply, calls)


def regenerations(conversation: Conversation, task: Task, now: float) -> None:
    """The user has some last replies of a turn written anew and goes on with the new ones. What
    begins with the first request of all is another session."""
    agent = Agent.of(conversation, task, now)
    for number, turn in enumerate(task.turns):
        agent.hear(turn)
        agent.work(turn)
        if agent.rng.random() < REGENERATED:
            agent.messages.pop()
            before = conversation.sent[-1].request
            if number == 0 and before.true_parent is None:
                abandoned = replace(before, true_session=f"{conversation.name}-abandoned")
                conversation.sent[-1] = replace(conversation.sent[-1], request=abandoned)
            agent.parent = before.true_parent
            agent.now += agent.rng.uniform(3, 20)
            agent.ask(turn)


def edits(conversation: Conversation, task: Task, now: float) -> None:
    """The user changes a message that is not the first one, and the conversation goes on there."""
    agent = Agent.of(conversation, task, now)
    for number, turn in enumerate(task.turns):
        before, parent = list(agent.messages), agent.parent
        agent.hear(turn)
        agent.work(turn)
        if number and agent.rng.random() < EDITED:
            agent.messages, agent.parent = before, parent
            again = replace(turn, user=f"{turn.user} Please be brief.", new_tools=())
            agent.hear(again)
            agent.work(again)


def parallel(conversation: Conversation, task: Task, now: float) -> None:
    """Beside some turns after the first, the client asks something else of the same history at the
    same time, or samples the same request three times."""
    agent = Agent.of(conversation, task, now)
    for turn in task.turns:
        before = list(agent.messages)
        agent.hear(turn)
        if agent.parent is not None and agent.rng.random() < PARALLEL:
            same = agent.body()
            for question in agent.rng.sample(_SIDE_QUESTIONS, 2):
                side = Turn(user=question)
                other = agent.body([*before, {"role": "user", "content": question}])
                alike = agent.rng.random() < 0.5
                conversation.record(
                    request=same if alike else other,
                    replies=agent.replies(turn, turn.steps[0] if turn.steps else ())
                    if alike
                    else agent.replies(side, ()),
                    parent=agent.parent,
                    at=agent.now + agent.rng.uniform(0, 0.05),
                    ended=agent.now + agent.latency(),
                )
        agent.work(turn)
