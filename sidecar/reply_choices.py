"""Read a reply of chat or text completions: whole, or put together from its events. Pure.

Both surfaces have choices that carry token ids and log-probabilities; they differ in where the text
stands, and in the form of the log-probabilities. One reader takes both.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidecar.reply_parts import (
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


class _Entry(msgspec.Struct, gc=False):
    logprob: float
    token: str | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None
    """Chat's form."""
    tokens: list[str] | None = None
    """Text completions' form, in two lists."""
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    message: JsonObject | None = None
    delta: JsonObject | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


class _Reply(msgspec.Struct, gc=False):
    model: str | None = None
    choices: list[_Choice] = []
    prompt_token_ids: tuple[int, ...] | None = None
    usage: _Usage | None = None
    error: object = None
    """An object in a stream that broke; a string from vLLM's own check of keys."""


_DECODER = msgspec.json.Decoder(_Reply)


def read_whole(body: bytes) -> ReadReply:
    """Read a reply that came in one piece. Raises: UnreadableReplyError."""
    reader = _Reader()
    reader.add(decode(_DECODER, body))
    return reader.end(ended=True)


def read_stream(chunks: Sequence[bytes]) -> ReadReply:
    """Put a stream together. Chunks may be cut anywhere. Raises: UnreadableReplyError."""
    reader = _Reader()
    ended = False
    for document in documents(chunks):
        if is_done(document):
            ended = True
        else:
            reader.add(decode(_DECODER, document))
    return reader.end(ended=ended)


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
        for choice in part.choices:
            if choice.prompt_token_ids:
                self._add_prompt(choice.prompt_token_ids)
            growing = self._growing.get(choice.index)
            if growing is None:
                growing = self._growing[choice.index] = _Growing()
            growing.add(choice)

    def _add_prompt(self, prompt_token_ids: tuple[int, ...]) -> None:
        """Text completions give the prompt with each choice; a list of prompts, several."""
        reply = self._reply
        if reply.prompt_token_ids and reply.prompt_token_ids != prompt_token_ids:
            reply.several_prompts = True
        else:
            reply.prompt_token_ids = prompt_token_ids

    def end(self, *, ended: bool) -> ReadReply:
        reply = self._reply
        reply.ended = ended
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
