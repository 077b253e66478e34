"""The in-memory `Judge` for all tests. `tests/ingest/ruler/test_judge.py` holds it to the
contract of the real one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingest.errors import JudgeUnavailableError
from ingest.ruler.judge import JudgeReply

ANSWER_BLOCK = re.compile(r'<answer-[0-9a-f]+ id="(\w+)">\n(.*)\n</answer-[0-9a-f]+>')
Shown = Mapping[str, dict[str, Any]]
"""{id: shown answer} in the order shown. Any: JSON."""
Reply = str | Exception | Callable[[Shown], str]
"""A text, an error to raise, or a function of the shown answers."""


class FakeJudge:
    """Plays a script and repeats its last entry. Without a script it scores by `scores`."""

    def __init__(self, *script: Reply, model: str = "scripted") -> None:
        self.model = model
        self.script = list(script)
        self.scores: dict[str, float] = {}
        """Content of an answer -> its score; 0.5 for any other content."""
        self.away = False
        self.rubbish = False
        self.conversations: list[list[dict[str, str]]] = []
        self.schemas: list[Mapping[str, Any]] = []

    @property
    def prompts(self) -> list[str]:
        """The user's message of each conversation."""
        return [conversation[1]["content"] for conversation in self.conversations]

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        if self.away:
            raise JudgeUnavailableError("judge is down")
        self.conversations.append([dict(message) for message in messages])
        self.schemas.append(schema)
        step = self._step()
        if isinstance(step, Exception):
            raise step
        text = step if isinstance(step, str) else step(shown_answers(messages))
        return JudgeReply(text=text, prompt_tokens=100, completion_tokens=10, seconds=0.5)

    def _step(self) -> Reply:
        if self.rubbish:
            return "I like them all"
        if not self.script:
            return score_by_content(self.scores, otherwise=0.5)
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def shown_answers(messages: Sequence[Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """{id: answer} in the order shown, read as a model would read the prompt."""
    return {name: json.loads(body) for name, body in ANSWER_BLOCK.findall(messages[1]["content"])}


def scores_reply(scores: Mapping[str, Any]) -> str:
    """A well-formed reply with these scores by id."""
    entries = [{"id": name, "explanation": f"why {name}", "score": s} for name, s in scores.items()]
    return json.dumps({"scores": entries})


def score_by_content(
    table: Mapping[str, float], otherwise: float | None = None
) -> Callable[[Shown], str]:
    """A reply that scores each answer by a table of contents.

    otherwise: the score of a content that the table lacks; None: that is an error of the test.
    """

    def score(content: str) -> float:
        return table[content] if otherwise is None else table.get(content, otherwise)

    return lambda shown: scores_reply({n: score(a["content"]) for n, a in shown.items()})
