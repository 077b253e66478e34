"""Read the logs of another gateway or tracer as exchanges and feedback. Pure but for
`open_rows` and the clock that `_time` reads.

A log says what was asked and answered, and by which session and user. It has no token ids, no
log-probabilities, and an answer of another model. So an imported exchange is never trained on
itself (`IMPORTED`): its prompt starts groups of fresh candidates, and is asked by the canary's gate
where its session is held out. What a log does not say stays unknown, and a row that cannot be such
an exchange is left out and counted by its reason.

litellm: LiteLLM's StandardLoggingPayload, one JSON object a request, as its callbacks write it, or
rows of its table `LiteLLM_SpendLogs`. langfuse: observations of the blob storage export, of the API
or of the page's export, and `scores`. tensorzero: rows of `ChatInference`, `BooleanMetricFeedback`
and `FloatMetricFeedback` as `FORMAT JSONEachRow` writes them.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from ingest.grouping.request import has_media
from sidecar.capture.exchange_id import exchange_id
from sidecar.feedback import ID_PREFIX, LONGEST, Feedback, TargetKind
from sidecar.records import BASE, IMPORTED, Choice, Exchange, Sampling, Timings
from sidecar.replies.parts import answer_text, message_json
from sidecar.routing.opening import mark, opening
from sidecar.routing.session_key import session_key, short_name

Object = Mapping[str, Any]  # Any: JSON
PARAMETERS: Final = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "max_tokens", "max_completion_tokens", "stop", "tools", "tool_choice"),
    *("parallel_tool_calls", "response_format", "chat_template_kwargs", "reasoning_effort"),
)
"""Members of a chat request that are kept. A seed is none: candidates must differ."""
SAMPLED: Final = frozenset(Sampling.__struct_fields__)
CHAT_CALLS: Final = frozenset({"", "completion", "acompletion", "chat", "chat_completion"})
GENERATION: Final = "GENERATION"
LITELLM_MARKS: Final = (b"(litellm_truncated skipped", b"redacted-by-litellm")
"""What LiteLLM (1.84) writes in the place of a text over MAX_STRING_LENGTH_PROMPT_IN_DB characters,
2,048 if not set, and of one that it must not log."""
LARGEST: Final = 2**31
MOST_BYTES: Final = 4 * 2**20
"""A record that is longer is left out: hundreds may wait on the bus beside the proxy's."""
MILLISECONDS: Final = 1e11  # as seconds the year 5138
EARLIEST_AT: Final = 1.4e9  # 2014: a chat model's request is later; 0 and 20260921 are no times
AHEAD_S: Final = 86_400.0
"""How far ahead of this host's clock a row may be: a clock or a zone that was wrong."""
_CAPITAL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TRACE: Final = re.compile(r"[0-9a-f]{32}")
_OPENAI_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class LeftOutError(Exception):
    """A row is no exchange that can be imported. The message is the reason, a counter's label."""


@contextmanager
def _any_row() -> Iterator[None]:
    """Make one reason of what a row causes that no check foresaw. Raises: LeftOutError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise LeftOutError("unreadable") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One chat request of a log, and its answer."""

    source_id: str
    at: float
    """When it began, unix seconds."""
    took_s: float = 0.0
    messages: Sequence[Any]
    parameters: Object = field(default_factory=dict)
    """Of `PARAMETERS`; others are ignored."""
    answer: Object
    """The assistant's message, in the form of chat completions."""
    finish_reason: str | None = None
    session: str = ""
    user: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A number that was given to an exchange, a session or a trace of a log."""

    source_id: str
    at: float
    name: str
    value: float
    targets: tuple[str, ...]
    """Ids of exchanges, sessions or traces in the log, the most exact first."""
    comment: str = ""


# Rows of a file, of which the longest line is in memory.

_TOKEN: Final = re.compile(
    rb'"data"\s*:\s*\[|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"?|[\[\]{}]|[^\s,:\[\]{}"]++'
)
"""A bracket, a text, which ends with its line at the latest, or another word of JSON."""
_HEAD: Final = b" \t,[" + BOM_UTF8  # what may stand in a line before a row


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object of a file, by the bytes where it is."""

    path: Path
    begin: int
    end: int

    def read(self) -> Object:
        """Raises: LeftOutError; OSError."""
        with self.path.open("rb") as file:
            file.seek(self.begin)
            data = file.read(self.end - self.begin)
        try:
            found = msgspec.json.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise LeftOutError("not_json") from None
        if not isinstance(found, dict):
            raise LeftOutError("not_an_object")
        return found


