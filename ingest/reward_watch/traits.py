"""Traits of an answer without a judge: refusals, loops, misfit tool calls; their sums.

A refusal is told by English phrases at the beginning of a sentence, in the first sentences of a
short answer. A clarifying question is told by its form in every language (the answer is nothing
but questions), and by English phrases where a lead-in stands before it. Text in quotes, in code
and in Markdown's quotation is nobody's own, and does not count. In other languages refusals are not
seen. Precision and recall on labelled answers: docs/reward-watch.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import msgspec
import re2

from sidecar.replies.parts import answer_text

# Check the tool calls of an answer against the tools that its request offers. Pure.

Fault = Literal["unknown_tool", "not_json", "against_schema", "unreadable"]
MOST_CALLS = 32
"""Calls of an answer that are looked at."""
MOST_ARGUMENTS = 65_536
"""Arguments of more characters are not looked at."""
MOST_VALUES = 2_000
"""Values of a call's arguments that are compared with the schema."""
DEEPEST = 16
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int, float),
    "number": (int, float),
}
LEAKED = ("<tool_call>", "<function=", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call")
"""Marks of a call that a model wrote and vLLM's tool parser did not read."""
ENDS = 2_000
"""Characters at each end of an answer in which the marks are looked for."""


def fault_of_calls(message: Mapping[str, Any], tools: object) -> Fault | None:
    """Return what is wrong with an answer's tool calls; None: nothing, or it has none.

    message: the assistant message. tools: `tools` of the request, as the client sent it.
    """
    calls = message.get("tool_calls")
    if not calls:
        offered = isinstance(tools, list) and bool(tools)
        return "not_json" if offered and leaks(answer_text(message)) else None
    if not isinstance(calls, list):
        return "unreadable"
    schemas = _schemas(tools)
    faults = (_fault(call, schemas) for call in calls[:MOST_CALLS])
    return next((fault for fault in faults if fault is not None), None)


def leaks(content: str) -> bool:
    """Return True when a text holds a tool call that the server did not read as one."""
    seen = content if len(content) <= 2 * ENDS else content[:ENDS] + content[-ENDS:]
    return any(mark in seen for mark in LEAKED)


def _schemas(tools: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters")
    return found


def _fault(call: object, schemas: Mapping[str, object]) -> Fault | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "unreadable"
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or name not in schemas:
        return "unknown_tool"
    if arguments in (None, ""):
        value: object = {}
    elif isinstance(arguments, str):
        if len(arguments) > MOST_ARGUMENTS:
            return None
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return "not_json"
    else:
        value = arguments
    if not isinstance(value, dict):
        return "not_json"
    return None if _Check().fits(value, schemas[name], 0) else "against_schema"


class _Check:
    def __init__(self) -> None:
        self._left = MOST_VALUES

    def fits(self, value: object, schema: object, depth: int) -> bool:
        self._left -= 1
        if not isinstance(schema, dict) or depth > DEEPEST or self._left < 0:
            return True
        if not _is_of(value, schema.get("type")):
            return False
        options = schema.get("enum")
        if isinstance(options, list) and not any(_equal(value, one) for one in options):
            return False
        if "const" in schema and not _equal(value, schema["const"]):
            return False
        if isinstance(value, dict):
            return self._object(value, schema, depth)
        if isinstance(value, list):
            some = value[: max(0, self._left)]
            return all(self.fits(one, schema.get("items"), depth + 1) for one in some)
        return True

    def _object(self, value: dict[str, Any], schema: dict[str, Any], depth: int) -> bool:
        known = schema.get("properties")
        known = known if isinstance(known, dict) else {}
        required = schema.get("required")
        if isinstance(required, list) and any(
            isinstance(name, str) and name not in value for name in required
        ):
            return False
        patterns = "patternProperties" in schema
        if schema.get("additionalProperties") is False and not patterns and value.keys() - known:
            return False
        return all(self.fits(one, known.get(name), depth + 1) for name, one in list(value.items()))


def _equal(a: object, b: object, depth: int = 0) -> bool:
    """Compare as JSON Schema does: 1 and 1.0 are equal, 1 and true are not.

    Source: JSON Schema 2020-12 core, 4.2.2 (instance equality).
    """
    if depth > DEEPEST:
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(
            _equal(one, other, depth + 1) for one, other in zip(a, b, strict=True)
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(
            _equal(one, b[name], depth + 1) for name, one in a.items()
        )
    return a == b


def _is_of(value: object, kind: object) -> bool:
    if isinstance(kind, list):  # of names: a list in it says nothing
        return any(isinstance(one, list) or _is_of(value, one) for one in kind)
    types = _TYPES.get(kind) if isinstance(kind, str) else None
    if types is None:
        return True
    if isinstance(value, bool) and bool not in types:
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, types)


# How much of an answer's end is said again and again. Pure.

TAIL = 2_000
"""Characters at the end that are looked at: a model that falls into a loop does not leave it."""
SHORTEST = 400
"""Shorter answers have no loop that could be told from a list, in characters."""
SHINGLE = 16
"""Characters of one run; no words are needed, so it holds for languages without spaces."""
LOOPS = 0.6
"""Share of repeated runs from which on an answer counts as a loop. Tables, lists, code, SQL and
poems with a refrain have at most 0.52, loops at least 0.67: the texts of
tests/ingest/reward_watch/test_traits.py."""


def repeated_share(text: str) -> float:
    """Return the share of the runs of 16 characters in the last 2,000 that occurred before, 0..1.

    0 for a text under 400 characters.
    """
    tail = text[-TAIL:]
    if len(tail) < SHORTEST:
        return 0.0
    runs = len(tail) - SHINGLE + 1
    return 1.0 - len({tail[at : at + SHINGLE] for at in range(runs)}) / runs


HEAD = 2_000
"""Characters of an answer that are looked at; longer answers are neither."""
REFUSAL_LENGTH = 1_200
"""A longer answer has more to say than that it declines, in characters."""
OPENING = 3
"""Sentences of an answer among which a refusal begins."""
LEAD_IN = 240
"""Characters of an answer that may stand beside its questions."""
PLEA_LENGTH = 600
"""A longer answer that asks for something has an answer in it as well, in characters."""

_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_QUOTED = re.compile(r'"[^"\n]{0,400}"|«[^»\n]{0,400}»|„[^“\n]{0,400}“')
_MARKS = re.compile(r"^[\s*_#>\-•\d.)(]*", re.MULTILINE)
_END = re.compile(r"(?<=[.!?。！？؟])[\s\"')\]*_]+|(?<=[。！？])|\n+")
_STRAIGHT = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"'})

_CANNOT = (
    r"(?:can(?:no|')t|can not|could(?:n't| not)|won't|will not|am (?:unable|not able) to"
    r"|'m (?:unable|not able|not allowed|not permitted) to|am not (?:allowed|permitted) to"
    r"|won't be able to|will not be able to|am unwilling to|'m not going to|am not going to"
    r"|do(?:n't| not) feel comfortable|'m not comfortable|am not comfortable"
    r"|must (?:respectfully |politely )?(?:decline|refuse)|have to (?:decline|refuse)"
    r"|need to decline|(?:respectfully |politely )?decline|refuse to)"
)
_DEED = (
    r"(?:\s+(?:be able to|directly|really|actually|personally|in good conscience|just|simply|to))*"
    r"\s+(?:help|assist|aid|provide|providing|do|share|sharing|discuss|comply|fulfil|fulfill"
    r"|answer|create|creating|write|writing|generate|give|support|engage|continue|offer|complete"
    r"|participate|produce|advise|recommend any|recommend that|carry out|perform|process|handle"
    r"|respond|proceed|disclose|reveal|express|explain|show|make|tell you|translate"
    r"|summari[sz]e|talk|say"
    r"|issue|cancel|change|send|speak|go into|work on|take part|be part|accommodate|let you"
    r"|this|that|your|the request|to|with)\b"
)
_SORRY = (
    r"(?:(?:unfortunately|regrettably|sadly|sorry|apologies|no|thanks|thank you|hello|hi)[,.:;!]?"
    r"\s+(?:but\s+)?)?"
    r"(?:(?:i'm|i am|we're|we are)\s+(?:\w+\s+)?(?:sorry|afraid)(?:\s+that)?[,.:;]?\s+(?:but\s+)?"
    r"(?:about that[,.]?\s+(?:but\s+)?)?"
    r"|(?:i|we)\s+apologi[sz]e(?:\s+for[^,.]{0,60})?[,.:;]?\s+(?:but\s+)?"
    r"|my apologies[,.:;]?\s+(?:but\s+)?"
    r"|(?:i|we) (?:understand|appreciate|know)[^.!?]{0,120}?,?\s+but\s+"
    r"|as an? (?:ai|language|assistant|artificial)[^,.]{0,60}[,.]?\s+"
    r"|unfortunately[,]?\s+)*"
)
_REFUSALS = (
    (rf"^{_SORRY}(?:i|we)\s*{_CANNOT}(?:{_DEED}|\s*[.!]?\s*$)"),
    (
        rf"^{_SORRY}(?:i|we)\s*(?:must (?:respectfully |politely )?|have to |need to )?"
        r"(?:respectfully |politely )?(?:decline|refuse)\b"
    ),
    (rf"^{_SORRY}i(?: am|'m)?\s*(?:do(?:n't| not) feel|not) comfortable\s+(?:with|\w+ing)\b"),
    (
        rf"^{_SORRY}(?:that|this|it)(?:'s| is)(?: not|n't)? (?:something|a request|a topic|a task)?"
        r"\s*(?:that )?i(?:'m| am)?\s*(?:can(?:no|')t|can not|can|won't|not able to|unable to)"
        r"\s+(?:help|assist|do|provide|discuss|support|share|comply)"
    ),
    (
        rf"^{_SORRY}i(?:'d| would) (?:rather|prefer) not(?: to)?\s+"
        r"(?:help|assist|do|provide|discuss|answer|say|share|write|go)"
    ),
    (rf"^{_SORRY}i do(?:n't| not) (?:provide|offer|discuss|engage|share|give)\b"),
    (rf"^{_SORRY}(?:i'm|i am) (?:only able|here only|just here|designed only) to\b"),
    (
        rf"^{_SORRY}(?:your|this|that|the) request (?:violates|goes against|is against"
        r"|can(?:no|')t be|falls outside|is outside)\b"
    ),
    (r"^(?:this|that) (?:goes|is) against (?:my|our) (?:guidelines|policy|policies|rules)"),
)
_IDIOMS = re.compile(
    r"\b(?:can(?:no|')t|can not|could(?:n't| not))\s+"
    r"(?:wait|stress|help but|thank|recommend (?:it|this|that|them)|agree more|overstate"
    r"|emphasi[sz]e"
    r"|say (?:for sure|enough|no)|make any|imagine|believe|think of"
    r"|tell (?:the|which|whether|if|from)"
    r"|see|find|give you (?:an? )?exact)"
)

_OFFER = re.compile(
    r"^(?:(?:so|and|or|also|now)[, ]+)?(?:"
    r"(?:would|do) you (?:like|want)(?: me)? to (?:know|see|hear|learn|try|continue|go|proceed"
    r"|add|me)?"
    r"|would you like (?:me|help|more|another|an|a|some|any|further|details)"
    r"|do you (?:want|need) (?:me|help|more|another|any|further|anything)"
    r"|(?:is there|was there|do you have) (?:anything|something|any (?:other|more|further)|another)"
    r"|(?:shall|should|can|may|could|how (?:else )?(?:can|may)) i\b"
    r"|what else (?:can|may|could)"
    r"|any(?:thing)? (?:else|other|more|further|questions)"
    r"|(?:does|did|do) (?:that|this|it|these|those) (?:help|make|answer|work|look"
    r"|sound|clarif|clear)"
    r"|(?:is|was) (?:that|this|it) (?:what|ok|okay|clear|helpful|all|enough|right|correct)"
    r"|(?:how|what) (?:does|do|about) (?:that|this|it|you)\b"
    r"|(?:right|ok|okay|isn't it|don't you think|make sense|want me|need)\b)"
)
_PLEA = (
    r"^(?:(?:sure|certainly|of course|absolutely|happy to help|thanks|thank you|ok|okay|sorry|first"
    r"|before (?:i|we)[^,.?]{0,60}|to (?:help|do|get|give|answer|proceed|continue|make)[^,.?]{0,80}"
    r"|so (?:that )?i can[^,.?]{0,60})[,.!:;]?\s+(?:and\s+|but\s+)?)*"
    r"(?:"
    r"(?:could|can|would|will) you (?:please |kindly |first |also |just )?"
    r"(?:clarify|specify|provide"
    r"|share|tell|confirm|give|elaborate|explain what|explain which|let me know|send|say"
    r"|paste|be more"
    r"|describe|rephrase|double-check|upload|attach|point me)"
    r"|please (?:clarify|specify|provide|share|tell me|confirm|give me|elaborate"
    r"|let me know (?:which|what|where|when|how|whether|if|the|your)|send (?:me )?(?:the|your)"
    r"|describe|paste|upload|attach)"
    r"|i(?:'d| would)? (?:just )?need (?:to know|more|a (?:bit|little) more|some|a few|you to"
    r"|your|the"
    r"|additional|further)"
    r"|(?:which|what|who|whose|where|when|how (?:many|much|long|often|big|old|far))\b[^?]*\?"
    r"|(?:are|did|do|were|is|was|have|will) (?:you|it|this|that|these|the|your|there)\b[^?]*\?"
    r"|can you be more|what (?:exactly|do you mean|kind|type|specific)"
    r")"
)
_LEADS = re.compile(
    r"^(?:sure|certainly|of course|absolutely|great|happy|glad|i'd|i would|i'll|i will|i can"
    r"|i could"
    r"|i want|i need|i'm (?:happy|glad|not sure|sorry|unsure)|i am (?:happy|not sure|sorry|unsure)"
    r"|thanks|thank you|ok|okay|hello|hi|to (?:help|do|get|give|answer|proceed|continue|make|book"
    r"|find|check|process)|before|sorry|let me|let's|got it|no problem|it (?:looks|seems|sounds)"
    r"|there (?:are|is|seem)|your (?:question|request|message)|a few|just|one (?:more )?(?:thing"
    r"|question)|understood|it depends|that depends|i see|in order)\b"
)
_ENOUGH = rf"^{_SORRY}(?:i|we)\s*{_CANNOT}{_DEED}\s+enough"
"""`I cannot help enough`: no refusal."""
_PROGRAM_BYTES = 8 * 2**20
"""Memory of one compiled pattern; RE2's own default."""
_QUESTION = ("?", "？", "؟", "\u037e")


def is_refusal(text: str) -> bool:
    """Return True when an answer declines what it was asked, by English phrases."""
    if not text or len(text) > REFUSAL_LENGTH:
        return False
    for sentence in _sentences(_own_words(text))[:OPENING]:
        low = sentence.lower()
        if _IDIOMS.search(low) or _linear(_ENOUGH).match(low):
            continue
        if any(_linear(pattern).match(low) for pattern in _REFUSALS):
            return True
    return False


def is_clarifying(text: str) -> bool:
    """Return True when an answer asks the user for something instead of answering.

    An offer to do more (`Would you like ...?`) is no such question.
    """
    if not text or len(text) > HEAD:
        return False
    own = _own_words(text)
    sentences = _sentences(own)
    asked, offers, said = [], [], []
    for sentence in sentences:
        low = sentence.lower()
        if _OFFER.match(low):
            offers.append(low)
        elif low.endswith(_QUESTION) or _asks(low):
            asked.append(low)
        else:
            said.append(low)
    if not asked or not sentences or is_refusal(text):
        return False
    if not said and not offers and sentences[-1].endswith(_QUESTION):
        return True
    if sum(map(len, said)) > LEAD_IN or len(own) > PLEA_LENGTH:
        return False
    if not any(_linear(_PLEA).match(low) for low in asked):
        return False
    return all(_LEADS.match(low) for low in said)


@lru_cache(maxsize=32)
def _linear(pattern: str) -> Any:  # Any: a pattern of RE2
    """Compile for RE2, whose time is linear in the text: Python's own matcher tries each way to
    divide a text among repeated phrases, 2^20 of them for `as an ai ` written 20 times."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _PROGRAM_BYTES
    return re2.compile(pattern, options)


def _asks(low: str) -> bool:
    return bool(_linear(_PLEA).match(low)) and not low.startswith(
        ("are ", "is ", "what ", "which ")
    )


def _own_words(text: str) -> str:
    straight = text[:HEAD].translate(_STRAIGHT)
    without = _QUOTED.sub(" x ", _QUOTED_LINE.sub("", _CODE.sub(" x ", straight)))
    return _MARKS.sub("", without.replace("**", "")).strip()


def _sentences(text: str) -> list[str]:
    return [part.strip(" \t*_\"'") for part in _END.split(text) if part.strip(" \t*_\"'.")]


# What one answer is, by rules that ask no judge: refused, cut, in a loop, and so on. Pure.

Kind = Literal["refusal", "clarifying", "invalid_call", "repetition", "empty", "cut"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits of one answer, each by the rule of its name in docs/reward-watch.md."""

    refusal: bool = False
    clarifying: bool = False
    """It asks the user for something instead of answering."""
    invalid_call: bool = False
    """It calls a tool that is not offered, or with arguments that do not fit."""
    repetition: bool = False
    """It ends in a loop."""
    empty: bool = False
    """It has neither content nor tool calls."""
    cut: bool = False
    """The token limit ended it."""


def traits_of(message: bytes, *, finish_reason: str | None, tools: object) -> Traits:
    """Find the traits of an answer.

    message: the assistant message as JSON. tools: `tools` of its request; any JSON.
    Raises: ValueError when the message is no JSON object.
    """
    try:
        parsed = msgspec.json.decode(message, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the message is no JSON object: {error}") from error
    text = answer_text(parsed)
    calls = bool(parsed.get("tool_calls"))
    own = text.strip() if len(text) <= HEAD else text
    return Traits(
        refusal=not calls and (bool(parsed.get("refusal")) or is_refusal(own)),
        clarifying=not calls and is_clarifying(own),
        invalid_call=fault_of_calls(parsed, tools) is not None,
        repetition=repeated_share(text[-TAIL:]) >= LOOPS,
        empty=not calls and not text.strip(),
        cut=finish_reason == "length",
    )


def needs_tools(message: bytes) -> bool:
    """Return True when the tools of its request may tell something of an answer."""
    return (
        b"tool_call" in message
        or b"<function=" in message
        or b"<|python_tag|>" in message
        or b"[TOOL_CALLS]" in message
    )


# What is known of one adapter's answers: sums without content, one row for each adapter.


class RateOf(msgspec.Struct, frozen=True, kw_only=True):
    """A share of answers."""

    n: int
    """Answers."""
    hits: int
    weight: float
    """Independent answers that would tell as much, 0..n."""
    sessions: int = 0
    """Sessions that the answers are of: the sample size."""

    @property
    def share(self) -> float:
        return self.hits / self.n if self.n else 0.0


class MeanOf(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over answers with its standard error."""

    n: int
    mean: float
    error: float
    sessions: int = 0
    """As in `RateOf`."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's answers, of its newest window of served answers and of scored groups."""

    answers: int = 0
    """Served answers in the window."""
    sessions: int = 0
    """Sessions that they are of."""
    newest: int = 0
    """`exchange.seq` of the newest one."""
    rates: dict[Kind, RateOf] = {}
    log_tokens: MeanOf | None = None
    """Mean of log(1 + tokens) of the served answers."""
    groups: int = 0
    """Scored groups whose answers differ in length and in score."""
    newest_group: int = 0
    """`answer_group.seq` of the newest scored group that was looked at."""
    correlation: float | None = None
    """Correlation of reward and log length within groups."""
    correlation_error: float = 0.0
    signals: RateOf | None = None
    """Answers that the user corrected, asked again or asked anew."""
    feedback: MeanOf | None = None
    """Mean score of the feedback on these answers, -1..1."""


def write_body(profile: Profile) -> str:
    return msgspec.json.encode(profile).decode()
