"""Read a reply of chat or text completions, whole or streamed, many events at once. Pure.

On both surfaces a choice carries token ids and log-probabilities. They differ in the place of the
text and in the form of the log-probabilities; one reader handles both.

Typical events of a stream are decoded many at a time, the others one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sidecar.errors import UNREADABLE_JSON
from sidecar.replies.parts import (
    Document,
    JsonObject,
    ReadChoice,
    ReadReply,
    UnreadableReplyError,
    canonical,
    decode,
    documents,
    dumped,
    is_done,
    is_json,
)

# The fields that are read from a reply of chat or text completions, as msgspec decodes them.


# Fields stand in vLLM's order, because msgspec tries the next field first.
class Entry(msgspec.Struct, gc=False, kw_only=True):
    token: str | None = None
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    content: list[Entry] | None = None
    """Log-probabilities in the form of chat completions."""
    tokens: list[str] | None = None
    """Log-probabilities in the form of text completions: two lists."""
    token_logprobs: list[float | None] | None = None


class ChoiceFields(msgspec.Struct, gc=False):
    index: int = 0
    delta: JsonObject | None = None
    message: JsonObject | None = None
    text: str | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class Content(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: str | None = None


class OneLogprob(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: tuple[Entry]


class UsualChoice(msgspec.Struct, gc=False):
    """A choice with one token and its text, and nothing else; msgspec refuses any other field.
    Reading it takes a sixth less time than `ChoiceFields`."""

    delta: Content
    logprobs: OneLogprob
    token_ids: tuple[int]
    index: int = 0
    finish_reason: None = None
    stop_reason: int | str | None = None
    message: None = None
    text: None = None
    prompt_token_ids: None = None


class UsageFields(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


class ReplyFields(msgspec.Struct, gc=False):
    model: str | None = None
    choices: list[ChoiceFields] = []
    usage: UsageFields | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    error: object = None
    """An object when a stream failed; a string from vLLM's own key check."""


_PROMPT = b'"prompt_token_ids":['


