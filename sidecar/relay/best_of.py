"""Best of N at the proxy: what vLLM is asked, and the reply made of its N answers.

`BestOf` is the state of one request: what is asked, how it ended, what the reply's header says.
`BestOfConnection` replaces the flight's upstream connection and has its interface. It holds vLLM's
reply, has it judged, and gives the flight the head, body and end of a plain reply: to the flight
one answer was asked for and took a little longer. A reply without N answers (an error, an adapter
that vLLM does not know) is passed on unchanged.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from sidecar.errors import UNREADABLE_JSON
from sidecar.metrics.proxy import Metrics
from sidecar.records import Surface
from sidecar.relay.heads import ReplyHeaders
from sidecar.relay.peek import RequestPeek
from sidecar.relay.refusals import Refusal, surface_error
from sidecar.relay.reply_edit import MAX_HELD_BYTES, NULL, Strip
from sidecar.relay.reply_parser import ReplyHead, ReplyReader
from sidecar.relay.request_edit import (
    LOGPROBS,
    MODEL,
    STREAM_OPTIONS,
    TOKEN_IDS,
    Member,
    PiecedBody,
    edit_request,
    elements,
    members,
)
from sidecar.relay.upstream import SendingConnection
from sidecar.scoring import Material, NoPick, Pick, Picker, Verdict

# Best of N, the request: is it allowed, is it useful, and what vLLM is asked. Pure.

BEST_OF_HEADER = b"x-sidecar-best-of"
LEAST, MOST = 2, 8
GREEDY_BELOW = 1e-5
"""vLLM's `_SAMPLING_EPS`: a lower temperature means greedy, and then it refuses `n` above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfPlan:
    """How vLLM is asked for N answers, and what the client sees of it."""

    n: int
    stream: bool
    """The client asked for a stream."""
    include_usage: bool
    continuous_usage: bool
    strip: Strip
    """What only the sidecar asks for."""
    peek: RequestPeek
    says_stream_options: bool

    def body_for(self, upstream_model: str) -> bytes:
        """The body to send to vLLM."""
        wanted = {
            MODEL: json.dumps(upstream_model).encode(),
            "n": b"%d" % self.n,
            "stream": b"false",
        }
        if self.says_stream_options:
            wanted[STREAM_OPTIONS] = b"null"
        if self.strip.token_ids:
            wanted[TOKEN_IDS] = b"true"
        if self.strip.logprobs:
            wanted[LOGPROBS] = b"true"
        return edit_request(self.peek.body, wanted)


class _Fields(msgspec.Struct):
    """Any: whatever JSON the client sent."""

    n: Any = None
    seed: Any = None
    temperature: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    stream: Any = None
    stream_options: Any = None


_FIELDS = msgspec.json.Decoder(_Fields)


def wanted_answers(header: str, *, limit: int) -> int | Refusal:
    """Read the request header, empty when it was not sent. Returns: 2..8, or 1 when best of N is
    not asked for. limit: the most that this caller may ask for; 1 when best of N is off."""
    if header in ("", "1"):
        return 1
    n = int(header) if header.isascii() and header.isdigit() and len(header) < 4 else 0
    if not LEAST <= n <= MOST:
        return _refused(f"x-sidecar-best-of must be a whole number from {LEAST} to {MOST}.")
    if limit < LEAST:
        return _refused(
            "x-sidecar-best-of was sent, and best of N is off here. Leave the header out, or have "
            "it turned on ([best_of] enabled = true, and a limit above 1 for this key)."
        )
    if n > limit:
        return _refused(f"x-sidecar-best-of is {n}; at most {limit} is allowed here.")
    return n


def refuse_surface(header: str, target: bytes, surface: Surface) -> Refusal | None:
    if header in ("", "1"):
        return None
    path = target.partition(b"?")[0].decode("utf-8", "replace")
    return _refused(
        f"x-sidecar-best-of is not available on {path}, only on /v1/chat/completions. "
        "Leave the header out.",
        surface,
    )


def plan_best_of(peek: RequestPeek, n: int, *, captured: bool) -> BestOfPlan | str:
    """Plan a request, or say why it is relayed unchanged. captured: the exchange is recorded. Else
    token ids alone are needed, to count the returned answer's tokens."""
    if not peek.model_is_text:
        return "not_valid"
    try:
        fields = _FIELDS.decode(peek.body)
    except UNREADABLE_JSON:
        return "not_valid"  # NaN and the like: left to vLLM to refuse
    reason = _why_not(fields)
    if reason is not None:
        return reason
    options = fields.stream_options or {}
    include_usage = bool(options.get("include_usage"))
    return BestOfPlan(
        n=n,
        stream=fields.stream is True,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        strip=Strip(
            token_ids=peek.may_ask_token_ids("chat"),
            logprobs=captured and peek.may_ask_logprobs("chat"),
        ),
        peek=peek,
        says_stream_options=fields.stream_options is not None,
    )


