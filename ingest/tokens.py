"""Check that recorded token ids decode to the text that the user received. Pure.

vLLM has reported ids that do not belong to the text: when a stream met a tool or reasoning parser,
some were missing and some occurred twice. The counts can agree all the same, so the ids are decoded
and compared with the recorded message. Ingest does this work, off the data plane.

**Plain text** (content without tool calls and reasoning) must be exactly what the ids decode to,
except for what vLLM's detokenizer changes: it shows no special tokens (unless the request or a tool
parser wants them shown) and not the token that ended the answer; it cuts a stop string and the rest
of its token; it does not show an incomplete character at the end; the space of the first token may
belong to the prompt; a reasoning parser removes an empty thinking block.

A text that a tool parser kept back (`withheld`) counts as text, without its spaces.

**Parsed messages** (tool calls, reasoning, refusal) consist of pieces of the text. Each piece must
be in the decoded text, in this order: reasoning, content, refusal, the names of the called tools.
Each key, string and whole number of the arguments must be anywhere in it; a parser may rewrite
arguments (spaces, quotes, escapes), so white space is not compared there.

**Not detected**: a wrong id among special tokens that are not shown, in the markup that a parser
removes, or in the spaces and fractions of arguments; ids that decode to the same text. The
learner's drift check is the second line of defence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
import structlog

from ingest.errors import NoTokenizerError
from sidecar.records import Choice, Exchange
from sidecar.replies.parts import WITHHELD

DISAGREES: Final = "ids_do_not_decode"
"""`untrainable_reason` of an exchange whose ids do not belong to its text."""
AGREES: Final = "agrees"
IN_PARTS: Final = "agrees_in_parts"
NOT_CHECKED: Final = "not_checked"
CheckOutcome = Literal["agrees", "agrees_in_parts", "ids_do_not_decode", "not_checked"]
"""Outcomes. not_checked: it has no ids, or is not trained on for another reason."""

CHECKED_SURFACES = frozenset({"chat", "completions"})
CONTEXT = 8
"""Number of prompt ids decoded before an answer, to find the spacing of its first token."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The character that an incomplete character's bytes decode to."""
EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>")
WHITE = re.compile(r"\s+")
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that the check needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text. Raises: OverflowError for a number that cannot be an id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A base model's tokenizer, and its ids that are not ordinary text."""

    decoder: Decoder = field(repr=False)
    added: frozenset[int]
    """Ids added to the learned vocabulary, special or not, with those that end an answer."""
    special: frozenset[int]
    """Ids that are not shown as text."""


def check_exchange(exchange: Exchange, vocabulary: Vocabulary) -> CheckOutcome:
    """Compare each answer's ids with its message. No content from agents or vLLM makes it raise.

    Returns: the worst outcome of its answers.
    """
    if exchange.untrainable_reason is not None or exchange.surface not in CHECKED_SURFACES:
        return NOT_CHECKED
    if not exchange.choices or not all(choice.token_ids for choice in exchange.choices):
        return NOT_CHECKED
    request, prompt = _options(exchange.request), exchange.prompt_token_ids
    outcomes = {check_answer(choice, request, prompt, vocabulary) for choice in exchange.choices}
    if DISAGREES in outcomes:
        return DISAGREES
    return IN_PARTS if IN_PARTS in outcomes else AGREES


