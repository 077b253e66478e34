"""Select the scored groups to train on, and the reason why others are dropped. Pure.

A bad group is dropped for its reason and never affects the others. A group that is too long is
dropped and not cut, because leaving out its longest answers would teach that length costs nothing.
Single answers that are not exact, are damaged, or have no sound score are masked: they have no part
in the loss, and only the silent ones have one in the group's baseline and spread.
`learner.runs.source` sorts out stale groups before, and `learner.runs.retry` limits how many groups
of failed runs a run takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import fmean
from typing import Literal

from ingest.grouping.exchangeable import RAISED_BELOW
from ingest.records import UNREADABLE, Answer, ScoredGroup
from learner.grpo.advantages import MIN_TRAINABLE, assign, share, spread, text_key
from learner.policy.packing import packed_length
from learner.records import TrainableRow, TrainingGroup
from learner.runs.spread_gate import Noise, SpreadGate, spread_gate
from sidecar.settings import Learner

DropReason = Literal[
    "identical_answers",
    "too_few_answers",
    "non_finite_score",
    "score_out_of_range",
    "no_spread",
    "within_noise",
    "no_prompt",
    "too_few_trainable",
    "too_long",
    "unreadable",
]
Scoring = Literal["non_finite_score", "score_out_of_range"]
"""Masks of answers whose score tells nothing."""
MISSING = ("lengths_differ", "logprob_not_finite")
"""Masks that ingest gave answers of which only the log-probabilities are not known. An answer that
came to be so in the store is damaged, and its ids may be too."""
MOST_LOGPROB = 1e-3
"""Largest recorded log-probability, in nats, that rounding explains; a larger one is damaged, and a
long answer hides it in the mean difference that the drift check reads."""
SPREAD: tuple[DropReason, ...] = ("no_spread", "within_noise")
"""Reasons of groups whose scores differ too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    groups: tuple[TrainingGroup, ...]
    dropped: Mapping[str, DropReason]
    """group id -> reason"""
    texts: Mapping[str, str]
    """group id -> details of the reason"""
    masks: Mapping[str, Mapping[int, str]]
    """group id -> index of an answer -> why it is left out of the loss; of the taken groups"""
    gates: Mapping[str, SpreadGate]
    """group id -> the least spread that its scores had to have; of taken groups, and of those
    dropped for their spread"""

    @property
    def masked_answers(self) -> Mapping[str, int]:
        """Reason -> number of answers of the taken groups that are left out of the loss."""
        return Counter(why for of_group in self.masks.values() for why in of_group.values())

    @property
    def quiet(self) -> int:
        """Number of groups that were dropped for their spread."""
        return sum(reason in SPREAD for reason in self.dropped.values())

    @property
    def least_spread(self) -> Mapping[str, float]:
        """Group id -> the least spread of its rewards, for the groups to train on."""
        return {group.group_id: self.gates[group.group_id].least for group in self.groups}


def select_by(
    learner: Learner, scored_groups: Sequence[ScoredGroup], noise: Noise | None
) -> Selection:
    """Select as a run with these settings does: a run and its replay must select alike."""
    return select_groups(
        scored_groups,
        min_spread=learner.min_spread,
        pack_tokens=learner.pack_tokens,
        noise=noise,
        advantage=learner.advantage,
        recompute=learner.missing_logprobs != "drop",
    )


def select_groups(
    scored_groups: Sequence[ScoredGroup],
    *,
    min_spread: float,
    pack_tokens: int,
    noise: Noise | None = None,
    advantage: str = "mean",
    recompute: bool = False,
) -> Selection:
    """Turn scored groups into training groups.

    min_spread: score units; a group whose rewards have a smaller population standard deviation
        is dropped, and so is one whose rewards are all equal.
    pack_tokens: longest prompt plus one answer that the trainer computes at once, in tokens.
    noise: measured noise of judges; a group whose spread such noise alone explains is dropped too.
    advantage: a key of `learner.grpo.advantages.ADVANTAGES`.
    recompute: the trainer computes log-probabilities that were not recorded.
    """
    groups: list[TrainingGroup] = []
    dropped: dict[str, DropReason] = {}
    texts: dict[str, str] = {}
    masked: dict[str, Mapping[int, str]] = {}
    gates: dict[str, SpreadGate] = {}
    for scored in scored_groups:
        try:
            masks = masks_of(scored, recompute=recompute)
            gate = spread_gate(
                scored, noise or {}, min_spread=min_spread, counted=[counts(m) for m in masks]
            )
            rewards = shared_rewards(scored, masks)
            drop = _why_dropped(
                scored, masks, rewards, gate=gate, min_spread=min_spread, pack_tokens=pack_tokens
            )
            group = _training_group(scored, masks, rewards, advantage) if drop is None else None
        except (ValueError, TypeError, ArithmeticError) as error:  # of the wrong type or number
            drop, group, gate = ("unreadable", f"{type(error).__name__}: {error}"), None, None
        if gate is not None and (drop is None or drop[0] in SPREAD):
            gates[scored.group.group_id] = gate
        if drop is not None:
            dropped[scored.group.group_id], texts[scored.group.group_id] = drop
        if group is None:
            continue
        groups.append(group)
        masked[group.group_id] = {place: why for place, why in enumerate(masks) if why}
    return Selection(
        groups=tuple(groups),
        dropped=dropped,
        texts=texts,
        masks=masked,
        gates=gates,
    )


def masks_of(scored: ScoredGroup, *, recompute: bool) -> list[str | None]:
    """Return [G] the reason why an answer is left out of the loss; None where it is not.

    Where a mask of the server restricted the tokens, recorded log-probabilities cannot be replaced:
    they tell which tokens it touched.
    """
    known = recompute and scored.group.masked_by is None
    masks = [mask_reason(answer) for answer in scored.group.answers]
    of_scores = score_masks(scored)
    return [
        of_score or (_other_mask(answer) if known and mask in MISSING else mask)
        for answer, mask, of_score in zip(scored.group.answers, masks, of_scores, strict=True)
    ]