def open_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file: JSON objects, one a line, in arrays, or in the `data` of an API's
    replies. What is no object is yielded too, outside of arrays once a line; `Row.read` refuses it.

    An object that is cut off ends where a line begins another one, as far to the right. What stands
    in its line behind a damaged row is lost with it. Raises: OSError, also when the file is not in
    UTF-8.
    """
    if not path.is_file():
        found = "no plain file; unpack it into one" if path.exists() else "not there"
        raise OSError(f"{path} is {found}")
    with path.open("rb") as file:
        begins = file.read(4)
        file.seek(0)
        if b"\0" in begins or begins[:2] in (b"\x1f\x8b", b"PK", BOM_UTF16_LE, BOM_UTF16_BE):
            raise OSError(f"{path} is no JSON in UTF-8; unpack it, or convert it by iconv")
        for begin, end in _spans(file):
            yield Row(path, begin, end)


def _spans(lines: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    """Yield where each row begins and ends. depth: brackets open within a row, or within the part
    of a page of an API that stands before or behind its rows; 0 between rows."""
    at = begin = depth = arrays = 0
    alone = in_page = behind_page = fresh = indented = False
    row_column = 0
    for line in lines:
        head = line[: len(line) - len(line.lstrip(_HEAD))]
        column, last = len(head.translate(None, b"," + BOM_UTF8)), len(line.rstrip())
        begins = line[len(head) : len(head) + 1] == b"{" and column in (0, row_column)
        if depth and fresh and last:  # the second line of a row: is what the row holds indented?
            fresh, indented = False, begins or (line[:1].isspace() and column > row_column)
        if depth and begins and (indented or not alone):
            yield begin, at
            begin, depth, behind_page = at, 0, False
        odd = False
        for token in _TOKEN.finditer(line):
            word, here = token[0], at + token.start()
            if depth == 0:
                if word == b"{" or (word == b"]" and in_page):
                    begin, depth, behind_page = here, 1, word == b"]"
                    in_page = in_page and not behind_page
                    if not behind_page:
                        alone, fresh = token.end() == last, True
                        row_column = column if token.start() == len(head) else 0
                elif word in (b"[", b"]"):
                    arrays += 1 if word == b"[" else -1
                elif word not in (b"}", BOM_UTF8) and (in_page or arrays > 0 or not odd):
                    odd = True
                    yield here, at + token.end()
            elif depth == 1 and word[-1:] == b"[" and len(word) > 1:
                depth, in_page = 0, True
            elif word[-1:] in (b"[", b"{"):
                depth += 1
            elif word in (b"]", b"}"):
                depth -= 1
                if depth == 0:
                    if not behind_page:
                        yield begin, at + token.end()
                    begin = at + token.end()
        at += len(line)
    if depth or in_page or arrays > 0:  # the end of the file is missing
        yield begin, at


# The three logs.


def read_litellm(row: Object) -> Logged | Scored:
    """Read a StandardLoggingPayload, or a row of LiteLLM_SpendLogs. Raises: LeftOutError."""
    if row.get("status", "success") != "success":
        raise LeftOutError("failed")
    if str(row.get("call_type") or "") not in CHAT_CALLS:
        raise LeftOutError("no_chat")
    said = msgspec.json.encode([row.get("messages"), row.get("proxy_server_request")])
    if any(mark in said for mark in LITELLM_MARKS):
        raise LeftOutError("cut_or_redacted")
    asked = _object(row.get("proxy_server_request"))
    parameters = {**asked, **_object(row.get("model_parameters"))}
    messages = _json(row.get("messages")) or asked.get("messages")
    response = _object(row.get("response"))
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    at = _time(row.get("startTime"))
    return Logged(
        source_id=_text(row.get("id")) or _text(row.get("request_id")),
        at=at,
        took_s=_time(row.get("endTime"), at) - at,
        messages=_messages(messages),
        parameters=parameters,
        answer=_answer(_object(choice).get("message")),
        finish_reason=_text(_object(choice).get("finish_reason")) or None,
        session=_text(row.get("session_id")),
        user=_text(row.get("end_user")),
        trace=_text(row.get("trace_id")),
    )


def read_langfuse(row: Object) -> Logged | Scored:
    """Read an observation or a score; keys of the API (camelCase) are those of the export.

    Raises: LeftOutError.
    """
    row = {_CAPITAL.sub("_", key).lower(): value for key, value in row.items()}
    at = _time(row.get("start_time") or row.get("timestamp"))
    if "type" not in row and "value" in row:
        if row.get("data_type") not in (None, "NUMERIC", "BOOLEAN"):
            raise LeftOutError("no_number")
        targets = (row.get("observation_id"), row.get("trace_id"), row.get("session_id"))
        return _scored(row, row.get("name"), at, targets)
    if row.get("type") != GENERATION:
        raise LeftOutError("no_chat")
    if row.get("level") == "ERROR":
        raise LeftOutError("failed")
    asked, answer = _json(row.get("input")), _json(row.get("output"))
    request = asked if isinstance(asked, dict) else {"messages": asked}
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, dict) and not {"role", "content", "tool_calls"} & set(answer):
        answer = row.get("output") if isinstance(row.get("output"), str) else None  # JSON, as asked
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    messages = _list(request.get("messages"))
    # LangChain's handler writes the tools behind the messages.
    tools = [one["content"] for one in messages if _is_tool(one)]
    parameters = {**_object(row.get("model_parameters")), **({"tools": tools} if tools else {})}
    return Logged(
        source_id=_text(row.get("id")),
        at=at,
        took_s=_time(row.get("end_time"), at) - at,
        messages=_messages([one for one in messages if not _is_tool(one)]),
        parameters={**parameters, **request},
        answer=_answer(answer),
        session=_text(row.get("session_id")),
        user=_text(row.get("user_id")),
        trace=_text(row.get("trace_id")),
    )


def read_tensorzero(row: Object) -> Logged | Scored:
    """Read a row of ChatInference, or of the feedback tables. Raises: LeftOutError."""
    source_id = _text(row.get("id"))
    at = _uuid_time(source_id)
    if "target_id" in row:
        return _scored(row, row.get("metric_name"), at, (row.get("target_id"),))
    if "episode_id" not in row or "function_name" not in row:
        raise LeftOutError("no_chat")
    asked = _object(row.get("input"))
    system = asked.get("system")
    if system is not None and not isinstance(system, str):
        raise LeftOutError("templated")  # its arguments are kept, and not the prompt
    messages: list[Object] = [{"role": "system", "content": system}] if system else []
    for one in _list(asked.get("messages")):
        messages += _blocks(_object(one).get("role"), _object(one).get("content"))
    answer = _blocks("assistant", _json(row.get("output")))
    params = _object(_object(row.get("inference_params")).get("chat_completion"))
    legacy = _object(row.get("tool_params"))  # it has the tools of the configuration too
    tools = _list(legacy.get("tools_available")) or _list(row.get("dynamic_tools"))
    if not tools and _list(_object(row.get("allowed_tools")).get("tools")):
        raise LeftOutError("tools_unreadable")
    choice = _json(row.get("tool_choice") or legacy.get("tool_choice"))
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": _text(choice.get("specific"))}}
    if tools:
        functions = [{"type": "function", "function": _function(_object(one))} for one in tools]
        params = {**params, "tools": functions, **({"tool_choice": choice} if choice else {})}
    return Logged(
        source_id=source_id,
        at=at,
        took_s=_number(row.get("processing_time_ms"), 0.0) / 1000,
        messages=_messages(messages),
        parameters=params,
        answer=_answer(answer[0] if len(answer) == 1 else None),
        session=_text(row.get("episode_id")),
        user=_text(_object(row.get("tags")).get("user_id")),
    )


FORMS: Final[Mapping[str, Callable[[Object], Logged | Scored]]] = {
    "litellm": read_litellm,
    "langfuse": read_langfuse,
    "tensorzero": read_tensorzero,
}


def _is_tool(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, dict) and content.get("type") == "function"


def _function(tool: Object) -> Object:
    if not isinstance(tool.get("name"), str):
        raise LeftOutError("tools_unreadable")
    return {
        "name": tool["name"],
        "description": _text(tool.get("description")),
        "parameters": _object(tool.get("parameters")),
    }


def _blocks(role: Any, content: Any) -> list[Object]:
    """TensorZero's content blocks of one message, as messages of chat completions: results of tools
    are messages of their own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    text, calls, results = list[str](), list[Object](), list[Object]()
    for one in map(_object, _list(content)):
        kind = one.get("type")
        if kind == "text" and isinstance(said := one.get("text", one.get("value")), str):
            text.append(said)
        elif kind == "tool_call":
            called = {
                "name": _text(one.get("raw_name")) or _text(one.get("name")),
                "arguments": _text(one.get("raw_arguments")) or _text(one.get("arguments")),
            }
            calls.append({"id": _text(one.get("id")), "type": "function", "function": called})
        elif kind == "tool_result":
            result = _text(one.get("result"))
            results.append(
                {"role": "tool", "tool_call_id": _text(one.get("id")), "content": result}
            )
        elif kind != "thought":
            raise LeftOutError("templated" if kind in ("template", "text") else "not_text")
    message = {"role": role, "content": "\n".join(text) if text else None}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if text or calls else results