def _why_not(fields: _Fields) -> str | None:
    if fields.n is not None and (isinstance(fields.n, bool) or fields.n != 1):
        return "n"
    if fields.seed is not None:
        return "seed"  # the client wants the same answer each time; a judge may choose another
    temperature = fields.temperature
    if isinstance(temperature, int | float) and temperature < GREEDY_BELOW:
        return "temperature_zero"
    if fields.use_beam_search:
        return "beam_search"  # there `n` is the width of the beam
    if fields.prompt_logprobs is not None:
        return "prompt_logprobs"
    # vLLM refuses what follows, and its own error must reach the client.
    if not isinstance(fields.stream, bool | None):
        return "not_valid"
    options = fields.stream_options
    if options is not None and (not isinstance(options, dict) or (options and not fields.stream)):
        return "not_valid"
    return None


def _refused(message: str, surface: Surface = "chat") -> Refusal:
    return surface_error(surface, 400, message, kind="BadRequestError", param="x-sidecar-best-of")


# Make the reply of a best-of-N request from vLLM's reply with N answers. Pure.

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
    """List the members of each delta but the role, one delta per event, in vLLM's order."""
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


REPLY_HEADER = "x-sidecar-best-of"
STREAM_TYPE = b"text/event-stream; charset=utf-8"


class BestOf:
    """One request for best of N, from its plan to its metrics. `close` it once, at the end."""

    def __init__(
        self,
        plan: BestOfPlan | str,
        picker: Picker,
        metrics: Metrics,
        *,
        exchange_id: str,
        request: bytes,
        keep: bool,
        project: str,
        timeout_s: float,
    ) -> None:
        """plan: a text says why N answers are not asked for. request: the client's body. keep: the
        exchange is recorded. project: of the client's key. timeout_s: the judge's."""
        if not isinstance(plan, str) and not picker.ready:
            plan = "not_ready"  # no judge would choose: N answers would be sampled for nothing
        self.plan = None if isinstance(plan, str) else plan
        """None: send the plain request over the plain connection."""
        self.picker = picker
        self.timeout_s = timeout_s
        self.returned_index = 0
        """Which of vLLM's choices the client got; for the record."""
        self._fallback: str | None = plan if isinstance(plan, str) else None
        self._picked = False
        self._metrics = metrics
        self._exchange_id = exchange_id
        self._request = request
        self._keep = keep
        self._project = project
        self._sampled = 1

    def plain_instead(self, status: int) -> bool:
        """True when vLLM refused N answers: the plain request is sent instead, once. It refuses `n`
        for reasons of its own, such as a default temperature of 0."""
        if status != 400 or self.plan is None:
            return False
        self.send_plainly()
        return True

    def send_plainly(self) -> None:
        self.plan = None
        self._fallback = "refused"
        self._sampled = 1

    def material(self, answers: Answers) -> Material:
        self._sampled = len(answers.messages)
        return Material(
            exchange_id=self._exchange_id,
            request=self._request,
            answers=answers.messages,
            keep=self._keep,
            project=self._project,
        )

    def decide(self, verdict: Verdict, answers: Answers, waited_s: float) -> int:
        """Note the verdict. Returns: the index of the answer to return."""
        self._metrics.best_of_judge.observe(waited_s)
        if isinstance(verdict, Pick):
            self.returned_index, self._picked, self._fallback = verdict.index, True, None
        else:
            self._fallback = verdict.reason
        kept = answers.tokens[self.returned_index]
        if kept is not None:
            self._metrics.best_of_unreturned_tokens.inc(answers.completion_tokens - kept)
        return self.returned_index

    def fell_back(self, reason: str) -> None:
        """Note why the client gets no chosen answer; a later attempt may still give one."""
        self._fallback, self._picked, self.returned_index = reason, False, 0

    @property
    def own_lines(self) -> tuple[bytes, ...]:
        """The reply's header: how many were sampled, which one this is, and why if none was
        chosen."""
        line = f"{REPLY_HEADER}: {self._sampled};picked={self.returned_index}"
        if not self._picked:
            line += f";fallback={self._fallback or 'cut'}"
        return (line.encode(),)

    def close(self) -> None:
        """Count the request as picked, or as fallen back for one reason."""
        self._metrics.best_of_requests.inc()
        if self._picked:
            answer = "other" if self.returned_index else "first"
            self._metrics.best_of_picked.inc((answer,))
        else:
            self._metrics.best_of_fallbacks.inc((self._fallback or "cut",))