def check_answer(
    choice: Choice, request: Mapping[str, Any], prompt: Sequence[int], vocabulary: Vocabulary
) -> CheckOutcome:
    """Compare one answer's ids, at least one, with its message. See `check_exchange`."""
    ids = choice.token_ids
    if (
        choice.finish_reason != "length"
        and ids[-1] in vocabulary.special
        and ids[-2:-1] == ids[-1:]
    ):
        return DISAGREES  # an end token inside the answer would have ended it
    message = _object(choice.message)
    content = message.get("content") or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    calls = message.get("tool_calls") or []
    withheld = message.get(WITHHELD) or ""
    refusal = message.get("refusal") or ""
    if not (isinstance(content, str) and isinstance(reasoning, str) and isinstance(calls, list)):
        return DISAGREES
    texts = _texts(ids, request, prompt[-CONTEXT:], vocabulary)
    try:
        if request.get("echo"):  # the prompt's own text stands before the answer's
            return IN_PARTS if any(text in content for text in texts) else DISAGREES
        if withheld:  # the joined texts of single tokens, which may lack spaces
            whole = WHITE.sub("", content + withheld)
            bare = (WHITE.sub("", text) for text in texts)
            return IN_PARTS if any(_is_text(whole, text, request) for text in bare) else DISAGREES
        if not reasoning and not refusal and not calls:
            return AGREES if any(_is_text(content, text, request) for text in texts) else DISAGREES
        parts = [reasoning.strip(), content.strip(), refusal.strip()]
        return IN_PARTS if any(_holds(text, parts, calls) for text in texts) else DISAGREES
    except OverflowError:
        return DISAGREES


def _texts(
    ids: Sequence[int], request: Mapping[str, Any], prompt: Sequence[int], vocabulary: Vocabulary
) -> Iterator[str]:
    """Yield the texts that vLLM may have shown for these ids, the usual one first."""
    decode = vocabulary.decoder.decode
    stops = _whole_numbers(request.get("stop_token_ids"))
    ends = vocabulary.added.union(stops) if stops else vocabulary.added
    hidden = request.get("skip_special_tokens") is not False
    bodies = [ids, ids[:-1]] if ids[-1] in ends else [ids]
    # Some tool parsers have special tokens shown although the request does not ask for it.
    for skip in (hidden, not hidden):
        for body in bodies:
            yield decode(body, skip_special_tokens=skip)
            before = decode(prompt, skip_special_tokens=skip)
            both = decode([*prompt, *body], skip_special_tokens=skip)
            if before and both.startswith(before):
                yield both[len(before) :]


def _is_text(content: str, decoded: str, request: Mapping[str, Any]) -> bool:
    """Return True when a plain message equals its decoded ids, except for what vLLM leaves out."""
    if decoded == content:
        return True
    if decoded.startswith(content):
        rest = decoded[len(content) :]
        if not rest.strip(BROKEN):
            return True
        stops = _strings(request.get("stop"))
        if request.get("include_stop_str_in_output"):
            return any(content.endswith(stop) for stop in stops)
        return any(rest.startswith(stop) for stop in stops)
    thinking = EMPTY_THINKING.match(decoded)
    return thinking is not None and decoded[thinking.end() :].lstrip() == content.lstrip()


def _holds(decoded: str, parts: Iterable[str], calls: Sequence[Any]) -> bool:
    """Return True when the pieces that a parser made of a text are in the text."""
    place = 0
    functions = [_mapping(_mapping(call).get("function")) for call in calls]
    for piece in (*parts, *(str(function.get("name") or "") for function in functions)):
        at = decoded.find(piece, place)
        if at < 0:
            return False
        place = at + len(piece)
    bare = WHITE.sub("", decoded)
    return all(
        any(WHITE.sub("", form) in bare for form in _forms(leaf))
        for function in functions
        for leaf in _leaves(_arguments(function.get("arguments")))
    )


def _arguments(arguments: Any) -> Any:  # Any: JSON
    """Parse a call's arguments; return the text itself when it is not JSON (it may be cut)."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except NOT_JSON:
        return arguments


def _leaves(value: Any) -> Iterator[str]:  # Any: JSON
    """Yield keys, strings and whole numbers. Booleans and fractions have many notations."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)


def _forms(leaf: str) -> Iterator[str]:
    """Yield the forms in which a model may write a string: plain, in JSON, in Python."""
    yield leaf
    yield json.dumps(leaf, ensure_ascii=False)[1:-1]
    yield json.dumps(leaf)[1:-1]
    yield repr(leaf)[1:-1]


def _strings(value: object) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [one for one in listed if isinstance(one, str) and one]


