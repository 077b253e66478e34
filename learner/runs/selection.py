"""Select the scored groups and whole sessions to train on, and say why others are dropped. Pure.

A bad group is dropped for its reason and never affects the others. A group that is too long is
dropped and not cut, because leaving out its longest answers would teach that length costs nothing.
Single answers that are not exact, are damaged, or have no sound score are masked: they have no part
in the loss, and only the silent ones have one in the group's baseline and spread.
`learner.runs.source` sorts out stale groups before, and limits how many groups of failed runs a
run takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress, takewhile
from statistics import fmean
from typing import Literal

from ingest.grouping.request import RAISED_BELOW
from ingest.judge_noise import JudgedBy, MeasuredNoise
from ingest.records import UNREADABLE, Answer, Rewarded, ScoredGroup
from ingest.sessions.rows import RowAnswer, TokenRow
from ingest.tasks.material import TaskGroup
from ingest.verifiers.rewarding import FAIL_TOP
from learner.grpo.advantages import (
    MIN_SPREAD,
    MIN_TRAINABLE,
    REFERENCE_SPREAD,
    assign,
    assign_rows,
    group_spread,
    share,
    spread,
    text_key,
)
from learner.policy.packing import packed_length
from learner.records import Fault, TrainableRow, TrainingGroup
from sidecar.records import BASE
from sidecar.settings import Learner

# The spread that a group's rewards must have: more than the judge's noise would make of it. Pure.

PASSING = 0.05
"""Share of the groups of pure noise that pass; 0.085 of over ten answers, many of equal score."""
Noise = Mapping[JudgedBy, MeasuredNoise]
"""Who scored -> the measured noise of such scores."""
SURE_SPREAD = 0.005
"""Least spread with a judge without any noise: one answer of four a hundredth apart."""
FULL_SIGNAL = 5.0
"""Times the noise, from which on a group counts in full. Noise alone of which 0.7 was measured then
has 0.14 of the rate of a step, and scores squeezed to a tenth with noise of 0.005 have 0.9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadGate:
    """The least spread of one group, and why."""

    least: float
    """Population standard deviation in score units."""
    noise_sd: float | None
    """Standard deviation of the judge's noise in one reward; None: it has none, or it is not
    measured."""
    rest: float = MIN_SPREAD
    """Least spread of what is left when answers are left out later: a gate told them apart, and may
    not any more."""

    @property
    def words(self) -> str:
        if self.noise_sd is None:
            return f"least {self.least:.4f}"
        return f"least {self.least:.4f}, by judge noise of sd {self.noise_sd:.4f}"


def spread_gate(
    scored: ScoredGroup, noise: Noise, *, counted: Sequence[bool] | None = None
) -> SpreadGate:
    """Return the least spread of a group: by the judge's noise where it is measured, else
    `MIN_SPREAD`. A judge that uses a tenth of the scale, and is sure of it, tells as much.

    counted: [G] the answers whose rewards make the spread; None: all.
    """
    measured, scores = noise.get(scored.judged_by), scored.scores
    if counted is not None:
        scores = tuple(compress(scores, counted))
    share, apart = judge_share(scored.rewarded, counted)
    # Scores that are all equal have no noise that shows; the judge may not have been asked.
    if measured is None or share == 0.0 or len(set(scores)) < 2:
        return SpreadGate(least=MIN_SPREAD, noise_sd=None)
    sd = share * measured.sd
    least = max(SURE_SPREAD, sd * noise_factor(scores))
    if apart:
        return SpreadGate(least=MIN_SPREAD, noise_sd=None, rest=least)
    return SpreadGate(least=least, noise_sd=sd, rest=least)