def _scored(row: Object, name: Any, at: float, targets: Sequence[Any]) -> Scored:
    value = row.get("value")
    number = float(value) if isinstance(value, bool) else _number(value, math.nan)
    if not math.isfinite(number) or not isinstance(name, str):
        raise LeftOutError("no_number")
    return Scored(
        source_id=_text(row.get("id")),
        at=at,
        name=name,
        value=number,
        targets=tuple(one for one in targets if isinstance(one, str) and one),
        comment=_text(row.get("comment")).replace("\0", "")[: LONGEST["comment"]],
    )


def _messages(found: Any) -> Sequence[Any]:
    known = isinstance(found, list) and all(
        isinstance(one, dict) and one.get("role") in _OPENAI_ROLES and _is_message(one)
        for one in found
    )
    if not known or not found:
        raise LeftOutError("no_messages")
    return found  # type: ignore[no-any-return]


def _is_message(one: Object) -> bool:
    """True when a message says a text, or parts that each have a type, and its calls are a list."""
    content, calls = one.get("content"), one.get("tool_calls")
    return (
        isinstance(content, str | list | None)
        and isinstance(calls, list | None)
        and all(isinstance(call, dict) for call in calls or ())
        and all(
            isinstance(part, dict)
            and isinstance(part.get("type"), str)
            and (part["type"] != "text" or isinstance(part.get("text"), str))
            for part in (content if isinstance(content, list) else ())
        )
    )


