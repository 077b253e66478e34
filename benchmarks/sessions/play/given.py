"""Courses of a conversation whose client writes words of the assistant itself, and of agents that
write their whole work into one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from benchmarks.sessions.play import wording
from benchmarks.sessions.play.agent import Agent, Conversation
from benchmarks.sessions.play.shapes import Shape
from benchmarks.sessions.tasks import JsonObject, Task

LABELS = ("positive", "negative", "neutral")
ANSWERS = (
    "This is about an order that was placed before; it goes to the team for orders and returns.",
    "This is about travel that was booked before; it goes to the team for flights and bookings.",
    "This is about something else; it goes to the team for general questions, without hurry.",
)
GREETING = "Hello, I am the assistant of the shop, day and night. How can I help you?"
SHOTS = 4
GREETED = 0.2
"""Share of first replies that are the greeting word for word."""
_CLASSIFY = "Classify what the customer writes."
_REACT = (
    "Answer the question as well as you can. You have tools: {names}. Write a line with Thought:, "
    "a line with Action: and a line with Action Input:, and wait for the Observation. When you "
    "know it, write Final Answer: and the answer."
)


def examples(tasks: Sequence[Task], words: Sequence[str], *, anew: bool) -> Shape:
    """One request for each turn of a task, after examples: the same ones, or drawn for each. The
    reply is the words of an example."""

    def shape(conversation: Conversation, task: Task, now: float) -> None:
        agent = Agent.of(conversation, replace(task, greeting="", tools=()), now)
        agent.system = _CLASSIFY
        for number, turn in enumerate(task.turns):
            rng = agent.rng if anew else Random("examples")
            agent.messages, agent.parent = [], None
            for one in rng.sample(tasks, SHOTS):
                answer = rng.choice(words)
                agent.messages += [
                    {"role": "user", "content": one.turns[0].user},
                    {"role": "assistant", "content": answer},
                ]
            agent.hear(turn)
            agent.ask(turn, text=agent.rng.choice(words))
            name = f"{conversation.name}-{number}"
            alone = replace(conversation.sent[-1].request, true_session=name)
            conversation.sent[-1] = replace(conversation.sent[-1], request=alone)

    return shape


def greeted(conversation: Conversation, task: Task, now: float) -> None:
    """The client shows a greeting as the assistant's; the model says some of them again."""
    agent = Agent.of(conversation, replace(task, greeting=GREETING), now)
    for number, turn in enumerate(task.turns):
        agent.hear(turn)
        if number == 0 and agent.rng.random() < GREETED:
            agent.ask(turn, text=GREETING)
        else:
            agent.work(turn)


def react(conversation: Conversation, task: Task, now: float) -> None:
    """All of the work stands in one message of the user, which grows. Half of the agents answer in
    a few words."""
    agent = Agent.of(conversation, replace(task, greeting="", tools=()), now)
    agent.system = ""
    short = agent.rng.random() < 0.5
    names = ", ".join(one["function"]["name"] for one in task.tools[:8])
    text = _REACT.format(names=names)
    for turn in task.turns:
        agent.now += agent.rng.uniform(4, 40)
        text += f"\n\nQuestion: {turn.user}\nThought:"
        for calls in (*turn.steps, ()):
            agent.messages = [_user(text)]
            if calls:
                said = "\n".join(
                    f"Action: {one.name}\nAction Input: {dict(one.arguments)}" for one in calls
                )
                if short:
                    said = f"Action: {calls[0].name}"
                reply = f" {agent.rng.choice(_THOUGHTS)}\n{said}"
                seen = " ".join(wording.tool_result(task, one) for one in calls)
                after = f"\nObservation: {seen}\nThought:"
            else:
                reply = f" I know it.\nFinal Answer: {wording.reply_text(turn, agent.rng)}"
                after = ""
                if short:
                    reply = " Final Answer: done"
            agent.ask(turn, text=reply)
            text += reply + after


_THOUGHTS = ("I look it up.", "I need a tool.", "Next step.", "I have to see what is there first.")


def _user(text: str) -> JsonObject:
    return {"role": "user", "content": text}