def judge_share(
    rewarded: Rewarded | None, counted: Sequence[bool] | None = None
) -> tuple[float, bool]:
    """Return how much of a change of the judge's score goes into the reward, 0..1, and whether a
    gate tells the answers that count apart, with a gap between both kinds.

    (1, False) where the rule is damaged. The rules are those of `ingest.verifiers.rewarding`: a
    gate makes its kinds of all answers, also of those that do not count here.
    """
    if rewarded is None:
        return 1.0, False
    try:
        rule = rewarded.rule
        counting = [one for one in rule["verifiers"] if one["counts"]]
        ranks = rule["combine"] == "gate_then_rank"
        gates = {one["name"]: one["pass_at"] for one in counting if ranks and one["gate"]}
        kinds = [
            all(one["score"] >= gates[one["name"]] for one in checks if one["name"] in gates)
            for checks in rewarded.checks
        ]
        weights = sum(one["weight"] for one in counting if one["name"] not in gates)
        share = rule["judge_weight"] / (rule["judge_weight"] + weights)
    except (LookupError, TypeError, ArithmeticError):
        return 1.0, False
    if len(set(kinds)) > 1:
        share *= FAIL_TOP
    apart = len(set(kinds if counted is None else compress(kinds, counted))) > 1
    return min(1.0, max(0.0, float(share))), apart


def noise_factor(scores: Sequence[float]) -> float:
    """Return the spread that pure noise of standard deviation 1 exceeds with `PASSING`.

    scores: [G] the judge's, of one group. Identical answers share one score, so D is the number of
        different ones. Distinct answers that tie make it too small, which is on the safe side: the
        factor falls with D from 3 on.
    """
    return _factor(max(2, len(set(scores))))


@lru_cache(maxsize=64)
def _factor(distinct: int) -> float:
    return math.sqrt(chi_square_quantile(distinct - 1, 1 - PASSING) / distinct)


def chi_square_quantile(freedom: int, share: float) -> float:
    """Return the value under which a chi-square variable stays with probability `share`.

    freedom: degrees of freedom, 1 to 300. Found by bisection of the series of the regularised
    incomplete gamma function.
    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 6.5.29, 26.4.19.
    """
    low, high = 0.0, freedom + 20 * math.sqrt(2 * freedom) + 20
    for _ in range(100):
        middle = (low + high) / 2
        if _chi_square_below(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _chi_square_below(value: float, freedom: int) -> float:
    half, x = freedom / 2, value / 2
    if x <= 0:
        return 0.0
    term = math.exp(half * math.log(x) - x - math.lgamma(half + 1))
    total = term
    place = half
    while term > total * 1e-16:
        place += 1
        term *= x / place
        total += term
    return total


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
    references: Mapping[str, float] = field(default_factory=dict)
    """group id -> signal from which on it counts in full, of groups whose judge's noise is known"""

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
        """Group id -> the least spread of its rewards once answers are left out, for the groups to
        train on."""
        return {group.group_id: self.gates[group.group_id].rest for group in self.groups}


def select_by(
    learner: Learner, scored_groups: Sequence[ScoredGroup], noise: Noise | None
) -> Selection:
    """Select as a run with these settings does: a run and its replay must select alike."""
    return select_groups(
        scored_groups, pack_tokens=learner.pack_tokens, noise=noise, advantage=learner.advantage
    )


def select_groups(
    scored_groups: Sequence[ScoredGroup],
    *,
    pack_tokens: int,
    noise: Noise | None = None,
    advantage: str = "mean",
) -> Selection:
    """Turn scored groups into training groups.

    pack_tokens: longest prompt plus one answer that the trainer computes at once, in tokens.
    noise: measured noise of judges; a group whose spread such noise alone explains is dropped too.
    advantage: a key of `learner.grpo.advantages.ADVANTAGES`.
    """
    groups: list[TrainingGroup] = []
    dropped: dict[str, DropReason] = {}
    texts: dict[str, str] = {}
    masked: dict[str, Mapping[int, str]] = {}
    gates: dict[str, SpreadGate] = {}
    for scored in scored_groups:
        try:
            masks = masks_of(scored)
            gate = spread_gate(scored, noise or {}, counted=[counts(m) for m in masks])
            rewards = shared_rewards(scored, masks)
            drop = _why_dropped(scored, masks, rewards, gate=gate, pack_tokens=pack_tokens)
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
        references=_references(groups, gates),
    )


