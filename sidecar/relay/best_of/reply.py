"""Make the reply of a best-of-N request from vLLM's reply with N answers. Pure.

A whole reply is vLLM's own bytes with the picked choice alone. Only `index`, the usage and the
fields that the sidecar asked for differ.
A stream has the same values in the events that vLLM 0.32 writes for one answer: the role, the text
in one piece, each tool call in two, the end, the usage if the client asked for it, `[DONE]`.
The usage counts the returned answer alone, because clients compute their context length and costs
from it. The tokens of the other answers are in the sidecar's own metrics.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from sidecar.errors import UNREADABLE_JSON
from sidecar.relay.payload.reply_edit import NULL, Strip
from sidecar.relay.payload.spans import Member, elements, members

Edit = tuple[int, int, bytes]
"""(start, end, new): replace `data[start:end]` by `new`."""
Values = dict[str, bytes]
"""The members of an object by key, each value as the bytes of the reply."""

DONE = b"data: [DONE]\n\n"


class UnreadableAnswersError(Exception):
    """vLLM's reply is no chat reply with N choices. Never leaves the relay."""


class _Choice(msgspec.Struct):
    index: int
    message: msgspec.Raw
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


_DECODER = msgspec.json.Decoder(_Reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """vLLM's reply and the positions of its choices."""

    body: bytes
    top: tuple[Member, ...]
    """The reply's members, from its only scan."""
    messages: tuple[bytes, ...]
    """[N] assistant messages by choice index, in vLLM's JSON."""
    spans: tuple[tuple[int, int], ...]
    """[N] (start, end) of the choices in `body`, by choice index."""
    tokens: tuple[int | None, ...]
    """[N] token counts by choice index; None if vLLM hides the ids (`include_reasoning: false`)."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens of all N answers together."""


def read_answers(body: bytes, n: int) -> Answers:
    """Find the choices of a whole reply. Raises: UnreadableAnswersError."""
    try:
        reply = _DECODER.decode(body)
        top = tuple(members(body))
        (choices,) = (member for member in top if member.key == "choices")
        places = elements(body, choices.start, choices.end)
    except (*UNREADABLE_JSON, IndexError) as error:
        raise UnreadableAnswersError(str(error)) from error
    by_index = sorted(zip(reply.choices, places, strict=True), key=lambda pair: pair[0].index)
    if [choice.index for choice, _ in by_index] != list(range(n)):
        raise UnreadableAnswersError(f"asked for {n} choices, got {len(by_index)}")
    return Answers(
        body=body,
        top=top,
        messages=tuple(bytes(choice.message) for choice, _ in by_index),
        spans=tuple(place for _, place in by_index),
        tokens=tuple(
            None if choice.token_ids is None else len(choice.token_ids) for choice, _ in by_index
        ),
        prompt_tokens=reply.usage.prompt_tokens,
        completion_tokens=reply.usage.completion_tokens,
    )


def whole_reply(answers: Answers, picked: int, strip: Strip) -> bytes:
    """Make the whole reply with the answer `picked` alone."""
    body = answers.body
    edits: list[Edit] = []
    for member in answers.top:
        if member.key == "choices":
            edits.append((member.start, member.end, b"[%b]" % _choice(answers, picked, strip)))
        elif member.key == "usage":
            edits.append((member.start, member.end, _usage(answers, picked, member)))
        elif member.key == "prompt_token_ids" and strip.token_ids:
            edits.append((member.start, member.end, NULL))
    return _replace(body, 0, len(body), edits)


def stream_reply(
    answers: Answers, picked: int, strip: Strip, *, include_usage: bool, continuous_usage: bool
) -> bytes:
    """Make all events of a stream with the answer `picked` alone."""
    top = {m.key: answers.body[m.start : m.end] for m in answers.top if m.key != "choices"}
    choice = _values(answers.body, *answers.spans[picked])
    said = _values(choice["message"], 0, len(choice["message"]))
    token_ids = NULL if strip.token_ids else choice.get("token_ids", NULL)
    logprobs = NULL if strip.logprobs else choice.get("logprobs", NULL)
    no_ids = NULL if token_ids == NULL else b"[]"
    own_tokens = answers.tokens[picked]
    full = answers.completion_tokens if own_tokens is None else own_tokens

    def event(choices: bytes, rest: bytes = b"", *, tokens: int | None = None) -> bytes:
        usage = b""
        if continuous_usage and tokens is not None:
            usage = b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,' % (
                answers.prompt_tokens,
                answers.prompt_tokens + tokens,
                tokens,
            )
            usage += b'"completion_tokens_details":null}'
        return (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%b,"model":%b,'
            b'"choices":[%b]%b%b}\n\n'
        ) % (top["id"], top["created"], top["model"], choices, usage, rest)

    role = (
        b'{"index":0,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}'
    ) % said.get("role", b'"assistant"')
    prompt_ids = NULL if strip.token_ids else top.get("prompt_token_ids", NULL)
    prompt = b',"prompt_token_ids":%b,"prompt_text":%b' % (prompt_ids, top.get("prompt_text", NULL))
    events = [event(role, prompt, tokens=0)]
    for delta in _deltas(said):
        middle = (b'{"index":0,"delta":{%b},"logprobs":%b,"finish_reason":null,"token_ids":%b}') % (
            delta,
            logprobs,
            token_ids,
        )
        events.append(event(middle, tokens=full))
        logprobs, token_ids = NULL, no_ids  # the first event has those of the whole answer
    end = (
        b'{"index":0,"delta":{},"logprobs":%b,"finish_reason":%b,"stop_reason":%b,"token_ids":%b}'
    ) % (logprobs, choice.get("finish_reason", NULL), choice.get("stop_reason", NULL), token_ids)
    fingerprint = top.get("system_fingerprint", NULL)
    signed = b"" if fingerprint == NULL else b',"system_fingerprint":' + fingerprint
    events.append(event(end, b"" if include_usage else signed, tokens=full))
    if include_usage:
        (member,) = (found for found in answers.top if found.key == "usage")
        usage = _without_nulls(_usage(answers, picked, member))
        events.append(event(b"", b',"usage":' + usage + signed))
    return b"".join((*events, DONE))


