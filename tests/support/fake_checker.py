"""A checker to script: it finds what a function says of an answer's content."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ingest.records import Answer
from ingest.verifiers.checkers import NotLoadedError
from ingest.verifiers.records import Result

Find = Callable[[str], Result]


class FakeChecker:
    """Keeps what it was asked. See `ingest.verifiers.checkers.Checker`."""

    def __init__(self, find: Find, *, version: str = "1", not_loaded: str = "") -> None:
        self.find = find
        self.named = version
        self.not_loaded = not_loaded
        self.asked: list[list[str]] = []
        """Contents, by call of `check`."""

    async def version(self) -> str:
        if self.not_loaded:
            raise NotLoadedError(self.not_loaded)
        return self.named

    async def check(self, request: bytes, answers: Sequence[Answer], project: str) -> list[Result]:
        contents = [json.loads(one.message)["content"] for one in answers]
        self.asked.append(contents)
        return [self.find(content) for content in contents]
