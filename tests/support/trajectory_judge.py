"""Judges of whole trajectories: an in-memory one, and one behind an OpenAI-compatible server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingest.ruler.judge import JudgeReply
from support.fake_judge import scores_reply

BLOCK = re.compile(
    r'^<trajectory-[0-9a-f]+ id="(\w+)">\n(.*?)\n?</trajectory-[0-9a-f]+>$', re.DOTALL | re.M
)


def shown_trajectories(prompt: str) -> dict[str, list[dict[str, Any]]]:
    """{id: lines} in the order shown, read as a model would read the user's message."""
    return {
        name: [json.loads(line) for line in body.split("\n") if line]
        for name, body in BLOCK.findall(prompt)
    }


def last_said(lines: Sequence[Mapping[str, Any]]) -> str:
    """The content of a trajectory's last line; empty when it has none."""
    return str(lines[-1]["content"]) if lines else ""


def ranked(messages: Sequence[Mapping[str, str]], worth: Callable[[str], float]) -> str:
    """A reply that scores each trajectory by what it says last."""
    shown = shown_trajectories(messages[1]["content"])
    return scores_reply({name: worth(last_said(lines)) for name, lines in shown.items()})


class RankingJudge:
    """Scores each trajectory by a table of what it says last."""

    model = "ranking"

    def __init__(self, worth: Mapping[str, float]) -> None:
        self.worth = worth
        self.conversations: list[list[dict[str, str]]] = []

    @property
    def prompts(self) -> list[str]:
        """The user's message of each conversation."""
        return [conversation[1]["content"] for conversation in self.conversations]

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        self.conversations.append([dict(message) for message in messages])
        text = ranked(messages, self.worth.__getitem__)
        return JudgeReply(text=text, prompt_tokens=100, completion_tokens=10, seconds=0.5)
