"""A request's messages in one canonical form, and digests that find its session. Pure.

Two requests of one conversation repeat each other's messages, but not byte for byte: clients change
white space, the order of keys, `cache_control` marks, the ids of tool calls, and leave reasoning
out. What is compared is therefore a digest of the canonical form: the role, the text with each run
of white space made one space, and name and arguments of each call. System prompts are kept apart:
many contain the time of day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Final, Literal

import msgspec
from xxhash import xxh3_64_intdigest

JsonObject = dict[str, Any]  # Any: what a client or vLLM wrote
SYSTEM_ROLES: Final = frozenset({"system", "developer"})
SYSTEM_KEYS: Final = ("system", "instructions")
LIST_KEYS: Final = ("messages", "input")
MESSAGE_KEYS: Final = (*SYSTEM_KEYS, *LIST_KEYS, "prompt")
"""Keys of a request that hold messages, in the order in which they are read."""
TOOL_KEYS: Final = ("tools", "functions")
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output", "mcp_call")
"""Items of the Responses API that hold what a tool returned."""
_REASONING: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_UNSENT: Final = frozenset({"cache_control", "id", "call_id", "tool_use_id", "annotations"})
"""Keys of a content part that say nothing about its content."""
_THINK: Final = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_encode: Final = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True)
class Message:
    """One canonical message."""

    role: str
    text: str
    """White space is one space; "" when there is none."""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments of each tool call; arguments are JSON with sorted keys, if they are JSON.
    """
    ids: tuple[str, ...] = ()
    """Ids of the calls. No part of the content: some clients write their own."""
    failed: bool | None = field(default=None, compare=False)
    """Of a tool's result: what the protocol says beside it; None: nothing."""
    _digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Each request that repeats the message needs it.
        parts = [self.role, self.text, *(part for call in self.calls for part in call)]
        object.__setattr__(self, "_digest", digest_of("\x00".join(parts)))

    @property
    def length(self) -> int:
        """Characters of text and arguments."""
        return len(self.text) + sum(len(arguments) for _, arguments in self.calls)

    def digest(self) -> bytes:
        """8 bytes that name the content."""
        return self._digest


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request repeats of its conversation."""

    messages: tuple[Message, ...]
    """Without system prompts; successive messages of the assistant are one."""
    system: str
    """All system prompts, canonical text, one a line."""
    tools: tuple[str, ...]
    """Sorted names of the tools on offer."""


def digest_of(text: str) -> bytes:
    """Return 8 bytes of BLAKE2b."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def read_conversation(request: JsonObject) -> Conversation:
    """Read a request of any surface. Parts of an unknown form are compared as JSON; nothing
    raises."""
    found: list[Message] = []
    for key in MESSAGE_KEYS:
        if key in request:
            found += read_messages(key, request[key])
    tools = (name for key in TOOL_KEYS for name in read_tools(request.get(key)))
    return join(found, tools)


def join(found: Iterable[Message], tools: Iterable[str]) -> Conversation:
    """Make the conversation of the messages of a request, in order, and the names of its tools."""
    system: list[str] = []
    messages: list[Message] = []
    said: list[Message] = []  # successive messages of the assistant
    for message in found:
        if message.role in SYSTEM_ROLES:
            system.append(message.text)
        elif message.role == "assistant":
            said.append(message)
        else:
            messages += _as_one(said)
            said.clear()
            messages.append(message)
    messages += _as_one(said)
    return Conversation(tuple(messages), "\n".join(system), tuple(sorted(set(tools))))


def read_messages(key: str, value: Any) -> Iterator[Message]:  # Any: what the client wrote
    """Yield the messages in the value of one of the `MESSAGE_KEYS`."""
    if key in SYSTEM_KEYS:
        if value:
            yield from _messages("system", {"content": value})
    elif isinstance(value, str):
        yield from _messages("user", {"content": value})
    elif isinstance(value, list):
        if key == "prompt":  # texts or token ids
            yield from _messages("user", {"content": _json(value)})
        else:
            for item in value:
                yield from read_item(item)


