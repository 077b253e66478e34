"""Reads the tasks of tau2 from `inspect-evals`: what a customer wants, and the expected actions.

The data hold instructions for a simulated customer and no conversation, so the customer's words are
made from the instructions, and the actions are spread over the turns. Many turns of many customers
are the same few words, as in real traffic.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sessions.tasks import Call, JsonObject, Task, Turn, in_steps, tool

DOMAINS = ("airline", "retail", "banking", "telecom")
TELECOM_TASKS = 355
"""Tasks that are taken, evenly spaced, of the 2,285 in the package."""
TELECOM_OPENING = "Hi, I have a problem with my phone."
BANKING_OPENING = "Hi, I need help with my account."
GREETING = "Hi! How can I help you today?"
SYSTEM = (
    "You are a customer service agent that helps the user according to the <policy>. In each turn "
    "you either send a message to the user or make tool calls.\n<policy>\n{policy}\n</policy>"
)
_FOLDERS = {"banking": "banking_knowledge"}
_GO_ON = ("Yes, please go ahead.", "Okay, what is next?", "Yes.", "Thanks. Anything else needed?")
_POLICY_CHARS = 4_000
_SENTENCES = re.compile(r"(?<=[.!?])\s+")
_CALLS_PER_TURN = 3


def read_domain(package: Path, name: str) -> list[Task]:
    """Read one of `DOMAINS` from the folder of the package `inspect_evals`."""
    folder = package / "tau2" / "data" / "domains" / _FOLDERS.get(name, name)
    raw = _load(folder / "tasks.json")
    if name == "telecom":
        raw = raw[:: max(1, len(raw) // TELECOM_TASKS)][:TELECOM_TASKS]
    tools = _tools(raw)
    system = SYSTEM.format(policy=_policy(folder))
    return [_task(name, number, one, tools, system) for number, one in enumerate(raw)]


def _load(path: Path) -> Any:  # Any: the package's data
    if path.exists():
        return json.loads(path.read_text())
    with gzip.open(path.with_name(f"{path.name}.gz"), "rt") as packed:
        return json.load(packed)


def _policy(folder: Path) -> str:
    for name in ("policy.txt", "main_policy.txt", "prompts/components/policy_header.md"):
        if (folder / name).exists():
            return (folder / name).read_text()[:_POLICY_CHARS]
    return "Help the customer."


def _actions(task: JsonObject) -> list[JsonObject]:
    return (task.get("evaluation_criteria") or {}).get("actions") or []


def _tools(tasks: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
    """The tools that the actions of the agent use."""
    parameters: dict[str, dict[str, object]] = {}
    for task in tasks:
        for action in _actions(task):
            if action.get("requestor") != "user":
                known = parameters.setdefault(action["name"], {})
                known.update({name: {"type": "string"} for name in action["arguments"]})
    return tuple(
        tool(name, name.replace("_", " "), parameters[name]) for name in sorted(parameters)
    )


def _task(
    domain: str, number: int, task: JsonObject, tools: tuple[JsonObject, ...], system: str
) -> Task:
    opening, facts = _customer(domain, task)
    turns = [Turn(user=opening), *_worked(facts, _actions(task))]
    return Task(
        name=f"tau2-{domain}-{number}",
        system=system,
        tools=tools,
        turns=tuple(turns),
        world=f"tau2-{domain}",
        greeting=GREETING if domain in ("airline", "retail") else "",
    )


def _customer(domain: str, task: JsonObject) -> tuple[str, list[str]]:
    """The customer's first words, and what the customer says after them."""
    told = task["user_scenario"]["instructions"]
    if isinstance(told, str):  # banking: one text
        sentences = [one for one in _SENTENCES.split(_first_person(told)) if one]
        opening = " ".join((BANKING_OPENING, *sentences[1:4]))  # before them: who plays whom
        return opening, sentences[4:7]
    reason = _first_person(told["reason_for_call"])
    known = _first_person(told.get("known_info") or "I have no more details.")
    if domain == "telecom":
        return TELECOM_OPENING, [known, reason]
    return reason, [known, *_SENTENCES.split(_first_person(told["task_instructions"]))[:2]]


def _worked(facts: Sequence[str], actions: Sequence[JsonObject]) -> list[Turn]:
    """Spread the actions over turns. An action of the customer is two turns without a call: the
    agent asks for it in words."""
    texts = [*facts]
    turns: list[Turn] = []
    waiting: list[Call] = []

    def say(text: str) -> None:
        turns.append(Turn(user=text, steps=in_steps(waiting)))
        waiting.clear()

    for action in actions:
        if action.get("requestor") == "user":
            done = Call(name=action["name"], arguments=action["arguments"]).text()
            say(texts.pop(0) if texts else _GO_ON[len(turns) % len(_GO_ON)])
            say(f"I did {done}. It is still not solved.")
            continue
        waiting.append(Call(name=action["name"], arguments=action["arguments"]))
        if len(waiting) == _CALLS_PER_TURN:
            say(texts.pop(0) if texts else _GO_ON[len(turns) % len(_GO_ON)])
    for text in texts or (["Thank you, that is all."] if waiting else []):
        say(text)
    return turns


def _first_person(text: str) -> str:
    """Turn "You want your bag" into "I want my bag": near enough for a text to be compared."""
    for old, new in (("You are", "I am"), ("You're", "I'm"), ("You", "I"), ("your", "my")):
        text = re.sub(rf"\b{old}\b", new, text)
    return text.strip()
