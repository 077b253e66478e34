"""Takes from the truth what nobody can know: which of two equal requests a later one continues.

Pure. Two requests are twins when sender, setting, messages and replies are the same. What continues
one could as well continue the other, unless it repeats the id of a call that only one of them
knows. So where a finder takes a twin for a parent, the truth is changed to agree with it, if that
is only an exchange: each twin passes on all that follows it, and each gets at most one inheritance.
What follows then belongs to the twin's session, and the score has no chance in it.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from benchmarks.sessions.canonical import conversation, reply, sender, setting
from benchmarks.sessions.records import Placement, SentRequest

_CALL_ID = re.compile(rb'"(?:id|call_id|tool_call_id|tool_use_id)"\s*:\s*"([^"]+)"')
Twins = Mapping[str, Sequence[str]]
"""Exchange id -> exchange ids of its class, itself included; classes of one are left out."""


def twins_of(stream: Sequence[SentRequest]) -> Twins:
    """Group the requests that nothing tells apart."""
    classes: dict[object, list[str]] = defaultdict(list)
    for one in stream:
        request = json.loads(one.request)
        said = (*conversation(request), ("",), *map(reply, one.replies))
        classes[hash((sender(one), setting(request), said))].append(one.exchange_id)
    return {name: names for names in classes.values() if len(names) > 1 for name in names}


def settled(
    stream: Sequence[SentRequest], found: Mapping[str, Placement], twins: Twins
) -> list[SentRequest]:
    """The truth, with twins exchanged as the finder has them. Returns the stream in its order."""
    by_name = {one.exchange_id: one for one in stream}
    following: dict[str, list[SentRequest]] = defaultdict(list)
    for one in sorted(stream, key=lambda one: one.at):
        if one.true_parent is not None and one.true_parent in twins:
            following[one.true_parent].append(one)
    heirs: dict[str, str] = {}  # true parent -> the parent that the exchange gives to its children
    taken: set[str] = set()
    for name, children in following.items():
        wanted = _wanted(children, name, found, twins, by_name)
        if wanted is not None and wanted not in taken:
            heirs[name] = wanted
            taken.add(wanted)
    for name, children in following.items():
        if name in heirs:
            continue
        free = [other for other in twins[name] if other not in taken]
        own_first = [name, *free] if name in free else free
        heirs[name] = next(
            (one for one in own_first if by_name[one].at < children[0].at), own_first[0]
        )
        taken.add(heirs[name])
    return _with_parents(stream, heirs)


def _wanted(
    children: Sequence[SentRequest],
    parent: str,
    found: Mapping[str, Placement],
    twins: Twins,
    by_name: Mapping[str, SentRequest],
) -> str | None:
    """The twin of the parent that the finder gives most of the children to, if it may be."""
    votes = Counter(found[one.exchange_id].parent for one in children if one.exchange_id in found)
    for wanted, _ in votes.most_common():
        if (
            wanted is not None
            and wanted in twins[parent]
            and all(
                by_name[wanted].at < child.at
                and _repeats(child, by_name[wanted]) == _repeats(child, by_name[parent])
                for child in children
            )
        ):
            return wanted
    return None


def _repeats(child: SentRequest, parent: SentRequest) -> int:
    """How many ids of calls in the parent's history and replies the child's body repeats."""
    texts = (parent.request, *parent.replies)
    known = set(chain.from_iterable(_CALL_ID.findall(text) for text in texts))
    return sum(name in child.request for name in known)


def _with_parents(stream: Sequence[SentRequest], heirs: Mapping[str, str]) -> list[SentRequest]:
    """Give each request its new parent, and the session of it."""
    sessions: dict[str, str] = {}
    changed: dict[str, SentRequest] = {}
    for one in sorted(stream, key=lambda one: one.at):
        parent = heirs.get(one.true_parent or "", one.true_parent)
        session = one.true_session if parent is None else sessions.get(parent, one.true_session)
        sessions[one.exchange_id] = session
        changed[one.exchange_id] = replace(one, true_parent=parent, true_session=session)
    return [changed[one.exchange_id] for one in stream]
