"""Courses of a conversation whose client shortens its history."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.sessions.play import wording
from benchmarks.sessions.play.agent import Agent, Conversation
from benchmarks.sessions.tasks import JsonObject, Task, Turn

LONGEST = 6
"""Messages that a history may have when a turn begins."""
WINDOW = 6
"""Messages that are sent of a longer history."""
UNTOUCHED = 4
"""Newest messages that are never truncated."""
_CUT_CHARS = 60
_CLEARED = "[Old tool result content cleared]"
_ASK = Turn(
    user="Summarise our conversation so far, so that the work can go on without its messages. "
    "Write nothing but the summary."
)
_SUMMARISER = "You summarise conversations between a user and an assistant."
_CONTINUED = (
    "This session is being continued from a previous conversation that ran out of context. "
    "Summary:\n\n{summary}\n\nContinue from there without asking."
)
_SO_FAR = "Summary of the conversation so far: {summary}"


def summary(conversation: Conversation, task: Task, now: float) -> None:
    """The client asks for a summary at the end of the history and goes on from it alone."""
    agent = Agent.of(conversation, task, now)
    for turn in task.turns:
        if len(agent.messages) > LONGEST:
            text = _asked_for(agent)
            agent.messages = [_user(_CONTINUED.format(summary=text))]
        agent.hear(turn)
        agent.work(turn)


def summary_in_system(conversation: Conversation, task: Task, now: float) -> None:
    """As `summary`, but the summary is put into the system prompt."""
    agent = Agent.of(conversation, task, now)
    for turn in task.turns:
        if len(agent.messages) > LONGEST:
            text = _asked_for(agent)
            agent.system = f"{task.system}\n\n{_SO_FAR.format(summary=text)}"
            agent.messages = []
        agent.hear(turn)
        agent.work(turn)


def _asked_for(agent: Agent) -> str:
    """The summary that the agent is asked for at the end of its history."""
    text = wording.summary(agent.messages, agent.rng)
    agent.hear(_ASK)
    agent.ask(_ASK, text=text)
    return text


def transcript(conversation: Conversation, task: Task, now: float) -> None:
    """Another prompt summarises a transcript of all but the last exchange, which is kept."""
    agent = Agent.of(conversation, task, now)
    kept_from = 0  # where the last turn begins
    covered: str | None = None  # the request whose reply stands before it
    for turn in task.turns:
        if kept_from > 2:
            old, kept = agent.messages[:kept_from], agent.messages[kept_from:]
            text = wording.summary(old, agent.rng)
            _summarise(agent, old, covered, text)
            agent.messages = [_user(_SO_FAR.format(summary=text)), *kept]
        kept_from, covered = len(agent.messages), agent.parent
        agent.hear(turn)
        agent.work(turn)


def _summarise(agent: Agent, old: Sequence[JsonObject], covered: str | None, text: str) -> None:
    """One request of the summariser."""
    request: JsonObject = _user(f"Summarise this conversation:\n\n{_transcript(old)}")
    side = Agent(
        conversation=agent.conversation,
        task=agent.task,
        now=agent.now + 1,
        system=_SUMMARISER,
        tools=[],
        messages=[request],
        parent=covered,
    )
    side.ask(_ASK, text=text)
    agent.now = side.now


def last_messages(conversation: Conversation, task: Task, now: float) -> None:
    """Only the newest messages are sent. A window begins with no result without its call; half of
    the clients go back to the user's message before it."""
    agent = Agent.of(conversation, task, now)
    from_user = agent.rng.random() < 0.5

    def window(messages: Sequence[JsonObject]) -> Sequence[JsonObject]:
        begin = max(0, len(messages) - WINDOW)
        while from_user and begin > 0 and messages[begin]["role"] != "user":
            begin -= 1
        while messages[begin]["role"] == "tool":
            begin += 1
        return messages[begin:]

    agent.view = window
    for turn in task.turns:
        agent.hear(turn)
        agent.work(turn)


def truncated(conversation: Conversation, task: Task, now: float) -> None:
    """Old results of tools are cleared, or all old messages are cut."""
    agent = Agent.of(conversation, task, now)
    only_results = agent.rng.random() < 0.5

    def cut(messages: Sequence[JsonObject]) -> Sequence[JsonObject]:
        newest = len(messages) - UNTOUCHED
        return [
            _cut(one, only_results) if number < newest else one
            for number, one in enumerate(messages)
        ]

    agent.view = cut
    for turn in task.turns:
        agent.hear(turn)
        agent.work(turn)


def _cut(message: JsonObject, only_results: bool) -> JsonObject:
    text = message["content"]
    if only_results:
        return {**message, "content": _CLEARED} if message["role"] == "tool" else message
    if text is None or len(text) <= _CUT_CHARS:
        return message
    return {**message, "content": f"{text[:_CUT_CHARS]}... [truncated]"}


def _user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def _transcript(messages: Sequence[JsonObject]) -> str:
    names = {"user": "Human", "assistant": "AI", "tool": "Tool"}
    lines = []
    for one in messages:
        calls = "".join(f" [{call['function']['name']}]" for call in one.get("tool_calls", ()))
        lines.append(f"{names[one['role']]}: {one['content'] or ''}{calls}")
    return "\n".join(lines)