class BestOfConnection(ReplyReader):
    """One sending of a best-of-N request: a `ReplyReader` to vLLM, a connection to the flight.
    on_chunk: gets vLLM's bytes as they come: the capture holds all N answers, and all are
    charged."""

    def __init__(
        self,
        connection: SendingConnection,
        best_of: BestOf,
        plan: BestOfPlan,
        on_chunk: Callable[[bytes], None],
    ) -> None:
        self._upstream: SendingConnection | None = connection
        """None once its reply has ended: it may carry another request by then."""
        self._best_of = best_of
        self._plan = plan
        self._on_chunk = on_chunk
        self._reader: ReplyReader | None = None
        self._head: ReplyHead | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._passing = False
        self._asking: asyncio.Task[Verdict] | None = None

    # -- as the flight's connection

    def send(
        self, reader: ReplyReader, head: bytes, body: bytes | PiecedBody, *, head_only: bool
    ) -> None:
        assert self._upstream is not None, "one request each"
        self._reader = reader
        self._upstream.send(self, head, body, head_only=head_only)

    def abort(self) -> None:
        self._reader = None
        if self._upstream is not None:
            self._upstream.abort()
        elif self._asking is not None:
            self._asking.cancel()

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    # -- as vLLM's reader

    def reply_head(self, head: ReplyHead) -> None:
        self._head = head
        if head.status != 200 or head.headers.encoded:
            self._pass_on("not_200" if head.status != 200 else "encoded")

    def reply_body(self, data: bytes) -> None:
        self._on_chunk(data)
        if self._passing:
            if self._reader is not None:
                self._reader.reply_body(data)
            return
        self._chunks.append(data)
        self._size += len(data)
        if self._size > MAX_HELD_BYTES:
            self._pass_on("too_large")

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        return False

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        if complete:
            self._upstream = None
        if self._reader is None:
            return
        if self._passing or self._head is None:
            self._reader.batch_end(complete=complete, received_at=received_at)
        elif complete:
            self._judge(received_at)

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        self._upstream = None
        if self._reader is not None:
            self._best_of.fell_back("upstream_lost")
            self._reader.upstream_lost(why, nothing_came=nothing_came, reused=reused)

    # -- between the two

    def _pass_on(self, reason: str) -> None:
        """Pass vLLM's reply on unchanged, from here to its end."""
        self._passing = True
        self._best_of.fell_back(reason)
        if self._reader is None or self._head is None:
            return
        self._reader.reply_head(self._head)
        for chunk in self._chunks:
            self._reader.reply_body(chunk)
        self._chunks.clear()

    def _judge(self, received_at: float) -> None:
        try:
            answers = read_answers(b"".join(self._chunks), self._plan.n)
        except UnreadableAnswersError:
            self._hand_over_unread(received_at)
            return
        best_of, began = self._best_of, time.perf_counter()
        asking = asyncio.ensure_future(
            best_of.picker.pick(best_of.material(answers), best_of.timeout_s)
        )
        self._asking = asking

        def judged(_: asyncio.Future[Verdict]) -> None:
            if asking.cancelled():
                return
            # A picker should not raise; if one does, the client still gets an answer.
            verdict = NoPick(reason="failed") if asking.exception() else asking.result()
            ended = time.perf_counter()
            picked = best_of.decide(verdict, answers, ended - began)
            self._hand_over(answers, picked, ended)

        asking.add_done_callback(judged)

    def _hand_over(self, answers: Answers, picked: int, received_at: float) -> None:
        reader, head, plan = self._reader, self._head, self._plan
        if reader is None or head is None:
            return
        try:
            if plan.stream:
                body = stream_reply(
                    answers,
                    picked,
                    plan.strip,
                    include_usage=plan.include_usage,
                    continuous_usage=plan.continuous_usage,
                )
            else:
                body = whole_reply(answers, picked, plan.strip)
        except (LookupError, *UNREADABLE_JSON):  # vLLM does not write such a message
            self._hand_over_unread(received_at)
            return
        self._chunks.clear()
        if plan.stream:
            head = ReplyHead(head.status, head.reason, _as_stream(head.headers), None)
        else:
            head = ReplyHead(head.status, head.reason, head.headers, len(body))
        reader.reply_head(head)
        reader.reply_body(body)
        reader.batch_end(complete=True, received_at=received_at)

    def _hand_over_unread(self, received_at: float) -> None:
        self._pass_on("unreadable_reply")
        if self._reader is not None:
            self._reader.batch_end(complete=True, received_at=received_at)


def _as_stream(headers: ReplyHeaders) -> ReplyHeaders:
    """The headers of vLLM's whole reply, for the same reply as a stream."""
    streamed = ReplyHeaders()
    streamed.lines = [line for line in headers.lines if line[:13].lower() != b"content-type:"]
    streamed.lines.append(b"content-type: " + STREAM_TYPE)
    streamed.content_type = STREAM_TYPE
    return streamed
