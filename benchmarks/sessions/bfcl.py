"""Reads the multi-turn sets of `bfcl-eval`: user turns, and the calls that answer them.

The four sets tell the same 200 stories. `miss_func` gives a tool only later, `miss_param` an
argument only when asked, and `long_context` has longer results; most first turns are word for word
the same.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.sessions.tasks import Call, JsonObject, Task, Turn, in_steps, tool

SETS = ("base", "miss_func", "miss_param", "long_context")
SYSTEM = (
    "You are an expert in composing functions. Decide which functions to call to achieve the "
    "purpose of the user. Call nothing else, and say so when a function or an argument is missing."
)
LATER = "I have updated some more functions you can choose from. What about now?"
LONG_RESULT_WORDS = 120
_TOOL_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def read_set(package: Path, name: str) -> list[Task]:
    """Read one of `SETS` from the folder of the package `bfcl_eval`."""
    data = package / "data"
    answers = {
        answer["id"]: answer["ground_truth"]
        for answer in _lines(data / "possible_answer" / f"BFCL_v4_multi_turn_{name}.json")
    }
    documents = {
        kind: list(_lines(data / "multi_turn_func_doc" / f"{file}.json"))
        for kind, file in _TOOL_FILES.items()
        if (data / "multi_turn_func_doc" / f"{file}.json").exists()
    }
    return [
        _task(name, number, entry, answers[entry["id"]], documents)
        for number, entry in enumerate(_lines(data / f"BFCL_v4_multi_turn_{name}.json"))
    ]


def parse_call(text: str) -> Call:
    """Read `mv(source='a', destination='b')`. A value without a name is called `arg0`, and so on.
    What is no call of literals becomes a call whose one argument is the text."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call):
            given: dict[str, object] = {
                f"arg{n}": ast.literal_eval(value) for n, value in enumerate(node.args)
            }
            given |= {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
            return Call(name=ast.unparse(node.func), arguments=given)
    except (SyntaxError, ValueError):
        return Call(name=text.partition("(")[0], arguments={"call": text})
    return Call(name=text, arguments={})


def _lines(path: Path) -> Iterator[JsonObject]:
    with path.open() as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _task(
    name: str,
    number: int,
    entry: JsonObject,
    answers: Sequence[Sequence[str]],
    documents: Mapping[str, Sequence[JsonObject]],
) -> Task:
    later = {int(turn): set(names) for turn, names in (entry.get("missed_function") or {}).items()}
    hidden = set(entry.get("excluded_function") or ()).union(*later.values())
    known = [one for kind in entry["involved_classes"] for one in documents.get(kind, ())]
    turns = tuple(
        Turn(
            user=" ".join(message["content"] for message in asked) or LATER,
            steps=in_steps(map(parse_call, calls)),
            new_tools=tuple(_tool(one) for one in known if one["name"] in later.get(turn, ())),
        )
        for turn, (asked, calls) in enumerate(zip(entry["question"], answers, strict=False))
    )
    return Task(
        name=f"bfcl-{name}-{number}",
        system=SYSTEM,
        tools=tuple(_tool(one) for one in known if one["name"] not in hidden),
        turns=turns,
        world=f"bfcl-{number}",
        result_words=LONG_RESULT_WORDS if name == "long_context" else 0,
    )


def _tool(document: JsonObject) -> JsonObject:
    """A tool, with the first words of its description: the rest would be most of each request."""
    description = document["description"].rpartition("Tool description: ")[2]
    parameters = {
        name: {"type": _TYPES.get(one["type"], one["type"])}
        for name, one in document["parameters"]["properties"].items()
    }
    return tool(document["name"], description[:80], parameters)
