"""Lay the answers of a group behind one copy of their prompt. Pure index arithmetic.

    ids        p0 p1 p2 | a0 a1 | b0 b1 b2        the last token of an answer predicts nothing that
    positions   0  1  2 |  3  4 |  3  4  5        is trained on, so it is left out of the input
    segments       0    |   1   |     2

A token attends to the prompt and to its own segment's past, and the positions restart behind the
prompt, so each answer gets exactly the log-probabilities of a separate row. The first token of
every answer is predicted from the prompt's last position. A group of 8 answers of 45 tokens behind
a prompt of 60 costs 412 tokens instead of 832. Answers that begin alike, as those of several turns
with one history do, share their beginnings too (`learner.policy.attention.trie`).

A token that its row does not keep (`TrainableRow.kept`) is no target. It stays in the input: the
tokens behind it were sampled after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from learner.policy.attention.trie import Segment, fold, unique_tokens
from learner.records import TrainableRow, TrainingGroup


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


def packed_length(prompt_length: int, answer_lengths: Sequence[int]) -> int:
    """Return the number of input tokens of a pack: these answers behind one prompt."""
    return prompt_length + sum(length - 1 for length in answer_lengths)


def pack_group(
    group: TrainingGroup, *, max_tokens: int, alone: bool = False, least: int = 1
) -> list[Pack]:
    """Pack the trainable answers of a group, in order, in as few packs as that order allows.

    alone: each answer gets a pack of its own, for models that do not pack.
    least: as in `learner.policy.attention.trie.fold`.
    max_tokens: longest pack. A group that does not fit is split, and each part gets the prompt. An
        answer that does not fit even alone gets its own pack: selection has already dropped groups
        that are too long.
    """
    bins = in_bins(group, 0 if alone else max_tokens, least)
    return [pack_rows(group, rows, least=least) for rows in bins]


def in_bins(group: TrainingGroup, max_tokens: int, least: int) -> Iterator[list[TrainableRow]]:
    """Yield the trainable rows of each pack of `pack_group`."""
    taken: list[TrainableRow] = []
    for row in group.rows:
        if not row.trainable:
            continue
        if taken:
            rows = [fed(group, one) for one in (*taken, row)]
            if max_tokens <= 0 or unique_tokens(rows, least=least) > max_tokens:
                yield taken
                taken = []
        taken.append(row)
    if taken:
        yield taken


def fed(group: TrainingGroup, row: TrainableRow) -> tuple[int, ...]:
    """Return the tokens that are fed to predict an answer: the prompt and all but its last."""
    return group.prompt_token_ids + row.token_ids[:-1]


def pack_rows(group: TrainingGroup, rows: Sequence[TrainableRow], *, least: int = 1) -> Pack:
    """Pack these rows of a group into one."""
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