def _deltas(said: Values) -> list[bytes]:
    """List the members of each delta, one delta per event, in vLLM's order; the role is not among
    them."""
    deltas = []
    for key in ("reasoning", "content"):
        if said.get(key, NULL) not in (NULL, b'""'):
            deltas.append(b'"%b":%b' % (key.encode(), said[key]))
    known = ("role", "content", "reasoning", "tool_calls")
    others = {key: value for key, value in said.items() if key not in known and value != NULL}
    if others:
        deltas.append(b",".join(_name(key) + value for key, value in others.items()))
    calls = said.get("tool_calls", b"[]")
    if calls == NULL:
        calls = b"[]"
    for place, (start, end) in enumerate(elements(calls, 0, len(calls))):
        deltas += _call_deltas(place, _values(calls, start, end))
    return deltas


def _call_deltas(place: int, call: Values) -> list[bytes]:
    function = _values(call["function"], 0, len(call["function"]))
    return [
        b'"content":null,"tool_calls":[{"id":%b,"type":%b,"index":%d,"function":{"name":%b}}]'
        % (call["id"], call.get("type", b'"function"'), place, function["name"]),
        b'"content":null,"tool_calls":[{"index":%d,"function":{"arguments":%b}}]'
        % (place, function["arguments"]),
    ]


def _choice(answers: Answers, picked: int, strip: Strip) -> bytes:
    start, end = answers.spans[picked]
    edits: list[Edit] = []
    for member in members(answers.body, start, end):
        if member.key == "index":
            edits.append((member.start, member.end, b"0"))
        elif (member.key == "token_ids" and strip.token_ids) or (
            member.key == "logprobs" and strip.logprobs
        ):
            edits.append((member.start, member.end, NULL))
    return _replace(answers.body, start, end, edits)


def _usage(answers: Answers, picked: int, usage: Member) -> bytes:
    """Make the usage object with the counts of one answer; unchanged when they are not known."""
    own = answers.tokens[picked]
    if own is None:
        return answers.body[usage.start : usage.end]
    values = {
        "completion_tokens": b"%d" % own,
        "total_tokens": b"%d" % (answers.prompt_tokens + own),
        # A sum over all answers (reasoning tokens); the share of each answer is not known.
        "completion_tokens_details": NULL,
    }
    found = members(answers.body, usage.start, usage.end)
    edits = [(m.start, m.end, values[m.key]) for m in found if m.key in values]
    return _replace(answers.body, usage.start, usage.end, edits)


def _without_nulls(data: bytes) -> bytes:
    """Remove members that are null at every depth, as vLLM does in the last event's usage."""
    kept = [
        _name(key) + (_without_nulls(value) if value.startswith(b"{") else value)
        for key, value in _values(data, 0, len(data)).items()
        if value != NULL
    ]
    return b"{%b}" % b",".join(kept)


def _values(data: bytes, start: int, end: int) -> Values:
    return {member.key: data[member.start : member.end] for member in members(data, start, end)}


def _name(key: str) -> bytes:
    return json.dumps(key).encode() + b":"


def _replace(data: bytes, start: int, end: int, edits: list[Edit]) -> bytes:
    pieces: list[bytes] = []
    at = start
    for first, last, value in edits:
        pieces += (data[at:first], value)
        at = last
    pieces.append(data[at:end])
    return b"".join(pieces)