def _references(
    groups: Sequence[TrainingGroup], gates: Mapping[str, SpreadGate]
) -> dict[str, float]:
    """Return the references of groups with known noise: the typical spread (root mean square) of
    those with the same noise, that is of one judge and rule, between what is sure and
    `REFERENCE_SPREAD`."""
    spreads: dict[float, dict[str, float]] = {}
    for group in groups:
        if (sd := gates[group.group_id].noise_sd) is not None:
            counted = [row.counted for row in group.rows]
            spreads.setdefault(sd, {})[group.group_id] = group_spread(group, counted)
    found: dict[str, float] = {}
    for sd, of in spreads.items():
        typical = math.hypot(*of.values()) / math.sqrt(len(of))
        reference = min(REFERENCE_SPREAD, max(MIN_SPREAD, FULL_SIGNAL * sd, typical))
        found |= dict.fromkeys(of, reference)
    return found


def masks_of(scored: ScoredGroup) -> list[str | None]:
    """Return [G] the reason why an answer is left out of the loss; None where it is not.

    The trainer computes log-probabilities that were not recorded, but where a mask of the server
    restricted the tokens: there the recorded ones tell which tokens it touched.
    """
    known = scored.group.masked_by is None
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
    pack_tokens: int,
) -> tuple[DropReason, str] | None:
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
    if found < gate.least:
        return ("no_spread" if found < MIN_SPREAD else "within_noise"), gate.words
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


# Turn whole sessions, compared with each other, into rows to train on. Pure.

MEAN_OF_ANSWERS = ("grpo", "gspo")
"""Losses whose mean is over answers; that of the others is over tokens (`learner.grpo.losses`)."""
STEP_WEIGHT = 0.5
"""Weight of a step's advantage among other answers to its prompt, beside its session's. Source: a
simulation with two actions that look best next and make the task fail: 0 and 0.5 gain alike."""
IN_TASK_GROUP = "in_task_group"
"""Mask of a served answer whose step is trained on in its session, and why a group of other answers
to a step that was is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one row of tokens gives to the loss, with one advantage."""

    session: int
    row: TokenRow
    answers: tuple[RowAnswer, ...]
    temperature: float
    step: float


def select_tasks(
    learner: Learner,
    tasks: Sequence[TaskGroup],
    scored_groups: Sequence[ScoredGroup],
    selection: Selection,
) -> tuple[Selection, dict[str, Fault]]:
    """Add groups of sessions to the groups that a run has selected.

    A step that has a selected answer group is trained on once: in its session, with both
    advantages; in the answer group its served answer only counts in the baseline.
    Returns: the selection with them; and group id -> fault, for those that cannot be trained on.
    """
    exchanges = {one.group.group_id: one.group.exchange_id for one in scored_groups}
    served = {
        exchanges[group.group_id]: (place, group.rows[0].advantage)
        for place, group in enumerate(selection.groups)
        if group.rows[0].trainable
    }
    groups, masks, gates = list(selection.groups), dict(selection.masks), dict(selection.gates)
    faults: dict[str, Fault] = {}
    taken: list[int] = []
    for task in tasks:
        names = [name for one in task.sessions for name in one.steps if name in served]
        steps = {name: served[name] for name in names}
        made = task_group(
            task,
            {name: STEP_WEIGHT * advantage for name, (_, advantage) in steps.items()},
            loss=learner.loss,
        )
        gate = SpreadGate(least=MIN_SPREAD, noise_sd=None)
        fault = _why_no_task(task, made, gate, learner)
        if fault is not None or made is None:
            faults[task.group_id] = fault or Fault("too_few_trainable", "nothing to train on")
            continue
        taken.append(len(groups))
        groups.append(made)
        masks[task.group_id], gates[task.group_id] = {}, gate
        for place, _ in steps.values():
            groups[place], masks[groups[place].group_id] = _only_counted(
                groups[place], masks.get(groups[place].group_id, {})
            )
    for place, made in zip(taken, alike([groups[at] for at in taken], learner.loss), strict=True):
        groups[place] = made
    return replace(selection, groups=tuple(groups), masks=masks, gates=gates), faults