def _answer(found: Any) -> Object:
    says = isinstance(found, dict) and (found.get("content") or found.get("tool_calls"))
    if not says or not _is_message(found):
        raise LeftOutError("no_answer")
    return {**found, "role": "assistant"}


def _json(value: Any) -> Any:
    """A member that may be JSON in a text."""
    if isinstance(value, str) and value[:1] in ("{", "[", '"'):
        try:
            return msgspec.json.decode(value)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return value
    return value


def _object(value: Any) -> dict[str, Any]:
    found = _json(value)
    return found if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    found = _json(value)
    return found if isinstance(found, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any, otherwise: float) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if known and math.isfinite(value) else otherwise
    except OverflowError:  # an integer of over 308 digits
        return otherwise


def _time(value: Any, otherwise: float | None = None) -> float:
    """Unix seconds of a number, of seconds or milliseconds, or of an ISO text; without a zone it is
    UTC. Raises: LeftOutError."""
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value.removesuffix(" UTC"))
            value = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            value = None
    found = _number(value, math.nan if otherwise is None else otherwise)
    if found > MILLISECONDS:
        found /= 1000
    if not EARLIEST_AT <= found < time.time() + AHEAD_S:
        raise LeftOutError("no_time")
    return found


def _uuid_time(name: str) -> float:
    """Unix seconds of a UUIDv7. Raises: LeftOutError."""
    digits = name.replace("-", "")
    if len(digits) != 32 or digits[12] != "7":
        raise LeftOutError("no_time")
    try:
        return _time(int(digits[:12], 16) / 1000)
    except ValueError:
        raise LeftOutError("no_time") from None


