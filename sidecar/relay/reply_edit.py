"""Take back out of a reply what the sidecar asked for on its own account. Pure.

vLLM writes the keys `prompt_token_ids`, `token_ids` and `logprobs` whether they were asked for or
not, and `null` where they were not. So the reply that the client would have had is this one with
those values replaced by `null`, and every other byte as it is.
Streams have one more trace: when token ids are asked for, vLLM sends an event for a token that a
parser is still holding back (`"delta":{}`), which it would not have sent otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sidecar.relay.json_spans import Member, elements, members

NULL = b"null"


@dataclass(frozen=True, slots=True)
class Strip:
    """What the client did not ask for."""

    token_ids: bool
    logprobs: bool

    @property
    def nothing(self) -> bool:
        return not (self.token_ids or self.logprobs)

    @property
    def everything(self) -> bool:
        return self.token_ids and self.logprobs


STRIP_NOTHING = Strip(token_ids=False, logprobs=False)


def strip_reply(body: bytes, strip: Strip) -> bytes:
    """A whole reply, without what `strip` names. Anything that is not a chat reply comes back."""
    try:
        cuts, _ = _cuts(body, 0, len(body), strip)
    except (msgspec.MsgspecError, ValueError, IndexError):
        return body
    return _replace(body, cuts)


def strip_event(event: bytes, strip: Strip) -> bytes:
    """One server-sent event, its blank line included; b"" when it exists only because of us.

    Comments, `[DONE]`, and events of more than one data line come back as they are: vLLM writes
    its replies on one line.
    """
    if not event.startswith(b"data:"):
        return event
    end = event.find(b"\n")
    line_end = len(event) if end < 0 else end
    start = event.find(b"{", 5, line_end)
    if start < 0 or b"\ndata:" in event:
        return event
    try:
        cuts, only_ours = _cuts(event, start, line_end, strip)
    except (msgspec.MsgspecError, ValueError, IndexError):
        return event
    return b"" if only_ours else _replace(event, cuts)


def _cuts(data: bytes, start: int, end: int, strip: Strip) -> tuple[list[tuple[int, int]], bool]:
    """The spans to make null, in order; and whether this is an event of held-back tokens."""
    cuts: list[tuple[int, int]] = []
    only_ours = False
    for member in members(data, start, end):
        if member.key == "prompt_token_ids" and strip.token_ids:
            cuts.append((member.start, member.end))
        elif member.key == "choices":
            spans = elements(data, member.start, member.end)
            choices = [members(data, *span) for span in spans]
            only_ours = strip.everything and len(choices) == 1 and _is_held_back(data, choices[0])
            for choice in choices:
                cuts += _choice_cuts(choice, strip)
    return cuts, only_ours


def _choice_cuts(choice: list[Member], strip: Strip) -> list[tuple[int, int]]:
    return [
        (member.start, member.end)
        for member in choice
        if (member.key == "token_ids" and strip.token_ids)
        or (member.key == "logprobs" and strip.logprobs)
    ]


def _is_held_back(data: bytes, choice: list[Member]) -> bool:
    values = {member.key: data[member.start : member.end] for member in choice}
    return values.get("delta") == b"{}" and values.get("finish_reason") == NULL


def _replace(data: bytes, cuts: list[tuple[int, int]]) -> bytes:
    if not cuts:
        return data
    pieces: list[bytes] = []
    at = 0
    for start, end in cuts:
        pieces += (data[at:start], NULL)
        at = end
    pieces.append(data[at:])
    return b"".join(pieces)