def alike(groups: Sequence[TrainingGroup], loss: str) -> list[TrainingGroup]:
    """Give the sessions of all groups the same weight: `_weights` does so within each. Sessions of
    10 tokens beside some of 1,000 had a hundredth of it."""
    sizes = [_size(group, loss) for group in groups]
    total, sessions = sum(one for one, _ in sizes), sum(of for _, of in sizes)
    found = []
    for group, (size, number) in zip(groups, sizes, strict=True):
        factor = (total / sessions) / (size / number)
        weights = tuple(factor * one for one in group.weights)
        rows = tuple(replace(row, advantage=factor * row.advantage) for row in group.rows)
        found.append(replace(group, weights=weights, rows=rows))
    return found


def _size(group: TrainingGroup, loss: str) -> tuple[int, int]:
    is_of_rows = loss in (*MEAN_OF_ANSWERS, "dr_grpo")
    size = len(group.rows) if is_of_rows else sum(row.kept_tokens for row in group.rows)
    return size, len(set(group.sessions))


def _only_counted(
    group: TrainingGroup, masks: Mapping[int, str]
) -> tuple[TrainingGroup, Mapping[int, str]]:
    first = replace(group.rows[0], trainable=False)
    return replace(group, rows=(first, *group.rows[1:])), {**masks, 0: IN_TASK_GROUP}


def _why_no_task(
    task: TaskGroup, made: TrainingGroup | None, gate: SpreadGate, learner: Learner
) -> Fault | None:
    rewards = [one.reward for one in task.sessions]
    if any(_score_mask(one, one) is not None for one in rewards):
        return Fault("score_out_of_range", f"its rewards are {rewards}")
    if made is None:
        which = sum(bool(one.steps) for one in task.sessions)
        return Fault(
            "too_few_trainable",
            f"{which} of {len(rewards)} sessions have answers that can be trained on",
        )
    found = group_spread(made, [True] * len(made.rows))
    if found == 0.0 or found < gate.least:
        return Fault("no_spread", gate.words)
    longest = max(len(row.token_ids) for row in made.rows)
    if packed_length(len(made.prompt_token_ids), [longest]) > (learner.pack_tokens or 0):
        what = f"its longest session has {len(made.prompt_token_ids) + longest} tokens"
        return Fault("too_long", f"{what}; learner.pack_tokens is {learner.pack_tokens}")
    return None


def task_group(task: TaskGroup, steps: Mapping[str, float], *, loss: str) -> TrainingGroup | None:
    """Turn a group of sessions into rows: the advantage of a session is that of all tokens that it
    sampled, and each session has the same weight in the loss, however long it is.

    steps: exchange id -> advantage of its answer among others to its prompt, weighted.
    loss: a key of `learner.grpo.losses.LOSSES`.
    Returns: None when fewer than two sessions have answers to train on, or no token is common to
        the beginning of all rows.
    """
    parts = [
        part
        for number, one in enumerate(task.sessions)
        for row in one.rows
        for part in _parts(number, row, one.steps, steps)
    ]
    if len({part.session for part in parts}) < MIN_TRAINABLE:
        return None
    prompt = _shared(parts)
    if not prompt:
        return None
    rows = tuple(_trainable(part, len(prompt)) for part in parts)
    sessions = tuple(part.session for part in parts)
    group = TrainingGroup(
        group_id=task.group_id,
        adapter=task.adapter,
        prompt_token_ids=prompt,
        rows=rows,
        scores=tuple(task.sessions[number].reward for number in sessions),
        sessions=sessions,
        weights=_weights(rows, sessions, loss),
        steps=tuple(part.step for part in parts),
    )
    advantages = assign_rows(group, [True] * len(rows), "leave_one_out")
    return replace(
        group,
        rows=tuple(
            replace(row, advantage=advantage)
            for row, advantage in zip(rows, advantages, strict=True)
        ),
    )


