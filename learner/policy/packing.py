"""Fold rows of tokens that begin alike into a trie, lay it out, and make packs of it.

`pack_group` lays the answers of a group behind one copy of their prompt. Pure index arithmetic.

    rows      p0 p1 p2 a0 a1           tokens     p0 p1 p2 | a0 a1 | b0 | c0 c1 | d0
              p0 p1 p2 b0 c0 c1        positions   0  1  2 |  3  4 |  3 |  4  5 |  4
              p0 p1 p2 b0 d0           segments       0    |   1   |  2 |   3   |  4
                                       parents       none  |   0   |  0 |   2   |  2

A segment is a run of tokens without a branch. Segments stand in pre-order, so the tokens below a
segment follow it in one piece: [stop, last). A token sees the tokens of the segments above its own,
and its own segment's past; its position is its place in the row. So each row gets what it would get
alone, and a token that several rows share is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from learner.records import TrainableRow, TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [start, stop) of the layout; [stop, last) are the tokens below it."""

    start: int
    stop: int
    last: int
    parent: int
    """Number of the segment that it continues, which stands before it; -1: none."""
    position: int
    """Position of its first token: how many tokens are above it."""

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """The layout of R rows: T tokens in S segments."""

    tokens: tuple[int, ...]
    """[T] token ids."""
    positions: tuple[int, ...]
    """[T]"""
    segments: tuple[Segment, ...]
    """[S] in pre-order."""
    places: tuple[tuple[int, ...], ...]
    """[R][length of the row] index into T of each of the row's tokens."""


@dataclass(slots=True)
class _Node:
    tokens: Sequence[int]
    below: list[_Node] = field(default_factory=list)


def fold(rows: Sequence[Sequence[int]], *, least: int = 1) -> Trie:
    """Fold rows, each at least one token long, into a trie.

    least: fewest tokens of a segment that others continue; shorter ones are computed once for each
        of those: a segment costs something too.
    """
    root = _grow(rows, least)
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    starts: dict[int, int] = {}
    for node in root.below:
        _lay(node, -1, 0, tokens, positions, segments, starts)
    return Trie(
        tokens=tuple(tokens),
        positions=tuple(positions),
        segments=tuple(segments),
        places=tuple(_places(root, row, starts) for row in rows),
    )


def unique_tokens(rows: Sequence[Sequence[int]], *, least: int = 1) -> int:
    """Return the number of tokens of the rows' trie, without laying it out."""
    root = _grow(rows, least)
    count, nodes = 0, [root]
    while nodes:
        node = nodes.pop()
        count += len(node.tokens)
        nodes += node.below
    return count


def chain(length: int) -> tuple[Segment, ...]:
    """Return the segments of one row alone."""
    return (Segment(start=0, stop=length, last=length, parent=-1, position=0),)


def pairs(segments: Sequence[Segment]) -> int:
    """Return how many (query, key) pairs the segments attend to."""
    return sum(
        one.length * (one.length + 1) // 2 + one.length * (one.last - one.stop) for one in segments
    )


def ancestors(segments: Sequence[Segment], number: int) -> list[Segment]:
    """Return the segments above this one, the first of the row first."""
    found: list[Segment] = []
    while (number := segments[number].parent) >= 0:
        found.append(segments[number])
    return found[::-1]