def score_masks(scored: ScoredGroup) -> list[Scoring | None]:
    """Return [G] why the score or the reward of an answer tells nothing; None where it does, and
    where the answer itself cannot be read."""
    return [
        None if answer.untrainable_reason == UNREADABLE else _score_mask(score, reward)
        for answer, score, reward in zip(
            scored.group.answers, scored.scores, scored.rewards, strict=True
        )
    ]


def _score_mask(score: float, reward: float) -> Scoring | None:
    if not (math.isfinite(score) and math.isfinite(reward)):
        return "non_finite_score"
    return None if 0.0 <= reward <= 1.0 else "score_out_of_range"


def mask_reason(answer: Answer) -> str | None:
    """Return the reason why an answer with its recorded values is left out; None when it is not."""
    if answer.untrainable_reason is not None:
        return answer.untrainable_reason
    if not answer.token_ids:
        return "no_tokens"
    if len(answer.token_ids) != len(answer.logprobs):
        return "tokens_without_logprobs"
    if not all(map(math.isfinite, answer.logprobs)):
        return "non_finite_logprob"
    if max(answer.logprobs) > MOST_LOGPROB:
        return "positive_logprob"
    return _other_mask(answer)


def _other_mask(answer: Answer) -> str | None:
    """Return what else keeps an answer out, whatever its log-probabilities are."""
    if not answer.token_ids:
        return "no_tokens"
    if not answer.temperature > 0:
        return "greedy"
    if answer.temperature < RAISED_BELOW:
        return "temperature_raised"
    if not math.isfinite(answer.temperature):
        return "non_finite_temperature"
    return None


def counts(mask: str | None) -> bool:
    """Return True when an answer with this reason of `mask_reason` counts in its group's baseline.

    A silent answer was drawn as the others were, and its score says what silence is worth.
    """
    return mask in (None, "no_tokens")


def shared_rewards(scored: ScoredGroup, masks: Sequence[str | None]) -> tuple[float, ...]:
    """Return [G] rewards, of which answers that count and are the same share their mean."""
    texts = [text_key(answer.token_ids, answer.temperature) for answer in scored.group.answers]
    return share(scored.rewards, texts, [counts(mask) for mask in masks])


def _why_dropped(
    scored: ScoredGroup,
    masks: Sequence[str | None],
    shared: Sequence[float],
    *,
    gate: SpreadGate,
    min_spread: float,
    pack_tokens: int,
) -> tuple[DropReason, str] | None:
    """Return the reason why a group is dropped, and its details; None when it is not."""
    prompt, rewards = len(scored.group.prompt_token_ids), scored.rewards
    if len(rewards) < 2:
        has = "1 answer" if rewards else "no answer"
        return "too_few_answers", f"it has {has}, and a comparison needs 2"
    answers = list(zip(scored.group.answers, masks, strict=True))
    trainable = [answer for answer, mask in answers if not mask]
    if len(trainable) < MIN_TRAINABLE:
        of_others = Counter(mask for mask in masks if mask)
        others = ", ".join(f"{number} {mask}" for mask, number in sorted(of_others.items()))
        which = f"{len(trainable)} of {len(answers)} answers can be trained on"
        for place, why in enumerate(score_masks(scored)):
            if why is not None:
                what = f"the score of answer {place} is {rewards[place]:g}"
                return why, f"{what}; {which}; masked: {others}"
        return "too_few_trainable", f"{which}; masked: {others}"
    counted = [answer for answer, mask in answers if counts(mask)]
    if len({(tuple(answer.token_ids), answer.temperature) for answer in counted}) == 1:
        return "identical_answers", f"its {len(counted)} answers that count are the same"
    found = spread([reward for reward, mask in zip(shared, masks, strict=True) if counts(mask)])
    if found == 0.0 or found < min_spread:
        return "no_spread", gate.words
    if found < gate.least:
        return "within_noise", gate.words
    if not prompt:
        return "no_prompt", "the token ids of its prompt were not recorded"
    longest = max(len(answer.token_ids) for answer in trainable)
    if packed_length(prompt, [longest]) > pack_tokens:
        what = f"its prompt has {prompt} tokens and its longest answer {longest}"
        return "too_long", f"{what}; learner.pack_tokens is {pack_tokens}"
    return None


def _training_group(
    scored: ScoredGroup, masks: Sequence[str | None], rewards: tuple[float, ...], method: str
) -> TrainingGroup:
    group = scored.group
    counted = [counts(mask) for mask in masks]
    advantages = assign(rewards, counted, method)
    neutral = fmean(compress(rewards, counted))

    def sound(rewards_G: Sequence[float]) -> tuple[float, ...]:
        return tuple(one if _score_mask(one, one) is None else neutral for one in rewards_G)

    rows = tuple(
        TrainableRow(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs if recorded else (0.0,) * len(answer.token_ids),
            recorded=recorded,
            advantage=advantage,
            temperature=answer.temperature,
            trainable=mask is None,
            counted=counts(mask),
        )
        for answer, mask, advantage in zip(group.answers, masks, advantages, strict=True)
        for recorded in (answer.untrainable_reason not in MISSING,)
    )
    return TrainingGroup(
        group_id=group.group_id,
        adapter=group.adapter,
        prompt_token_ids=group.prompt_token_ids,
        rows=rows,
        scores=sound(rewards),
        unshared=() if (own := sound(scored.rewards)) == sound(rewards) else own,
        masked_by=group.masked_by,
    )