def read_item(item: Any) -> Iterator[Message]:  # Any: what the client wrote
    """Yield the messages of one item of a list of messages."""
    yield from _messages(str(item.get("role") or "") if isinstance(item, dict) else "user", item)


def read_tools(tools: Any) -> Iterator[str]:  # Any: what the client wrote
    """Yield the names in the value of one of the `TOOL_KEYS`."""
    for tool in _objects(tools):
        function = tool.get("function")
        named = function if isinstance(function, dict) else tool
        yield str(named.get("name") or tool.get("type"))


def read_reply(message: JsonObject) -> Message:
    """Read an answer as the capture keeps it: an assistant message in the form of chat."""
    found = _as_one(one for one in _messages("assistant", message) if one.role == "assistant")
    return found[0] if found else Message("assistant", "")


def _messages(role: str, item: Any) -> Iterator[Message]:  # Any: what the client wrote
    """Yield the canonical messages of one message or item."""
    if not isinstance(item, dict):
        yield Message(role, _json(item))
        return
    kind = item.get("type")
    if kind == "function_call":
        yield Message("assistant", "", (_call(item),), _id(item, "call_id"))
    elif kind in _OUTPUTS:
        yield Message("tool", _text(item.get("output")), failed=_call_failed(item))
    elif kind == "reasoning":
        return
    else:
        yield from _message(role, item)


def _message(role: str, item: JsonObject) -> Iterator[Message]:
    content = item.get("content")
    called = _objects(item.get("tool_calls"))
    calls = [_call(call.get("function") or call) for call in called]
    ids = [one for call in called for one in _id(call, "id")]
    if isinstance(item.get("function_call"), dict):  # the form before tools
        calls.append(_call(item["function_call"]))
    texts: list[str] = []
    if isinstance(content, list):
        for part in content:
            kind = str(part.get("type")) if isinstance(part, dict) else None
            if kind == "tool_use":
                calls.append(_call(part))
                ids += _id(part, "id")
            elif kind == "tool_result":
                said = part.get("is_error")
                failed = said if isinstance(said, bool) else None
                yield Message("tool", _text(part.get("content")), failed=failed)
            elif kind not in _REASONING:
                texts.append(_part(part))
    else:
        texts.append(_text(content))
    if isinstance(item.get("refusal"), str):
        texts.append(item["refusal"])
    text = " ".join(filter(None, texts))
    if role == "assistant":
        text = spaced(_THINK.sub("", text))
    elif role == "function":
        role = "tool"
    if text or calls or not isinstance(content, list):
        yield Message(role, text, tuple(calls), tuple(ids))


def _call_failed(item: JsonObject) -> bool | None:
    """What an item of the Responses API says. `status` of an output is not that of its call."""
    if item.get("type") != "mcp_call":
        return None
    if item.get("error") or item.get("status") == "failed":
        return True
    return False if item.get("status") == "completed" and item.get("error") is None else None


def _as_one(said: Iterable[Message]) -> list[Message]:
    """Make one message of what the assistant says in several items; none of none."""
    items = list(said)
    if len(items) < 2:
        return items
    calls = tuple(call for one in items for call in one.calls)
    ids = tuple(id_ for one in items for id_ in one.ids)
    return [Message("assistant", " ".join(one.text for one in items if one.text), calls, ids)]


def _id(item: JsonObject, key: str) -> tuple[str, ...]:
    value = item.get(key)
    return (value,) if isinstance(value, str) and value else ()


def _call(call: Any) -> tuple[str, str]:  # Any: what the client wrote
    if not isinstance(call, dict):
        return "", _json(call)
    arguments = call.get("arguments", call.get("input"))
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return str(call.get("name")), spaced(arguments)
    return str(call.get("name")), _json(arguments if arguments is not None else {})


