"""Read a reply of chat or text completions: whole, or put together from its events. Pure.

Both surfaces have choices that carry token ids and log-probabilities; they differ in where the text
stands, and in the form of the log-probabilities. One reader takes both.

Nearly all of a stream are events that are alike to the byte but for their choice, and each came as
one chunk. `_Frame` cuts those bytes off, and many choices are decoded in one call: half the time
that one event after the other takes. What is not like this is read event by event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sidecar.reply_parts import (
    Document,
    JsonObject,
    ReadChoice,
    ReadReply,
    UnreadableReplyError,
    decode,
    documents,
    is_done,
)

MAX_TOOL_CALLS = 1024
"""An index beyond this is not a call's place but nonsense, which must not cost memory."""


# Members stand in the order in which vLLM writes them: msgspec looks for the next one first.
class _Entry(msgspec.Struct, gc=False, kw_only=True):
    token: str | None = None
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None
    """Chat's form."""
    tokens: list[str] | None = None
    """Text completions' form, in two lists."""
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: JsonObject | None = None
    message: JsonObject | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class _Content(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: str | None = None


class _OneLogprob(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: tuple[_Entry]


class _UsualChoice(msgspec.Struct, gc=False):
    """The choice of an event that brings one token and its text and nothing else: what else a
    `_Choice` may say is refused. Decoded and added, it takes a sixth less time."""

    delta: _Content
    logprobs: _OneLogprob
    token_ids: tuple[int]
    index: int = 0
    finish_reason: None = None
    stop_reason: int | str | None = None
    message: None = None
    text: None = None
    prompt_token_ids: None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


class _Reply(msgspec.Struct, gc=False):
    model: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    error: object = None
    """An object in a stream that broke; a string from vLLM's own check of keys."""


_DECODER = msgspec.json.Decoder(_Reply)
_CHOICE_DECODER = msgspec.json.Decoder(_Choice)
_USUAL_DECODER = msgspec.json.Decoder(_UsualChoice)

_RUN_BYTES = 32_768
"""Of events that are decoded in one call, which keeps the interpreter from the relay's thread: 100
events with log-probabilities, 50 us. Twice as many bytes are left to be decoded one by one."""
_ENDS = 64
"""Events at either end of a stream among which the usual ones may begin and end."""
_FEW = 8
"""Chunks of a stream so short that it does not pay to look for what its events share."""
_BEFORE_CHOICE = b'"choices":[{'
_BEHIND_CHOICE = b"}]}\n\n"
_LINE_END = 0x0A


def read_whole(body: bytes) -> ReadReply:
    """Read a reply that came in one piece. Raises: UnreadableReplyError."""
    reader = _Reader()
    reader.add(decode(_DECODER, body))
    reader.ended = True
    return reader.end()


def read_stream(chunks: Sequence[bytes]) -> ReadReply:
    """Put a stream together. Chunks may be cut anywhere. Raises: UnreadableReplyError."""
    reader = _Reader()
    frame = _frame(chunks[0]) if len(chunks) > _FEW else None
    if frame is None:
        reader.add_events(chunks)
        return reader.end()
    first, last = frame.between(chunks)
    length = 1 + _RUN_BYTES // (1 + len(chunks[last - 1]))
    others = list(chunks[:first])
    for at in range(first, last, length):
        run = chunks[at : min(at + length, last)]
        # Behind an event that was cut, its rest would come.
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


class _Frame(NamedTuple):
    """What the usual events of one stream have before and behind what their one choice says."""

    head: bytes
    model: str | None

    def holds(self, chunk: bytes) -> bool:
        return chunk.startswith(self.head) and chunk.endswith(_BEHIND_CHOICE)

    def between(self, chunks: Sequence[bytes]) -> tuple[int, int]:
        """Where the usual events begin and end; the same when they are not nearly all."""
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
        """The choices of usual events, one on each line; None when one of them is not usual, or
        when they are too long. All are checked at once: each lost as much as a usual one does."""
        size = sum(map(len, run))
        if size > 2 * _RUN_BYTES:
            return None
        head = self.head
        inner = [chunk.removeprefix(head).removesuffix(_BEHIND_CHOICE) for chunk in run]
        joined = b"".join(inner)
        lost = len(run) * (len(head) + len(_BEHIND_CHOICE))
        if size - len(joined) != lost or _LINE_END in joined:
            return None
        return b"{%b}" % b"}\n{".join(inner)


def _frame(event: bytes) -> _Frame | None:
    """The frame that the events behind this one will probably have; None when it says more than
    the model."""
    head = event[: event.find(_BEFORE_CHOICE) + len(_BEFORE_CHOICE)]
    if not head.startswith(b"data: {") or not head.endswith(_BEFORE_CHOICE) or _LINE_END in head:
        return None
    try:
        said = _DECODER.decode(head[5:] + b"}]}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return _Frame(head, said.model) if said == _Reply(said.model, [_Choice()]) else None


def _decode_lines(
    decoder: msgspec.json.Decoder[Document], lines: bytes, count: int
) -> list[Document] | None:
    """Decode objects, each on one line of its own; None when that many cannot be read.

    It takes exactly what one by one is taken: JSON allows `}`, a line's end and `{` in this order
    nowhere inside a value, so each line is whole values; and as many values as lines are one each.
    """
    try:
        found = decoder.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if len(found) == count else None


class _Growing:
    """One answer that grows. Texts are kept in pieces and joined once."""

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
        self.calls: list[JsonObject] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.token_texts: list[str] = []

    def add(self, choice: _Choice) -> None:
        delta = choice.delta
        if delta is None:
            delta = choice.message
        if delta:
            content = delta.get("content")
            if len(delta) == 1 and type(content) is str:  # nearly every event of a stream
                self.texts["content"].append(content)
            else:
                self._merge(delta)
        elif choice.text is not None:
            self.texts["content"].append(choice.text)
        if choice.token_ids:
            self.token_ids += choice.token_ids
        if choice.logprobs is not None:
            self._add_logprobs(choice.logprobs)
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            self.stop_reason = choice.stop_reason

    def add_usual(self, choices: Sequence[_UsualChoice]) -> None:
        contents = [choice.delta.content for choice in choices]
        self.texts["content"] += [content for content in contents if content is not None]
        self.token_ids += [choice.token_ids[0] for choice in choices]
        entries = [choice.logprobs.content[0] for choice in choices]
        self.logprobs += [entry.logprob for entry in entries]
        self.token_texts += [entry.token for entry in entries if entry.token is not None]

    def _add_logprobs(self, logprobs: _Logprobs) -> None:
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
            # `null` stands for the first token of an echoed prompt. Left out, the counts disagree.
            self.logprobs += [value for value in logprobs.token_logprobs if value is not None]
            self.token_texts += logprobs.tokens or ()

    def _merge(self, delta: JsonObject) -> None:
        """Add a delta: text grows, tool calls grow by their index, the rest is set."""
        for key, value in delta.items():
            if value is None:
                continue
            if key == "tool_calls":
                self._merge_tool_calls(value)
            elif isinstance(value, str) and key != "role":
                self.texts.setdefault(key, []).append(value)
            else:
                self.others[key] = value

    def _merge_tool_calls(self, deltas: object) -> None:
        for place, delta in enumerate(_list(deltas)):
            index = _object(delta).get("index", place)
            if not isinstance(index, int) or not 0 <= index < MAX_TOOL_CALLS:
                raise UnreadableReplyError(f"tool call number {index!r}")
            while len(self.calls) <= index:
                self.calls.append({"id": None, "type": "function", "function": {}})
            call = self.calls[index]
            for key in ("id", "type"):
                if delta.get(key) is not None:
                    call[key] = delta[key]
            function = call["function"]
            for key, text in _object(delta.get("function") or {}).items():
                if text is not None:
                    function[key] = str(function.get(key) or "") + str(text)

    def end(self) -> ReadChoice:
        message = dict(self.others)
        for key, pieces in self.texts.items():
            if pieces:
                message[key] = "".join(pieces)
        if self.calls:
            message["tool_calls"] = self.calls
        return ReadChoice(
            message=message,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            token_texts=self.token_texts,
        )


class _Reader:
    """Takes documents, gives the reply."""

    def __init__(self) -> None:
        self._reply = ReadReply()
        self._growing: dict[int, _Growing] = {}
        self.ended = False
        self._usual = True
        """All choices that were added as lines were usual ones."""

    def add_events(self, chunks: Sequence[bytes]) -> None:
        """Read events one by one. `[DONE]` among them ends the stream."""
        for document in documents(chunks):
            if is_done(document):
                self.ended = True
            else:
                self.add(decode(_DECODER, document))

    def add_choices(self, lines: bytes, count: int, model: str | None) -> bool:
        """Add events of which nothing is left but one choice each, on a line. False: they cannot be
        read so, and nothing was added."""
        usual = _decode_lines(_USUAL_DECODER, lines, count) if self._usual else None
        if usual is not None:
            self._add_usual(usual)
        else:
            self._usual = False
            choices = _decode_lines(_CHOICE_DECODER, lines, count)
            if choices is None:
                return False
            self._add_choices(choices)
        if model is not None:
            self._reply.models.add(model)
        return True

    def add(self, part: _Reply) -> None:
        reply = self._reply
        if part.model is not None:
            reply.models.add(part.model)
        if part.error is not None:
            error = part.error
            reply.error = str(error.get("type", "error")) if isinstance(error, dict) else "error"
        if part.prompt_token_ids and not reply.prompt_token_ids:
            reply.prompt_token_ids = part.prompt_token_ids
        if part.usage is not None and part.usage.completion_tokens is not None:
            reply.completion_tokens = part.usage.completion_tokens
        self._add_choices(part.choices)

    def _add_choices(self, choices: list[_Choice]) -> None:
        for choice in choices:
            if choice.prompt_token_ids:
                self._add_prompt(choice.prompt_token_ids)
            growing = self._growing.get(choice.index)
            if growing is None:
                growing = self._growing[choice.index] = _Growing()
            growing.add(choice)

    def _add_usual(self, choices: list[_UsualChoice]) -> None:
        indexes = [choice.index for choice in choices]
        alone = indexes.count(indexes[0]) == len(indexes)
        for index in dict.fromkeys(indexes[:1] if alone else indexes):
            growing = self._growing.get(index)
            if growing is None:
                growing = self._growing[index] = _Growing()
            growing.add_usual(
                choices if alone else [choice for choice in choices if choice.index == index]
            )

    def _add_prompt(self, prompt_token_ids: tuple[int, ...]) -> None:
        """Text completions give the prompt with each choice; a list of prompts, several."""
        reply = self._reply
        if reply.prompt_token_ids and reply.prompt_token_ids != prompt_token_ids:
            reply.several_prompts = True
        else:
            reply.prompt_token_ids = prompt_token_ids

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
