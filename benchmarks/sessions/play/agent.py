"""An agent's loop, played from a script: it asks, calls tools, asks again, and answers the user."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from benchmarks.sessions.play import wording
from benchmarks.sessions.play.bodies import body
from benchmarks.sessions.play.clients import Client
from benchmarks.sessions.records import SentRequest
from benchmarks.sessions.tasks import Call, JsonObject, Task, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request, and when its record is handed over."""

    request: SentRequest
    ended: float


@dataclass(slots=True, kw_only=True)
class Conversation:
    """All requests of one conversation, by all its agents."""

    name: str
    client: Client
    rng: Random
    sent: list[Sent] = field(default_factory=list)

    def record(
        self,
        *,
        request: bytes,
        replies: Sequence[JsonObject],
        parent: str | None,
        at: float,
        ended: float,
        session: str = "",
    ) -> str:
        """Add a request. Returns its exchange id.

        session: the true one where it is not the conversation's.
        """
        client = self.client
        exchange = sha256(f"{self.name}\x00{len(self.sent)}".encode()).hexdigest()[:24]
        one = SentRequest(
            exchange_id=exchange,
            at=at,
            handed_at=ended,
            project=client.project,
            key_id=client.key_id,
            user=client.user,
            session_header=client.session_header,
            trace_id=client.trace_id,
            surface=client.surface,
            request=request,
            replies=tuple(json.dumps(reply).encode() for reply in replies),
            true_session=session or self.name,
            true_parent=parent,
        )
        self.sent.append(Sent(request=one, ended=ended))
        return exchange


@dataclass(slots=True, kw_only=True)
class Agent:
    """One agent of a conversation and what its client holds."""

    conversation: Conversation
    task: Task
    now: float
    """Unix seconds on the agent's own clock."""
    system: str
    tools: list[JsonObject]
    messages: list[JsonObject] = field(default_factory=list)
    """The history as the client sends it, in the form of chat, without the system prompt."""
    parent: str | None = None
    """The request whose reply the history ends with."""
    view: Callable[[Sequence[JsonObject]], Sequence[JsonObject]] = list
    """What of the history the client sends."""

    @classmethod
    def of(cls, conversation: Conversation, task: Task, now: float) -> Agent:
        """An agent at the beginning of its task."""
        agent = cls(
            conversation=conversation,
            task=task,
            now=now,
            system=task.system,
            tools=list(task.tools),
        )
        if task.greeting:
            agent.messages.append({"role": "assistant", "content": task.greeting})
        return agent

    @property
    def rng(self) -> Random:
        return self.conversation.rng

    def latency(self) -> float:
        """Seconds that vLLM takes for a reply."""
        return 0.5 + self.rng.expovariate(1 / 2.5)

    def body(self, messages: Sequence[JsonObject] | None = None) -> bytes:
        """The request that the client would send now; messages: others than its history."""
        return body(
            self.conversation.client,
            system=self.system,
            tools=self.tools,
            messages=self.view(self.messages) if messages is None else messages,
            now=self.now,
            rng=self.rng,
        )

    def replies(self, turn: Turn, calls: Sequence[Call]) -> list[JsonObject]:
        """What the model answers: one message for each choice."""
        return [self._reply(turn, calls) for _ in range(self.conversation.client.choices)]

    def ask(
        self,
        turn: Turn,
        calls: Sequence[Call] = (),
        *,
        text: str = "",
        request: bytes | None = None,
    ) -> JsonObject:
        """Send the history and add the reply to it. Returns the reply.

        calls: what the reply asks for; with none it is the turn's last. text: the reply's own.
        request: the body, if it was written before.
        """
        replies = self.replies(turn, calls)
        if text:
            replies[-1]["content"] = text
        started, self.now = self.now, self.now + self.latency()
        self.parent = self.conversation.record(
            request=self.body() if request is None else request,
            replies=replies,
            parent=self.parent,
            at=started,
            ended=self.now,
        )
        self.messages.append(self._replayed(replies[-1]))
        return replies[-1]

    def hear(self, turn: Turn) -> None:
        """The user says something, after a while."""
        self.now += self.rng.uniform(4, 40)
        self.tools += turn.new_tools
        self.messages.append({"role": "user", "content": turn.user})

    def use_tools(self, reply: JsonObject, calls: Sequence[Call]) -> None:
        """Call the tools and add what they return."""
        self.now += self.rng.uniform(0.05, 2)
        for asked, call in zip(reply["tool_calls"], calls, strict=True):
            self.result(asked["id"], wording.tool_result(self.task, call))

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def work(self, turn: Turn) -> None:
        """Do the turn's calls and answer."""
        for calls in turn.steps:
            self.use_tools(self.ask(turn, calls), calls)
        self.ask(turn)

    def _reply(self, turn: Turn, calls: Sequence[Call]) -> JsonObject:
        client, rng = self.conversation.client, self.rng
        text = wording.call_text(calls, rng) if calls else wording.reply_text(turn, rng)
        message = wording.assistant(text, calls, rng)
        if client.thinks == "field":
            message["reasoning"] = wording.thought(turn, rng)
        elif client.thinks == "tag":
            message["content"] = f"<think>\n{wording.thought(turn, rng)}\n</think>\n\n{text or ''}"
        elif client.loose_content and text:
            message["content"] = f"\n\n{text} "
        return message

    def _replayed(self, reply: JsonObject) -> JsonObject:
        """The reply as the client keeps it: without its reasoning."""
        kept = {key: value for key, value in reply.items() if key != "reasoning"}
        if self.conversation.client.thinks == "tag":
            kept["content"] = reply["content"].rpartition("</think>\n\n")[2] or None
        return kept