# What is handed to the bus.


def exchange_of(
    logged: Logged, form: str, *, public_model: str, project: str, prompt_token_ids: Sequence[int]
) -> Exchange:
    """Make the record of a logged request.

    form: of `FORMS`; its part of the id keeps the ids of two logs apart. prompt_token_ids: [P] of
    the prompt as vLLM renders it. Raises: LeftOutError.
    """
    if not logged.source_id:
        raise LeftOutError("no_id")
    body = request_of(logged)
    sampling = {name: value for name, value in body.items() if name in SAMPLED}
    sampling.setdefault("max_tokens", body.get("max_completion_tokens"))
    try:
        request = msgspec.json.encode({"model": public_model, **body})
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise LeftOutError("not_json") from None
    if len(request) > MOST_BYTES:
        raise LeftOutError("too_large")
    user = short_name(logged.user)
    trace = logged.trace.replace("-", "")
    return Exchange(
        exchange_id=imported_id(form, logged.source_id, logged.at),
        surface="chat",
        public_model=public_model,
        adapter=BASE,  # selection takes the champion of the time when it chooses
        arm=IMPORTED,
        propensity=1.0,
        replica="",
        session_key=session_key(
            header=short_name(logged.session) or None,
            user=user,
            opening=opening((one["role"], mark(answer_text(one))) for one in logged.messages)[0],
            project=project,
        ),
        request=request,
        choices=(
            Choice(
                index=0, message=message_json(logged.answer), finish_reason=logged.finish_reason
            ),
        ),
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=msgspec.convert(sampling, Sampling),
        stream=False,
        status=200,
        outcome="ok",
        timings=Timings(started_at=logged.at, total_s=max(0.0, logged.took_s)),
        untrainable_reason=IMPORTED,
        trace_id=trace if _TRACE.fullmatch(trace) else "",
        project=project,
        user=user,
        request_bytes=len(request),
        origin=IMPORTED,
    )


def request_of(logged: Logged) -> dict[str, Any]:
    """Return the body of the chat request, without its model."""
    known = {name: logged.parameters.get(name) for name in PARAMETERS}
    kept = {name: value for name, value in known.items() if _is_usable(name, value)}
    return {"messages": list(logged.messages), **kept}


def _is_usable(name: str, value: Any) -> bool:
    """Tell whether a parameter can be sent. Some logs have "Infinity" or "0.5"; without the
    parameter the prompt is as good, because candidates are sampled anew."""
    if name not in (*SAMPLED, "max_completion_tokens"):
        return value is not None
    try:
        msgspec.convert({name.replace("completion_", ""): value}, Sampling)
    except msgspec.MsgspecError:
        return False
    return value is not None and -LARGEST < value < LARGEST


def within(parameters: Object, room: int) -> Object:
    """Return parameters without a limit of tokens that vLLM would refuse: another model has room
    for more."""
    limits = ("max_tokens", "max_completion_tokens")
    return {k: v for k, v in parameters.items() if k not in limits or _number(v, 0.0) <= room}


def imported_id(form: str, source_id: str, at: float) -> str:
    """Return the id of an imported exchange: the same each time, so importing twice has no effect.

    at: when it began, unix seconds.
    """
    return exchange_id(at, hashlib.sha256(f"{form}\0{source_id}".encode()).digest()[:16])