def _weights(rows: Sequence[TrainableRow], sessions: Sequence[int], loss: str) -> tuple[float, ...]:
    """Return what makes each session count alike, and the group as much as without weights.

    A loss that is a mean over tokens gets the mean tokens of a session over those of this one. One
    that is a mean over answers weighs each row's tokens by 1 / their number: the row gets its share
    of its session's tokens, times the mean number of rows of a session. `dr_grpo` divides the sum
    of a session by a constant, whatever its length, so that length is no advantage.
    """
    tokens: Counter[int] = Counter()
    for row, number in zip(rows, sessions, strict=True):
        tokens[number] += row.kept_tokens
    mean = len(rows) / len(tokens)
    if loss == "dr_grpo":
        return (mean,) * len(rows)
    if loss in MEAN_OF_ANSWERS:
        return tuple(
            mean * row.kept_tokens / tokens[number]
            for row, number in zip(rows, sessions, strict=True)
        )
    mean = tokens.total() / len(tokens)
    return tuple(mean / tokens[number] for number in sessions)


def _parts(
    session: int, row: TokenRow, temperatures: Mapping[str, float], steps: Mapping[str, float]
) -> list[_Part]:
    """Divide the answers of a row that are trained on by temperature and step advantage."""
    found: dict[tuple[float, float], list[RowAnswer]] = {}
    for answer in row.answers:
        temperature = temperatures.get(answer.exchange_id)
        if answer.logprobs and temperature is not None:
            alike = (temperature, steps.get(answer.exchange_id, 0.0))
            found.setdefault(alike, []).append(answer)
    return [
        _Part(session=session, row=row, answers=tuple(of), temperature=temperature, step=step)
        for (temperature, step), of in found.items()
    ]


def _shared(parts: Sequence[_Part]) -> tuple[int, ...]:
    begins = [tuple(one.row.token_ids[: min(a.start for a in one.answers)]) for one in parts]
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*begins, strict=False))
    return tuple(tokens[0] for tokens in alike)


def _trainable(part: _Part, prompt: int) -> TrainableRow:
    stop = max(answer.stop for answer in part.answers)
    logprobs, kept = [0.0] * stop, [False] * stop
    for answer in part.answers:
        logprobs[answer.start : answer.stop] = answer.logprobs
        kept[answer.start : answer.stop] = [True] * len(answer.logprobs)
    return TrainableRow(
        token_ids=tuple(part.row.token_ids[prompt:stop]),
        logprobs=tuple(logprobs[prompt:]),
        kept=tuple(kept[prompt:]),
        advantage=0.0,
        temperature=part.temperature,
        trainable=True,
    )


# Distance between two adapter versions. Pure.


def runs_between(parents: Mapping[str, str], left: str, right: str) -> int | None:
    """Count the training runs between two versions, through their common ancestor.

    parents: adapter name -> name of its parent, "base" at the root.
    Returns: None when one of the two versions is unknown.
    """
    distances = {name: runs for runs, name in enumerate(_ancestry(parents, left))}
    for runs, name in enumerate(_ancestry(parents, right)):
        if name in distances:
            return distances[name] + runs
    return None


def _ancestry(parents: Mapping[str, str], name: str) -> Iterator[str]:
    """Yield a version and its ancestors down to the base; nothing for an unknown version."""
    seen: set[str] = set()
    while name != BASE:
        if name not in parents or name in seen:
            return
        seen.add(name)
        yield name
        name = parents[name]
    yield BASE