def shared(row: Sequence[int], start: int, other: Sequence[int]) -> int:
    """Return how many tokens row[start:] and other have in common from their beginnings."""
    high = min(len(row) - start, len(other))
    if row[start : start + high] == other[:high]:
        return high
    low = 0
    while high - low > 1:  # alike up to `low`, not up to `high`
        middle = (low + high) // 2
        if row[start + low : start + middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _best(node: _Node, row: Sequence[int], start: int) -> tuple[_Node | None, int]:
    best, most = None, 0
    for one in node.below:
        alike = shared(row, start, one.tokens)
        if alike > most:
            best, most = one, alike
    return best, most


def _grow(rows: Sequence[Sequence[int]], least: int) -> _Node:
    root = _Node(())
    for row in rows:
        _insert(root, row)
    _prune(root, least)
    return root


def _prune(node: _Node, least: int) -> None:
    """Give the tokens of a branch that is too short to each of those below it."""
    kept: list[_Node] = []
    nodes = node.below[::-1]
    while nodes:
        one = nodes.pop()
        if len(one.below) > 1 and len(one.tokens) < least:
            nodes += [_Node((*one.tokens, *child.tokens), child.below) for child in one.below[::-1]]
        else:
            kept.append(one)
    node.below = kept
    for one in kept:
        _prune(one, least)


def _insert(root: _Node, row: Sequence[int]) -> None:
    node, start = root, 0
    while start < len(row):
        best, alike = _best(node, row, start)
        if best is None:
            node.below.append(_Node(row[start:]))
            return
        start += alike
        if alike < len(best.tokens) and start < len(row):
            best.below = [_Node(best.tokens[alike:], best.below)]
            best.tokens = best.tokens[:alike]
        node = best


def _lay(
    node: _Node,
    parent: int,
    position: int,
    tokens: list[int],
    positions: list[int],
    segments: list[Segment],
    starts: dict[int, int],
) -> None:
    """starts: id of a node -> where its tokens begin."""
    number, start = len(segments), len(tokens)
    starts[id(node)] = start
    tokens += node.tokens
    while len(node.below) == 1:  # no branch: the same segment goes on
        (node,) = node.below
        starts[id(node)] = len(tokens)
        tokens += node.tokens
    stop = len(tokens)
    positions += range(position, position + stop - start)
    one = Segment(start=start, stop=stop, last=stop, parent=parent, position=position)
    segments.append(one)
    for child in node.below:
        _lay(child, number, position + one.length, tokens, positions, segments, starts)
    segments[number] = replace(one, last=len(tokens))


def _places(root: _Node, row: Sequence[int], starts: dict[int, int]) -> tuple[int, ...]:
    """Return where the row's tokens stand. Nodes beside each other part before any of them ends, so
    the row's own is the one with most in common."""
    found: list[int] = []
    node, start = root, 0
    while start < len(row):
        best, alike = _best(node, row, start)
        assert best is not None, "the row is not in the trie"
        found += range(starts[id(best)], starts[id(best)] + alike)
        node, start = best, start + alike
    return tuple(found)


# Lay the answers of a group behind one copy of their prompt. Pure index arithmetic.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One forward pass: T input tokens, N predicted (trainable) tokens."""

    group_id: str
    adapter: str
    input_ids: tuple[int, ...]
    """[T] token ids."""
    positions: tuple[int, ...]
    """[T] rotary positions."""
    segments: tuple[Segment, ...]
    """How the T tokens attend to each other, in pre-order."""
    sources: tuple[int, ...]
    """[N] index into T whose hidden state predicts the target."""
    targets: tuple[int, ...]
    """[N] token ids."""
    recorded: tuple[float, ...]
    """[N] nats, as recorded when the target was sampled."""
    advantages: tuple[float, ...]
    """[N] the advantage of the target's answer."""
    temperatures: tuple[float, ...]
    """[N] sampling temperature of the target's answer."""
    answers: tuple[int, ...]
    """[N] number of the target's answer in the pack, from 0."""
    start: tuple[float, ...]
    """[N] nats under the policy at the start of the run, or as recorded where nobody reads them."""


def keys_of(pack: Pack) -> int:
    """Return the keys on the paths of all segments of a pack."""
    return sum(one.position + one.length for one in pack.segments)


def packed_length(prompt_length: int, answer_lengths: Sequence[int]) -> int:
    """Return the number of input tokens of a pack: these answers behind one prompt."""
    return prompt_length + sum(length - 1 for length in answer_lengths)


def pack_group(
    group: TrainingGroup, *, max_tokens: int, alone: bool = False, least: int = 1
) -> list[Pack]:
    """Pack the trainable answers of a group, in order, in as few packs as that order allows.

    alone: each answer gets a pack of its own, for models that do not pack.
    least: as in `learner.policy.packing.fold`.
    max_tokens: longest pack. A group that does not fit is split, and each part gets the prompt. An
        answer that does not fit even alone gets its own pack: selection has already dropped groups
        that are too long.
    """
    rows = [fed(group, row) for row in group.rows if row.trainable]
    sizes = [len(one) for one in in_bins(rows, 0 if alone else max_tokens, least)]
    return packs_of_sizes(group, sizes, least)


def packs_of_sizes(group: TrainingGroup, sizes: Sequence[int], least: int) -> list[Pack]:
    """Pack the trainable answers of a group, in order, so many in each pack."""
    rest = iter([row for row in group.rows if row.trainable])
    return [pack_rows(group, list(islice(rest, size)), least=least) for size in sizes]


def in_bins(
    rows: Sequence[tuple[int, ...]], max_tokens: int, least: int
) -> Iterator[list[tuple[int, ...]]]:
    """Yield the rows of each pack of `pack_group`. rows: the tokens that are fed."""
    taken: list[tuple[int, ...]] = []
    for row in rows:
        if taken and (max_tokens <= 0 or unique_tokens([*taken, row], least=least) > max_tokens):
            yield taken
            taken = []
        taken.append(row)
    if taken:
        yield taken


def fed(group: TrainingGroup, row: TrainableRow) -> tuple[int, ...]:
    """Return the tokens that are fed to predict an answer: the prompt and all but its last."""
    return group.prompt_token_ids + row.token_ids[:-1]


def pack_rows(group: TrainingGroup, rows: Sequence[TrainableRow], *, least: int = 1) -> Pack:
    return pack_members([(group, row) for row in rows], least=least)


def pack_members(members: Sequence[tuple[TrainingGroup, TrainableRow]], *, least: int = 1) -> Pack:
    """Pack rows, of one group or of several, into one; its names are those of the first."""
    trie = fold([fed(group, row) for group, row in members], least=least)
    rows = [row for _, row in members]
    return Pack(
        group_id=members[0][0].group_id,
        adapter=members[0][0].adapter,
        input_ids=trie.tokens,
        positions=trie.positions,
        segments=trie.segments,
        sources=tuple(
            place
            for (group, row), places in zip(members, trie.places, strict=True)
            for place in row.of_kept(places[len(group.prompt_token_ids) - 1 :])
        ),
        targets=tuple(token for row in rows for token in row.of_kept(row.token_ids)),
        recorded=tuple(value for row in rows for value in row.of_kept(row.logprobs)),
        advantages=tuple(row.advantage for row in rows for _ in range(row.kept_tokens)),
        temperatures=tuple(row.temperature for row in rows for _ in range(row.kept_tokens)),
        answers=tuple(place for place, row in enumerate(rows) for _ in range(row.kept_tokens)),
        start=tuple(value for row in rows for value in row.of_kept(row.start or row.logprobs)),
    )