def _part(part: Any) -> str:  # Any: what the client wrote
    if isinstance(part, dict):
        kind = str(part.get("type"))
        if kind in _TEXT_PARTS or ("type" not in part and "text" in part):
            return _text(part.get("text") if "text" in part else part.get(kind))
        part = {key: value for key, value in part.items() if key not in _UNSENT}
    return _text(part)


def _text(content: Any) -> str:  # Any: what the client wrote
    if content is None:
        return ""
    if isinstance(content, str):
        return spaced(content)
    if isinstance(content, list):
        return " ".join(filter(None, map(_part, content)))
    return _json(content)


def spaced(text: str) -> str:
    """Make each run of white space one space, and remove it at both ends."""
    return " ".join(text.split())


def _json(value: Any) -> str:  # Any: what the client wrote
    try:
        return _encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):  # lone surrogates, huge integers
        return json.dumps(value, sort_keys=True, default=str)


def _objects(value: Any) -> Iterable[JsonObject]:  # Any: what the client wrote
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else ()


# Digests by which a request finds the conversation that it continues. Pure.

LONG: Final = 24
"""Characters from which a message tells conversations apart; "Thank you!" does not."""
WORDS: Final = 6
"""Words of a shingle."""
SHINGLES: Final = 24
"""Shingles of a reply, of a user's message or of a tool's result that are remembered."""
FEW: Final = 4
"""Shingles that are remembered of a text with fewer chosen ones, chosen or not."""
HEARD_CHARS: Final = 2_048
"""Characters at the beginning, and as many at the end, of a message from which they are taken."""
ARGUMENT: Final = 16
"""Characters from which an argument of a call may be the task of another agent."""
ARGUMENTS: Final = 16
"""Arguments of a reply that are remembered."""
_AND_A_SPACE: Final[Callable[[int], int]] = (1).__add__


