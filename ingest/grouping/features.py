"""What is known of a step before its group: turns, masks, held-out sessions. Pure.

Each feature is cheap: it is in the exchange, or was stored with it, or is told by the groups of the
same opening (`opening_key`), whose answers were sampled and scored already.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import msgspec

from ingest.grouping.request import (
    HARD_MASKS,
    Grammar,
    LogprobsMode,
    has_tools,
    masking_fields,
    why_masked,
)
from sidecar.records import Exchange
from sidecar.routing.opening import without_notes

SHOWN: Final = 500
"""Characters of a text that a key reads at each end: a prompt of 100,000 tokens costs what one of
1,000 costs: 0.3 ms on a busy machine. Two long prompts that differ
only in between count as near-duplicates."""
LAST: Final = 2
"""Messages at the end of a conversation that tell near-duplicates: the step, and what it is
about. Earlier ones differ by session, which has a cap of its own."""
KEY_BYTES: Final = 16
SURE_OF: Final = math.log(2)
"""A token of at most even odds, in nats: where an answer could have gone another way."""
_VARIABLE: Final = re.compile(r"[0-9a-f]{8,}|[\d.,:/-]*\d[\d.,:/-]*")
"""Ids, numbers, dates and times: what a template fills in."""
_SPACE: Final = re.compile(r"\W+")
DISCONTENT: Final = frozenset({"correction", "regeneration", "abandonment"})
"""Kinds of signals that say that a better answer was wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The features of one step."""

    surprisal: float = 0.0
    """Mean over the served answer's tokens of -log p, in nats: an estimate of the entropy of the
    policy there from one answer. 0 where log-probabilities were not recorded."""
    forks: float = 0.0
    """Share of its tokens that had at most even odds, 0..1."""
    recorded: bool = False
    """Log-probabilities were recorded."""
    cut: bool = False
    """The token limit cut the served answer: so it mostly does the others."""
    tokens: int = 0
    """Length of the served answer."""
    tool_choice: bool = False
    """The first choice of a tool: tools are shown, and the user spoke last."""
    final_answer: bool = False
    """The answer calls no tool."""
    corrected: bool = False
    """The user asked again, corrected it or left (`ingest.feedback.signals`)."""
    negative: bool = False
    """Somebody gave it, or its whole session, negative feedback."""
    earlier: int = 0
    """Groups of the same opening whose spread is known, of the newest."""
    earlier_spread: int = 0
    """Those of them with a spread."""

    def shown(self) -> dict[str, Any]:  # Any: JSON
        """Return what is stored with a group: numbers to four digits."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def features_of(
    exchange: Exchange,
    request: Mapping[str, Any],
    *,
    signals: Collection[str] = (),
    negative: bool = False,
    earlier: tuple[int, int] = (0, 0),
) -> Features:
    """Return the features of an exchange.

    signals: kinds of signals about its answer. earlier: groups of its opening whose spread is
        known, and how many have one.
    """
    choice = exchange.choices[0] if exchange.choices else None
    logprobs = choice.logprobs if choice is not None else ()
    messages = request.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    role = last.get("role") if isinstance(last, Mapping) else None
    surprisal, forks = surprisals(logprobs)
    return Features(
        surprisal=surprisal,
        forks=forks,
        recorded=bool(logprobs),
        cut=choice is not None and choice.finish_reason == "length",
        tokens=len(choice.token_ids) if choice is not None else 0,
        tool_choice=has_tools(request) and role == "user",
        final_answer=choice is not None and choice.finish_reason != "tool_calls",
        corrected=not DISCONTENT.isdisjoint(signals),
        negative=negative,
        earlier=earlier[0],
        earlier_spread=earlier[1],
    )


def surprisals(logprobs: Sequence[float]) -> tuple[float, float]:
    """Return `surprisal` and `forks` of recorded log-probabilities, in nats."""
    lost = [-one for one in logprobs if math.isfinite(one)]
    if not lost:
        return 0.0, 0.0
    return sum(lost) / len(lost), sum(one >= SURE_OF for one in lost) / len(lost)


def opening_key(project: str, request: Mapping[str, Any]) -> str:
    """Return a digest that steps of one program share: its system prompt without what changes, and
    the names of its tools."""
    messages = request.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    system = first if isinstance(first, Mapping) and first.get("role") != "user" else None
    tools = request.get("tools")
    names = [
        str(tool["function"].get("name"))
        for tool in (tools if isinstance(tools, list) else ())
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)
    ]
    return _digest(project, _plain(system), *sorted(names))


