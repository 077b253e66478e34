"""The words of a scripted model and of its tools. Pure: a seeded generator gives the chance.

Two conversations in the same state get the same reply about half of the time, as with a low
temperature: each takes the usual wording with `USUAL`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from random import Random

from benchmarks.sessions.tasks import Call, JsonObject, Task, Turn, compact

USUAL = 0.71
"""The square of it is the chance that two replies in the same state are the same: 0.5."""
_OPENINGS = ("Sure.", "Certainly.", "Of course.", "Understood.", "Right away.", "Let me see.")
_CLOSINGS = (
    "Is there anything else?",
    "Let me know what to do next.",
    "What would you like to do now?",
    "Tell me if something looks wrong.",
    "Shall I go on?",
    "I am ready for the next step.",
    "",
)
_FILLER = ("entry", "value", "updated", "record", "index", "page", "total", "owner", "state")


def reply_text(turn: Turn, rng: Random) -> str:
    """The last reply of a turn."""
    done = "; ".join(call.text() for step in turn.steps for call in step)
    about = " ".join(turn.user.split()[:14])
    body = f"I have done this: {done}." if done else f'About "{about}": here is what I can say.'
    usual = rng.random() < USUAL
    opening = _OPENINGS[0 if usual else rng.randrange(1, len(_OPENINGS))]
    closing = _CLOSINGS[0 if usual else rng.randrange(len(_CLOSINGS))]
    return f"{opening} {body} {closing}"


def call_text(calls: Sequence[Call], rng: Random) -> str | None:
    """What a reply with tool calls says besides them: mostly nothing."""
    if rng.random() < USUAL:
        return None
    return f"{rng.choice(_OPENINGS)} I call {calls[0].name} with a check of what it returns."


def thought(turn: Turn, rng: Random) -> str:
    """The reasoning before a reply."""
    return f"The user says: {turn.user[:120]} I should {rng.choice(_OPENINGS).lower()}"


def tool_result(task: Task, call: Call) -> str:
    """The result of a call, the same for each equal call in the same world."""
    digest = sha256(f"{task.world}\x00{call.text()}".encode()).hexdigest()
    result: dict[str, object] = {"status": "ok", "tool": call.name, "reference": digest[:10]}
    result |= call.arguments
    if task.result_words:
        chance = Random(digest)
        result["content"] = " ".join(chance.choice(_FILLER) for _ in range(task.result_words))
    return json.dumps(result, default=str)


def summary(messages: Sequence[JsonObject], rng: Random) -> str:
    """A summary of a conversation: what was asked and done. No two are worded alike."""
    asked = [one["content"].split("\n")[-1][:160] for one in messages if one["role"] == "user"]
    done = [
        f"{call['function']['name']} with {call['function']['arguments']}"
        for one in messages
        for call in one.get("tool_calls", ())
    ]
    rng.shuffle(done)
    wishes = "\n".join(f"- {text}" for text in asked)
    notes = " ".join(rng.choices(_FILLER, k=6))
    return f"The user asked:\n{wishes}\n\nDone so far: {'; '.join(done) or 'nothing'}. See {notes}."


def assistant(text: str | None, calls: Sequence[Call], rng: Random) -> JsonObject:
    """An assistant message in the form of chat completions; each call has an id of its own."""
    message: JsonObject = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"chatcmpl-tool-{rng.getrandbits(64):016x}",
                "type": "function",
                "function": {"name": call.name, "arguments": compact(call.arguments)},
            }
            for call in calls
        ]
    return message