def feedback_of(
    scored: Scored,
    form: str,
    target: tuple[TargetKind, str],
    *,
    project: str,
    low: float,
    high: float,
) -> Feedback:
    """Make the record of a score.

    target: what it is of, as `Feedback.target` names it. low, high: the values that mean -1 (bad)
    and 1 (good). Raises: LeftOutError when the value is not between them.
    """
    share = (scored.value - low) / (high - low)
    if not 0 <= share <= 1:
        raise LeftOutError("score_out_of_range")
    name = "\0".join((form, scored.source_id, scored.name, *scored.targets))
    kind, target_id = target
    return Feedback(
        feedback_id=ID_PREFIX + hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:32],
        kind="feedback",
        target_kind=kind,
        target=target_id,
        project=project,
        source=form,
        received_at=scored.at,
        score=2 * share - 1,
        label=scored.name[: LONGEST["label"]],
        comment=scored.comment,
    )


class Import:
    """Makes the records of the rows of one log, in the order of their times.

    It remembers the ids of the exchanges that it made, about 200 bytes each, because a score names
    one by an id that has no time.
    """

    def __init__(
        self,
        form: str,
        *,
        public_model: str,
        project: str,
        scores: Mapping[str, tuple[float, float]],
        render: Callable[[dict[str, Any]], tuple[Sequence[int], int] | None],
    ) -> None:
        """scores: name of a score -> the values that mean bad and good; other scores are left out.
        render: returns the token ids of a request's prompt, and how many tokens of an answer this
        vLLM has room for behind it; None: it takes no such request."""
        self._form, self._model = form, public_model
        self._project, self._scores, self._render = project, scores, render
        self._targets: dict[str, tuple[TargetKind, str]] = {}
        self.left_out: Counter[str] = Counter()
        """Reason -> rows."""
        self._sessions: defaultdict[str, set[str]] = defaultdict(set)

    def read(self, paths: Iterable[Path]) -> list[Row]:
        """Return the rows that can be read in the order of their times, exchanges before scores.

        Raises: OSError.
        """
        found: list[tuple[bool, float, Row]] = []
        for row in chain.from_iterable(map(open_rows, paths)):
            try:
                one = self._read(row)
            except LeftOutError as error:
                self.left_out[str(error)] += 1
                continue
            if isinstance(one, Scored):
                if one.name not in self._scores:
                    self.left_out["score_not_asked_for"] += 1
                    continue
            else:
                self._sessions[one.session].add(one.source_id)
            found.append((isinstance(one, Scored), one.at, row))
        found.sort(key=lambda one: one[:2])
        return [row for *_, row in found]

    def _read(self, row: Row) -> Logged | Scored:
        with _any_row():
            return FORMS[self._form](row.read())

    def record(self, row: Row) -> Exchange | Feedback | None:
        """Make the record of a row that `read` returned; None: it is left out."""
        try:
            one = self._read(row)
            return self._exchange(one) if isinstance(one, Logged) else self._feedback(one)
        except LeftOutError as error:
            self.left_out[str(error)] += 1
            return None

    def _exchange(self, logged: Logged) -> Exchange:
        # Gateways draw a name for each request that has none: such a one names no session.
        name = logged.session
        named = len(self._sessions[name]) > 1
        with _any_row():
            request = request_of(logged)
            if has_media(request):
                raise LeftOutError("not_text")
        rendered = self._render(request)
        if rendered is None:
            raise LeftOutError("not_rendered")
        ids, room = rendered
        if not named:
            logged = replace(logged, session="")
        with _any_row():
            made = exchange_of(
                replace(logged, parameters=within(logged.parameters, room)),
                self._form,
                public_model=self._model,
                project=self._project,
                prompt_token_ids=ids,
            )
        here: tuple[TargetKind, str] = ("exchange", made.exchange_id)
        self._targets[logged.source_id] = here
        if name:
            self._targets.setdefault(name, ("session", made.session_key) if named else here)
        if made.trace_id:
            self._targets.setdefault(logged.trace, ("trace", made.trace_id))
        return made

    def _feedback(self, scored: Scored) -> Feedback:
        target = next((self._targets[one] for one in scored.targets if one in self._targets), None)
        if target is None:
            raise LeftOutError("score_of_nothing_imported")
        low, high = self._scores[scored.name]
        return feedback_of(scored, self._form, target, project=self._project, low=low, high=high)