def cut_prompts(document: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Take the prompts' token ids out of a reply or an event, unread: null stands there. Reading
    the 25,000 ids of a prompt of 100 kB takes 0.5 ms, finding them 0.01 ms. The key with its
    bracket stands in no JSON string, where each quote has a backslash. An array within it ends
    the cut too early, so the rest is no JSON; other damage between the brackets is not seen.
    Returns: the rest, and where each prompt stands in the document as a JSON array."""
    spans: list[tuple[int, int]] = []
    pieces: list[bytes] = []
    begin, at = 0, document.find(_PROMPT)
    while at >= 0 and (end := document.find(b"]", at) + 1) > 0:
        spans.append((at + len(_PROMPT) - 1, end))
        pieces.append(document[begin : spans[-1][0]])
        begin, at = end, document.find(_PROMPT, end)
    return (b"null".join((*pieces, document[begin:])) if spans else document), spans


REPLY = msgspec.json.Decoder(ReplyFields)
CHOICE = msgspec.json.Decoder(ChoiceFields)
USUAL = msgspec.json.Decoder(UsualChoice)


# Decode many events of a stream at once. Pure.

RUN_BYTES = 32_768
"""Bytes of events decoded in one call: 100 events with log-probabilities, 50 us, in which the
relay's thread cannot take the interpreter lock. With twice as much, more events at the end of a
stream would be decoded one by one."""
_ENDS = 64
"""At either end of a stream, events that are searched for the first and last typical one."""
_BEFORE_CHOICE = b'"choices":[{'
_BEHIND_CHOICE = b"}]}\n\n"
_LINE_END = 0x0A


class Frame(NamedTuple):
    """The bytes before and after the choice in the typical events of one stream."""

    head: bytes
    model: str | None

    def holds(self, chunk: bytes) -> bool:
        return chunk.startswith(self.head) and chunk.endswith(_BEHIND_CHOICE)

    def between(self, chunks: Sequence[bytes]) -> tuple[int, int]:
        """Return where the typical events begin and end; equal numbers when they are too few."""
        ends = min(_ENDS, len(chunks))
        first, last = 0, len(chunks)
        while not self.holds(chunks[first]):
            first += 1
            if first == ends:
                return last, last
        while last > len(chunks) - ends and not self.holds(chunks[last - 1]):
            last -= 1
        return first, last

    def choices(self, run: Sequence[bytes]) -> bytes | None:
        """Return the choices of typical events, one on each line; None when one event is not
        typical, or they are too long. All are checked at once by their total length."""
        size = sum(map(len, run))
        if size > 2 * RUN_BYTES:
            return None
        head = self.head
        inner = [chunk.removeprefix(head).removesuffix(_BEHIND_CHOICE) for chunk in run]
        joined = b"".join(inner)
        lost = len(run) * (len(head) + len(_BEHIND_CHOICE))
        if size - len(joined) != lost or _LINE_END in joined:
            return None
        return b"{%b}" % b"}\n{".join(inner)


def frame_of(event: bytes) -> Frame | None:
    """Return the frame that the events after this one probably share; None when the event holds
    more than model and choice."""
    head = event[: event.find(_BEFORE_CHOICE) + len(_BEFORE_CHOICE)]
    if not head.startswith(b"data: {") or not head.endswith(_BEFORE_CHOICE) or _LINE_END in head:
        return None
    try:
        said = REPLY.decode(head[5:] + b"}]}")
    except UNREADABLE_JSON:
        return None
    return Frame(head, said.model) if said == ReplyFields(said.model, [ChoiceFields()]) else None


def decode_lines(
    decoder: msgspec.json.Decoder[Document], lines: bytes, count: int
) -> list[Document] | None:
    """Decode objects, one on each line. Returns: None when any of them cannot be read. The result
    equals decoding each line: inside a JSON value, `}`, a line end and `{` never follow each other,
    so each line is whole values; and when there are as many values as lines, each line is one."""
    try:
        found = decoder.decode_lines(lines)
    except UNREADABLE_JSON:
        return None
    return found if len(found) == count else None


MAX_TOOL_CALLS = 1024
"""Highest index of a tool call, and most calls under one index: finding a call takes time for
each."""
_LEGACY = -1
"""Stands for the index of `function_call`, the form before `tool_calls`."""
_SET = frozenset({"id", "type"})
"""Texts inside an object of a delta that are given whole, not in pieces."""
FEW = 8
"""Streams with fewer chunks are read event by event: finding what their events share does not
pay."""


def read_whole(body: bytes) -> ReadReply:
    """Read a reply that is not streamed. Raises: UnreadableReplyError."""
    reader = _Reader()
    reader.add(body)
    reader.ended = True
    return reader.end()


def read_stream(chunks: Sequence[bytes]) -> ReadReply:
    """Read a streamed reply. Chunks may be cut anywhere. Raises: UnreadableReplyError."""
    reader = _Reader()
    frame = frame_of(chunks[0]) if len(chunks) > FEW else None
    if frame is None:
        reader.add_events(chunks)
        return reader.end()
    first, last = frame.between(chunks)
    length = 1 + RUN_BYTES // (1 + len(chunks[last - 1]))
    others = list(chunks[:first])
    for at in range(first, last, length):
        run = chunks[at : min(at + length, last)]
        # The rest of an event that was cut would follow.
        lines = None if others and not others[-1].endswith(b"\n\n") else frame.choices(run)
        if lines is None:
            others += run
            continue
        if others:
            reader.add_events(others)
            others = []
        if not reader.add_choices(lines, len(run), frame.model):
            reader.add_events(run)
    others += chunks[last:]
    reader.add_events(others)
    return reader.end()


class _Call:
    """A tool call while it grows."""

    __slots__ = ("arguments", "id", "kind", "name")

    def __init__(self) -> None:
        self.id: str | None = None
        self.kind = "function"
        self.name = ""
        self.arguments: list[str] = []

    def is_before(self, ident: str | None, name: str | None, arguments: object) -> bool:
        """Return True when a piece with a new id, a name or arguments begins the next call: this
        one has another id, or has arguments and another name, or its arguments are whole and the
        name is said again."""
        if ident and self.id:
            return True
        if not name or not self.arguments:
            return False
        if name != self.name:
            return True
        ends = self.arguments[-1].rstrip().endswith("}")
        more = isinstance(arguments, str) and arguments.lstrip().startswith("{")
        return ends and more and is_json("".join(self.arguments))

    def end(self) -> JsonObject:
        function = {"name": self.name or None, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": self.kind, "function": function}


class _Growing:
    """One answer of a stream while it grows. Texts are kept in pieces and joined once."""

    __slots__ = (
        "calls",
        "finish_reason",
        "logprobs",
        "others",
        "sampled",
        "stop_reason",
        "texts",
        "token_ids",
        "token_texts",
    )

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {"content": []}
        self.others: JsonObject = {}
        self.calls: dict[int, list[_Call]] = {}
        """Calls by the index that the reply gives them; several may share one."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.token_texts: list[str] = []

    def add(self, choice: ChoiceFields) -> None:
        whole = choice.delta is None
        delta = choice.message if whole else choice.delta
        if delta:
            content = delta.get("content")
            if len(delta) == 1 and type(content) is str:  # nearly every event of a stream
                self.texts["content"].append(content)
            else:
                self._merge(delta, whole=whole)
        elif choice.text is not None:
            self.texts["content"].append(choice.text)
        if choice.token_ids:
            self.token_ids += choice.token_ids
        if choice.logprobs is not None:
            self._add_logprobs(choice.logprobs)
        if choice.finish_reason:
            legacy = choice.finish_reason == "function_call"
            self.finish_reason = "tool_calls" if legacy else choice.finish_reason
            self.stop_reason = choice.stop_reason

    def add_usual(self, choices: Sequence[UsualChoice]) -> None:
        contents = [choice.delta.content for choice in choices]
        self.texts["content"] += [content for content in contents if content is not None]
        self.token_ids += [choice.token_ids[0] for choice in choices]
        entries = [choice.logprobs.content[0] for choice in choices]
        self.logprobs += [entry.logprob for entry in entries]
        self.token_texts += [entry.token for entry in entries if entry.token is not None]

    def _add_logprobs(self, logprobs: Logprobs) -> None:
        entries = logprobs.content
        if entries is not None:
            if len(entries) == 1:
                entry = entries[0]
                self.logprobs.append(entry.logprob)
                if entry.token is not None:
                    self.token_texts.append(entry.token)
            else:
                self.logprobs += [entry.logprob for entry in entries]
                self.token_texts += [entry.token for entry in entries if entry.token is not None]
        elif logprobs.token_logprobs is not None:
            # `null` for the first token of an echoed prompt is left out: the counts disagree.
            self.logprobs += [value for value in logprobs.token_logprobs if value is not None]
            self.token_texts += logprobs.tokens or ()

    def _merge(self, delta: JsonObject, *, whole: bool) -> None:
        """Add a delta, or a whole message: texts and lists grow, other fields are set."""
        for key, value in delta.items():
            if value is None:
                continue
            if key == "tool_calls":
                for place, call in enumerate(_list(value)):
                    index = _object(call).get("index")
                    index = place if whole or index is None else index
                    if type(index) is not int or not 0 <= index < MAX_TOOL_CALLS:
                        raise UnreadableReplyError(f"tool call number {index!r}")
                    self._grow(index, call)
            elif key == "function_call":
                self._grow(_LEGACY, {"function": value})
            elif isinstance(value, str) and key != "role":
                self.texts.setdefault(key, []).append(value)
            elif isinstance(value, list):
                self.others[key] = [*(self.others.get(key) or ()), *value]
            elif isinstance(value, dict):
                self.others[key] = _joined(self.others.get(key), value)
            else:
                self.others[key] = value

    def _grow(self, index: int, delta: JsonObject) -> None:
        """Add a piece of a tool call. Ids and names may be repeated; several calls may have one
        index."""
        function = _object(delta.get("function") or {})
        ident, name, arguments = delta.get("id"), function.get("name"), function.get("arguments")
        under = self.calls.setdefault(index, [])
        call = next((one for one in under if ident and one.id == ident), None)
        if call is None:
            if not under or under[-1].is_before(ident, name, arguments):
                if len(under) == MAX_TOOL_CALLS:
                    raise UnreadableReplyError(f"too many tool calls under index {index}")
                name = name or (under[-1].name if under else "")
                under.append(_Call())
            call = under[-1]
        call.id = ident or call.id
        call.kind = delta.get("type") or call.kind
        if name and name != call.name:
            call.name += str(name)
        if arguments:
            call.arguments.append(arguments if isinstance(arguments, str) else dumped(arguments))

    def end(self) -> ReadChoice:
        message = dict(self.others)
        for key, pieces in self.texts.items():
            if pieces:
                message[key] = "".join(pieces)
        message["tool_calls"] = [
            call.end() for index in sorted(self.calls) for call in self.calls[index]
        ]
        return ReadChoice(
            message=canonical(message),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            token_texts=self.token_texts,
        )


class _Reader:
    """Collects documents of a reply and returns the reply."""

    def __init__(self) -> None:
        self._reply = ReadReply()
        self._growing: dict[int, _Growing] = {}
        self.ended = False
        self._usual = True
        """All choices added as lines were typical ones."""

    def add_events(self, chunks: Sequence[bytes]) -> None:
        """Read events one by one. A `[DONE]` event ends the stream."""
        for document in documents(chunks):
            if is_done(document):
                self.ended = True
            else:
                self.add(document)

    def add_choices(self, lines: bytes, count: int, model: str | None) -> bool:
        """Add typical choices, one on each line. Returns: False when a line is not typical; nothing
        was added then."""
        usual = decode_lines(USUAL, lines, count) if self._usual else None
        if usual is not None:
            self._add_usual(usual)
        else:
            self._usual = False
            choices = decode_lines(CHOICE, lines, count)
            if choices is None:
                return False
            self._add_choices(choices)
        if model is not None:
            self._reply.models.add(model)
        return True

    def add(self, document: bytes) -> None:
        """Add a whole reply or an event. Raises: UnreadableReplyError."""
        reply = self._reply
        rest, prompts = cut_prompts(document)
        part = decode(REPLY, rest)
        for start, end in prompts:
            self._add_prompt(document[start:end])
        if part.model is not None:
            reply.models.add(part.model)
        if part.error is not None:
            error = part.error
            reply.error = str(error.get("type", "error")) if isinstance(error, dict) else "error"
        if part.prompt_token_ids:
            self._add_prompt(msgspec.json.encode(part.prompt_token_ids))
        if part.usage is not None and part.usage.completion_tokens is not None:
            reply.completion_tokens = part.usage.completion_tokens
        self._add_choices(part.choices)

    def _add_choices(self, choices: list[ChoiceFields]) -> None:
        for choice in choices:
            if choice.prompt_token_ids:
                self._add_prompt(msgspec.json.encode(choice.prompt_token_ids))
            growing = self._growing.get(choice.index)
            if growing is None:
                growing = self._growing[choice.index] = _Growing()
            growing.add(choice)

    def _add_usual(self, choices: list[UsualChoice]) -> None:
        indexes = [choice.index for choice in choices]
        alone = indexes.count(indexes[0]) == len(indexes)
        for index in dict.fromkeys(indexes[:1] if alone else indexes):
            growing = self._growing.get(index)
            if growing is None:
                growing = self._growing[index] = _Growing()
            growing.add_usual(
                choices if alone else [choice for choice in choices if choice.index == index]
            )

    def _add_prompt(self, prompt: bytes) -> None:
        """Add a prompt's token ids, a JSON array. Text completions give a prompt with each choice,
        and several prompts for a list of prompts."""
        reply = self._reply
        if reply.prompt_ids and prompt not in (b"[]", reply.prompt_ids):
            reply.several_prompts = True
        elif prompt != b"[]":
            reply.prompt_ids = prompt

    def end(self) -> ReadReply:
        reply = self._reply
        reply.ended = self.ended
        reply.choices = {index: growing.end() for index, growing in self._growing.items()}
        return reply


def _list(value: object) -> list[JsonObject]:
    if not isinstance(value, list):
        raise UnreadableReplyError("tool_calls is not a list")
    return value


def _object(value: object) -> JsonObject:
    if not isinstance(value, dict):
        raise UnreadableReplyError("a tool call is not an object")
    return value


def _joined(old: object, new: JsonObject) -> JsonObject:
    """Add an object of a delta, such as `audio`: its texts grow, what else it holds is set.
    Its fields are sorted, because streams send them in any order."""
    made = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        known = made.get(key)
        grows = isinstance(value, str) and isinstance(known, str) and key not in _SET
        if value is not None:
            made[key] = known + value if grows else value
    return dict(sorted(made.items()))
