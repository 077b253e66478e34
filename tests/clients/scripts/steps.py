"""Run a client's steps against one server after another, and print what came as JSON.

A script of this folder runs in the environment of the library that it drives, so nothing here is
imported from the project.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 60.0
KEY = "no-key-needed"
QUESTION = "Name the capital of France."
MESSAGES: list[Any] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": QUESTION},
]
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Guided decoding follows it also with a model that is too small to call tools by itself."""
TOOL_NAME = "get_weather"
TOOL_TEXT = "Today's weather in a city."
UNKNOWN_MODEL = "no-such-model"
CHOICES: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 7, "extra_body": {"top_k": 1}}
"""Two choices that are the same in every run: vLLM refuses several at temperature 0, and sampled
ones depend in their last digits on which of them were computed together."""
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""A PNG of one pixel, in base64."""


@dataclass(frozen=True)
class Target:
    """Whom a step asks."""

    url: str
    """Without `/v1`."""
    model: str


Step = Callable[[Target], Any]
"""Asks, and gives back what came as something that JSON can hold. May be a coroutine function."""


def main(steps: Sequence[Step]) -> None:
    """`script.py MODEL STEPS URL...`: print {URL: {step: what came}}.

    STEPS: names of steps with commas between, or `all`.
    """
    model, asked_for, *urls = sys.argv[1:]
    chosen = [step for step in steps if asked_for == "all" or step.__name__ in asked_for.split(",")]
    seen: dict[str, Any] = {}
    # One event loop for all: clients that pool connections keep them from step to step.
    with asyncio.Runner() as loop, contextlib.redirect_stdout(sys.stderr):
        for url in urls:
            target = Target(url, model)
            came = {step.__name__: outcome(step, target, loop) for step in chosen}
            # Some clients repeat the address that they were given.
            seen[url] = json.loads(json.dumps(came).replace(url, "<server>"))
    json.dump(seen, sys.stdout)


def by_choice(chunks: Sequence[Any]) -> list[Any]:
    """The chunks of a stream of several choices, choice by choice.

    Several choices are sampled side by side, and whose token comes first is chance.
    """
    return sorted(
        chunks, key=lambda chunk: [choice["index"] for choice in chunk["choices"]] or [99]
    )


def outcome(step: Step, target: Target, loop: asyncio.Runner) -> Any:
    """What the step gave, or how it broke off."""
    try:
        given = step(target)
        return loop.run(given) if asyncio.iscoroutine(given) else given
    except Exception as error:  # noqa: BLE001 - told to the test, which fails on it
        return {"broke_off": f"{type(error).__name__}: {error}", "at": traceback.format_exc()}


def refusal(ask: Callable[[], Any]) -> dict[str, Any]:
    """The error that `ask` must end with, as its client shows it."""
    try:
        ask()
    except Exception as error:
        if not hasattr(error, "status_code"):
            raise
        return {
            "error": type(error).__name__,
            "status": error.status_code,
            "body": getattr(error, "body", None),
            "message": str(error),
        }
    raise AssertionError("an error was expected, and a reply came")
