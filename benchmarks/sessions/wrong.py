"""`python -m benchmarks.sessions.wrong MIX...`: could content have told the right parent?

Counts the requests with a wrong parent, by what was found instead and by what their texts say:

- `text of its own`: the request holds a text that only its own conversation held before.
- `shared text`: all that it has in common with its own conversation stood in others as well.
- `no text`: it has no text in common with its own conversation.

Only the first kind can be mended by a better search. Prints one line for each mix and kind.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence

from benchmarks.sessions.mixes import BY_NAME
from benchmarks.sessions.product import by_ingest
from benchmarks.sessions.records import Placement, SentRequest
from benchmarks.sessions.run import DATA
from benchmarks.sessions.streams import Data
from benchmarks.sessions.twins import settled, twins_of
from ingest.sessions.rows import conversation_of

LONG = 24
"""Characters from which a text tells something."""


def main(names: Sequence[str]) -> int:
    data = Data.read(DATA)
    for name in names:
        stream = BY_NAME[name].make(data, f"{name}-1")
        last = {one.exchange_id: one for one in by_ingest(stream)}
        kinds = wrong(settled(stream, last, twins_of(stream)), last)
        for kind, number in kinds.most_common():
            print(f"{name}: {number} of {len(stream)}: {kind}")
    return 0


def wrong(truth: Sequence[SentRequest], found: dict[str, Placement]) -> Counter[str]:
    """Count the requests with a wrong parent by kind. truth: in the order of arrival."""
    by_name = {one.exchange_id: one for one in truth}
    held: dict[str, set[str]] = defaultdict(set)
    """Text -> the true sessions that held it so far."""
    kinds: Counter[str] = Counter()
    for one in truth:
        heard, said = _texts(one)
        parent = found[one.exchange_id].parent
        if parent != one.true_parent:
            others = [held[text] for text in heard if one.true_session in held[text]]
            alone = any(sessions == {one.true_session} for sessions in others)
            told = "text of its own" if alone else "shared text" if others else "no text"
            kinds[f"{_instead(one, parent, by_name)}, {told}"] += 1
        for text in heard | said:
            held[text].add(one.true_session)
    return kinds


def _instead(one: SentRequest, parent: str | None, by_name: dict[str, SentRequest]) -> str:
    if parent is None:
        return "a new session"
    same = by_name[parent].true_session == one.true_session
    return "another parent of its session" if same else "another session"


def _texts(one: SentRequest) -> tuple[set[str], set[str]]:
    """Return the long texts of the request's messages, and of its replies."""
    messages = conversation_of(one.request).messages
    replies = (json.loads(reply).get("content") or "" for reply in one.replies)
    return (
        {message.text for message in messages if message.length >= LONG},
        {text for text in replies if len(text) >= LONG},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(BY_NAME)))