def chain(scope: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Return a digest of each beginning of a conversation: [0] of none of its messages, [k] of all.

    Equal digests mean equal scope and equal messages, in order.
    """
    found = [scope]
    for message in messages:
        found.append(link(found[-1], message))
    return found


def link(before: bytes, message: Message) -> bytes:
    """Return the digest of a beginning and one more message. With a scope for the beginning, it is
    the mark of the message wherever it stands."""
    return blake2b(before + message.digest(), digest_size=8).digest()


def calls(scope: bytes, message: Message) -> bytes | None:
    """Return the mark of a reply with the ids of its calls; None when it has none."""
    if not message.ids:
        return None
    return _mark(link(scope, message), "\x00".join(message.ids))


def shingles(scope: bytes, text: str) -> Iterator[int]:
    """Yield the mark of each run of `WORDS` words."""
    data = text.encode("utf-8", "replace")
    # Where the word after each one begins. Slices of the text cost half of joining words again.
    after = list(accumulate(map(_AND_A_SPACE, map(len, data.split(b" ")))))
    seed = int.from_bytes(scope, "big")
    return (
        xxh3_64_intdigest(data[begin : end - 1], seed)
        for begin, end in zip((0, *after), after[WORDS - 1 :], strict=False)
    )


def grown(before: bytes, text: str, reply: str) -> tuple[int, bytes] | None:
    """Return the marks of a message with a reply behind it: of the last run of words, by which a
    message that begins with both finds it, and of the whole. None for a few words.

    before: digest of the messages before it.
    """
    words = f"{text} {reply}".split()
    last = list(shingles(before, " ".join(words[-WORDS:])))
    return (last[0], whole_of(before, words)) if last and reply else None


def whole_of(before: bytes, words: Sequence[str]) -> bytes:
    """Return the mark of a text, whatever its white space."""
    return _mark(before, "".join(words))


def of_reply(scope: bytes, text: str) -> list[int]:
    """Return the first marks of a text, about every second one, chosen by their own value: so it is
    found again inside another text, whatever stands around it (Schleimer et al., Winnowing, SIGMOD
    2003)."""
    return _chosen(shingles(scope, text))


def of_heard(scope: bytes, text: str) -> list[int]:
    """Return about every second mark of the beginning and the end of a text, the lowest ones of a
    long text: they come from all parts, so texts that begin alike have different ones."""
    if len(text) > 2 * HEARD_CHARS:
        text = f"{text[:HEARD_CHARS]} {text[-HEARD_CHARS:]}"
    return _chosen(sorted(set(shingles(scope, text))))


def _chosen(found: Iterable[int]) -> list[int]:
    """Return the first `SHINGLES` odd marks; others too where there are few."""
    chosen: list[int] = []
    others: list[int] = []
    for mark in found:
        if mark & 1:
            chosen.append(mark)
            if len(chosen) == SHINGLES:
                break
        elif len(others) < FEW:
            others.append(mark)
    chosen += others[: max(0, FEW - len(chosen))]
    return list(dict.fromkeys(chosen))


def whole(scope: bytes, text: str) -> bytes | None:
    """Return the mark of a text that may be an argument of a call; None when it is too short."""
    return _mark(scope, text) if len(text) >= ARGUMENT else None


def arguments(scope: bytes, reply: Message) -> Iterator[bytes]:
    """Yield the mark of each text among the arguments of a reply's calls."""
    found = 0
    for _, written in reply.calls:
        try:
            value = msgspec.json.decode(written)
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
        for text in _texts(value):
            mark = whole(scope, spaced(text))
            if mark is not None:
                yield mark
                found += 1
                if found == ARGUMENTS:
                    return


def _texts(value: Any) -> Iterator[str]:  # Any: decoded JSON
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _mark(scope: bytes, text: str) -> bytes:
    return blake2b(scope + text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


# What the session tree is given, and what it returns.

How = Literal["answered", "asked", "retry", "kept", "called", "prefix", "trace", "header", "root"]
"""How the place was found. `answered`: the request repeats a whole conversation and its last reply;
`asked`: all but the wording of the last reply; `retry`: it repeats a request; `kept`: it repeats
messages of a conversation that was shortened, or a summary that was made of it; `called`: its text
is an argument of a tool call; `prefix`: it repeats an earlier part of a conversation; `trace`,
`header`: only the name that the client sent; `root`: nothing is known of it."""

Full = Literal["too_many_callers", "too_many_openings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An exchange as the tree needs it."""

    exchange_id: str
    at: float
    """When the request began, Unix seconds."""
    project: str
    key_id: str
    user: str
    session_header: str
    """The session that the client named; "" when it named none."""
    trace_id: str
    turn_id: str
    """Equal for a request and its retries; "" when not known."""
    conversation: Conversation
    replies: tuple[Message, ...]
    """One for each choice."""


@dataclass(frozen=True, slots=True)
class Kin:
    """Where an exchange stands, and who stands beside it, by their ids."""

    session: str
    parent: str | None
    """The exchange that it continues."""
    siblings: tuple[str, ...]
    """Next before and after it, of those that continue the same exchange, or begin the same
    session."""


@dataclass(frozen=True, slots=True)
class Family:
    """Exchanges that continue one exchange, or begin a session, by their ids."""

    session: str
    parent: str | None
    children: tuple[str, ...]
    """The newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an exchange stands."""

    exchange_id: str
    session: str
    """The exchange id of the session's first exchange, or the client's name for it."""
    parent: str | None
    """The exchange that this one continues."""
    turn: int
    """0 for an exchange without a parent, else the parent's and one."""
    branch: int
    """0 for the first exchange that continues the parent, 1 for the second one, and so on."""
    segment: int
    """0 in a session's beginning; one more whenever the client has shortened the conversation."""
    how: How
    held_out: bool = False
    """Its session is never trained on."""
    shares_opening: bool = False
    """It is the opening of its session, and of others that are on the other side of the held-out
    rule: it must be neither trained on nor asked in an exam."""
    full: Full | None = None
    """Why the session that was found did not take it, so that it begins one of its own. Not
    stored."""