def _whole_numbers(value: object) -> list[int]:
    return [one for one in value if isinstance(one, int)] if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


class _Options(msgspec.Struct):
    """The members of a request that say how ids become text. The messages are not read."""

    echo: Any = None  # Any: what the client wrote, as below
    stop_token_ids: Any = None
    skip_special_tokens: Any = None
    stop: Any = None
    include_stop_str_in_output: Any = None


_decode_options = msgspec.json.Decoder(_Options).decode


def _options(request: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.structs.asdict(_decode_options(request))
    except NOT_JSON:
        return {}


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        return _mapping(msgspec.json.decode(data))
    except NOT_JSON:
        return {}


# The base model's tokenizer: find it, load it, and check exchanges with it.

FILE = "tokenizer.json"
FLAG = "token_check"
"""Row of the `flag` table that shows `TokenCheck.state` to other processes."""
ON = "on"
OFF = "off"
SEARCH_S = 60.0
"""Interval of the search for a missing file: the learner downloads the base model at its first
run."""

log = structlog.get_logger()


class TokenCheck:
    """Checks exchanges once there is a tokenizer. For one thread."""

    def __init__(self, base_model_path: str) -> None:
        self._base_model_path = base_model_path
        self._vocabulary: Vocabulary | None = None
        self._search_at = 0.0
        self.state = ""
        """Either "on" or "off: " with what to do; empty before the first search."""

    def poll(self, now: float) -> bool:
        """Search for the tokenizer if there is none yet. Returns: True when `state` changed."""
        if self._vocabulary is not None or now < self._search_at:
            return False
        self._search_at = now + SEARCH_S
        before = self.state
        try:
            self._vocabulary = load_vocabulary(self._base_model_path)
            self.state = ON
        except NoTokenizerError as error:
            self.state = f"{OFF}: {error}"
        if self.state == before:
            return False
        if self._vocabulary is not None:
            log.info("token_check_on", base_model=self._base_model_path)
        else:
            log.warning("token_check_off", why=self.state)
        return True

    def __call__(self, exchange: Exchange) -> str:
        """Check an exchange. Returns: an outcome of `ingest.tokens`, or "off"."""
        return OFF if self._vocabulary is None else check_exchange(exchange, self._vocabulary)

    def answer(self, choice: Choice, request: Mapping[str, Any], prompt: Sequence[int]) -> str:
        """Check one answer with token ids. prompt: the prompt's ids. Returns: as `__call__`."""
        if self._vocabulary is None:
            return OFF
        return check_answer(choice, request, prompt, self._vocabulary)


def load_vocabulary(base_model_path: str) -> Vocabulary:
    """Load the tokenizer of the base model.

    Raises: NoTokenizerError, whose message says what to do.
    """
    from tokenizers import Tokenizer

    path = find_tokenizer(base_model_path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower class
        raise NoTokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    return Vocabulary(
        decoder=tokenizer,
        added=frozenset(added),
        special=frozenset(number for number, token in added.items() if token.special),
    )


def find_tokenizer(base_model_path: str) -> Path:
    """Return the path of the tokenizer's file. Raises: NoTokenizerError."""
    if not base_model_path:
        raise NoTokenizerError(
            "serving.base_model_path is empty; name the weights that vLLM serves"
        )
    folder = Path(base_model_path)
    if folder.is_dir():
        if (folder / FILE).is_file():
            return folder / FILE
        raise NoTokenizerError(
            f"{folder} has no {FILE}; put the one that vLLM uses beside the weights"
        )
    return _in_hub_cache(base_model_path)


def _in_hub_cache(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, FILE)
    except HFValidationError as error:
        raise NoTokenizerError(
            f"serving.base_model_path {name} is neither a folder nor a Hugging Face Hub name"
        ) from error
    if not isinstance(found, str):
        raise NoTokenizerError(
            f"{FILE} of {name} is not in this machine's hub cache; run `hf download {name} {FILE}`"
        )
    return Path(found)