def near_key(project: str, request: Mapping[str, Any]) -> str:
    """Return a digest that near-identical prompts share: the last two messages without numbers,
    ids, case, punctuation and what agents write anew for each request, and the roles.

    A digest of normalised text finds what a template filled with other numbers, at one pass over at
    most 2,000 characters and one indexed look-up. Locality-sensitive hashes (MinHash, SimHash) find
    paraphrases too, which are other prompts to learn from, and need several look-ups each.
    """
    messages = request.get("messages")
    last = messages[-LAST:] if isinstance(messages, list) else []
    return _digest(project, *map(_plain, last))


def _plain(message: Any) -> str:  # Any: JSON
    if not isinstance(message, Mapping):
        return ""
    content = message.get("content")
    if not isinstance(content, str):
        content = _text_of(content)
    content = without_notes(content)
    if len(content) > 2 * SHOWN:
        content = f"{content[:SHOWN]} {content[-SHOWN:]}"
    text = _VARIABLE.sub("0", content.lower())
    return f"{message.get('role')} {_SPACE.sub(' ', text).strip()}"


def _text_of(content: Any) -> str:  # Any: JSON
    """Return the text of content parts, about as much of it as is read."""
    parts: list[str] = []
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else None
        parts.append(text if isinstance(text, str) else "")
    return " ".join(parts)


def _digest(*texts: str) -> str:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def dump_choice(features: Features | None, reason: str) -> str:
    """Serialise why a step was chosen, for `answer_group.chosen_because`.

    features: None: they were not asked.
    """
    shown = None if features is None else features.shown()
    return json.dumps({"reason": reason, "features": shown}, separators=(",", ":"))


def load_choice(stored: str | None) -> dict[str, Any] | None:  # Any: JSON
    """Inverse of `dump_choice`; None where nothing is stored. Raises: msgspec.MsgspecError."""
    return None if stored is None else msgspec.json.decode(stored, type=dict[str, Any])


# Turns of users: a request and the client's retries of it count once. Pure.

Turn = tuple[str, str]
"""(project, turn id)."""


def turn_of(exchange: Exchange) -> Turn | None:
    """Return the turn that an exchange shares with the client's retries; None when it has none."""
    return (exchange.project, exchange.turn_id) if exchange.turn_id else None


def last_of_each_turn(fit: Sequence[Exchange]) -> dict[Turn, str]:
    """Map each turn to the id of its exchange that began last."""
    last: dict[Turn, Exchange] = {}
    for exchange in fit:
        turn = turn_of(exchange)
        if turn is not None and (turn not in last or _begun(exchange) > _begun(last[turn])):
            last[turn] = exchange
    return {turn: exchange.exchange_id for turn, exchange in last.items()}


def _begun(exchange: Exchange) -> tuple[float, str]:
    return exchange.timings.started_at, exchange.exchange_id


def counts_elsewhere(
    exchange: Exchange, counting: Mapping[Turn, str], decided: frozenset[Turn]
) -> bool:
    """Return True when another exchange of the same turn counts."""
    turn = turn_of(exchange)
    return turn is not None and (turn in decided or counting[turn] != exchange.exchange_id)


# Whether an exchange whose tokens were masked by the server can be learned from. Pure.

StructuredOutput = Literal["free_tokens", "off"]


def mask_of(request: Mapping[str, Any], grammar: Grammar | None) -> str | None:
    """Return what forbids tokens, or may: a field of the request, or the server's own grammar.

    Returns: `masked_by_<field>`, `masked_by_server`, `masking_unknown`; None: nothing does.
    """
    field = next(masking_fields(request), None)
    return why_masked(request, grammar) if field is None else f"masked_by_{field}"


def why_refused(
    request: Mapping[str, Any],
    grammar: Grammar | None,
    *,
    mode: LogprobsMode,
    structured: StructuredOutput,
) -> str | None:
    """Return the mask because of which nothing can be learned from an exchange; None when there is
    none, or it leaves tokens to learn from."""
    mask = mask_of(request, grammar)
    if mask is None or structured == "off" or mode != "processed_logprobs":
        return mask
    soft = next((name for name in masking_fields(request) if name not in HARD_MASKS), None)
    return None if soft is None else f"masked_by_{soft}"


# Choose held-out sessions: never trained on, so they can show whether training helped. Pure.


def is_held_out(session_id: str, rate: float) -> bool:
    """Return True for a held-out session, decided by a hash of its id.

    All turns of a session, in every process and at any time, get the same result.
    rate: share of sessions held out, 0..1. A higher rate only adds sessions.
    """
    return share_of(f"held_out\x00{session_id}") < rate


def share_of(text: str) -> float:
    """Hash a text to a number in 0..1, evenly distributed over texts."""
    return (
        int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        / 2**64
    )
