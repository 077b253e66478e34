"""How right a session finder is on a stream whose truth is known.

A request is in the right session when the true session of most requests in the found one is its
own, and no other found session holds more requests of that true session. A conversation leaks when
some of its requests are held out and others are not.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.sessions.records import HELD_OUT, Finder, Placement, SentRequest, Side
from benchmarks.sessions.twins import Twins, settled, twins_of
from ingest.grouping.features import is_held_out
from sidecar.settings import Groups

SETTLE_S = Groups().settle_s
"""A request is decided so long after it was handed over: the product's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Shares are 0..1."""

    session: float
    """Requests in the right session, equal requests exchanged as `twins` says."""
    parent: float
    """Requests with the right parent, likewise."""
    session_by_name: float
    """Requests in the right session, with the truth as it is."""
    parent_by_name: float
    leak: float
    """Conversations with requests on both sides of the held-out rule."""
    cpu_us: float
    """CPU microseconds a request, reading of the body included."""


def score(finder: Finder, stream: Sequence[SentRequest], twins: Twins | None = None) -> Score:
    """Run a finder over a stream and compare with the truth.

    twins: `twins_of` the stream, for whoever scores several finders on it.
    """
    blind = [replace(one, true_session="", true_parent=None) for one in stream]
    started = time.process_time()
    said = list(finder(blind))
    cpu_us = (time.process_time() - started) * 1e6 / len(stream)
    last = {one.exchange_id: one for one in said}
    truth = settled(stream, last, twins_of(stream) if twins is None else twins)
    return Score(
        session=right_sessions(truth, last),
        parent=right_parents(truth, last),
        session_by_name=right_sessions(stream, last),
        parent_by_name=right_parents(stream, last),
        leak=leak(truth, said),
        cpu_us=cpu_us,
    )


def right_sessions(truth: Sequence[SentRequest], found: Mapping[str, Placement]) -> float:
    """Share of requests in the right session."""
    pairs = [
        (found[one.exchange_id].session, one.true_session)
        for one in truth
        if one.exchange_id in found
    ]
    of_found = _most_common(pairs)
    of_true = _most_common((true, session) for session, true in pairs)
    right = sum(of_found[session] == true and of_true[true] == session for session, true in pairs)
    return right / len(truth)


def right_parents(truth: Sequence[SentRequest], found: Mapping[str, Placement]) -> float:
    """Share of requests with the right parent."""
    right = sum(
        one.exchange_id in found and found[one.exchange_id].parent == one.true_parent
        for one in truth
    )
    return right / len(truth)


def leak(
    truth: Sequence[SentRequest],
    said: Iterable[Placement],
    rate: float = HELD_OUT,
    settle_s: float = SETTLE_S,
) -> float:
    """Share of conversations that are partly held out and partly not, from when each of their
    requests was decided. What is neither examined nor trained on leaks nothing."""
    by_name = {one.exchange_id: one for one in truth}
    words: dict[str, list[Placement]] = defaultdict(list)
    for one in said:
        if one.exchange_id in by_name:
            words[one.exchange_id].append(one)
    sides: dict[str, set[Side]] = defaultdict(set)
    for name, of_one in words.items():
        decided = by_name[name].handed_at + settle_s
        last = max((at for at, one in enumerate(of_one) if one.at <= decided), default=0)
        sides[by_name[name].true_session] |= {_side(one, rate) for one in of_one[last:]}
    both = sum({"held_out", "trained"} <= found for found in sides.values())
    return both / len({one.true_session for one in truth})


def _side(found: Placement, rate: float) -> Side:
    if found.side is not None:
        return found.side
    return "held_out" if is_held_out(found.session, rate) else "trained"


def _most_common(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """First of a pair -> the second that it has most often; of equals the first in order."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for first, second in pairs:
        counts[first][second] += 1
    return {
        first: min(seconds.items(), key=lambda item: (-item[1], item[0]))[0]
        for first, seconds in counts.items()
    }
