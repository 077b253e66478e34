"""Advantages: how much better an answer is than its siblings. Pure.

The baseline is over the answers that the policy could have given as it gave the others: those that
are trained on, the silent ones, which have no token to train on, and those of
`learner.grpo.answers.COUNTED`. An answer that is masked for another reason (greedy, truncated
sampling, drift) has no part in it, nor in the mean that identical answers share: it would push all
others one way.

By default there is no division by the group's standard deviation: it would amplify the judge's
noise in flat groups to full-size gradients. Flat groups are left out by a limit on the spread of
their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby
from statistics import fmean, mean, pstdev, stdev

from learner.errors import GroupTooSmallError
from learner.records import TrainingGroup

MIN_TRAINABLE = 2
"""Least trainable answers of a group: one alone has no sibling in the gradient to compare with."""
STD_FLOOR = 1e-4
"""Added to the standard deviation, as in TRL and verl."""

Advantages = Callable[[Sequence[float]], list[float]]


def center_rewards(rewards_G: Sequence[float]) -> list[float]:
    """Score each answer against its group: reward minus the group mean.

    rewards_G: [G] rewards, unitless 0..1, one per answer, G >= 2.
    Returns: [G] advantages, same unit and order; they sum to 0.
    Raises: GroupTooSmallError when G < 2.
    Source: Dr. GRPO, arXiv:2503.20783 (no division by the group's std).
    """
    _need_two(rewards_G)
    group_mean = mean(rewards_G)  # exact, so that equal rewards give exactly 0
    return [reward - group_mean for reward in rewards_G]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the mean of the other answers: G / (G - 1) times `center_rewards`.

    Source: RLOO, arXiv:2402.14740.
    """
    size = len(rewards_G)
    return [size / (size - 1) * one for one in center_rewards(rewards_G)]


def standardise(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the group mean, over the unbiased standard deviation plus `STD_FLOOR`.

    In standard deviations, so a group of small differences pushes as hard as one of large ones.
    Source: GRPO, arXiv:2402.03300; floor and the division by G - 1 as in TRL and verl.
    """
    centred = center_rewards(rewards_G)
    return [one / (stdev(rewards_G) + STD_FLOOR) for one in centred]


def rank(rewards_G: Sequence[float]) -> list[float]:
    """Rank from -0.5 (worst) to 0.5 (best) in equal distances; equal rewards share their mean rank.

    It keeps the order and drops the size of differences, for a judge whose scale drifts.
    Source: ranks in place of rewards, arXiv:2602.03876.
    """
    _need_two(rewards_G)
    order = sorted(range(len(rewards_G)), key=lambda place: rewards_G[place])
    ranks = [0.0] * len(rewards_G)
    first = 0
    for _, tied in groupby(order, key=lambda place: rewards_G[place]):
        places = list(tied)
        for place in places:
            ranks[place] = first + (len(places) - 1) / 2
        first += len(places)
    return [one / (len(rewards_G) - 1) - 0.5 for one in ranks]


ADVANTAGES: Mapping[str, Advantages] = {
    "mean": center_rewards,
    "leave_one_out": leave_one_out,
    "std": standardise,
    "rank": rank,
}
"""By the name that `learner.advantage` gives."""


def assign(rewards_G: Sequence[float], counted_G: Sequence[bool], method: str) -> list[float]:
    """Return [G] advantages among the answers that count in the baseline; 0 for the others.

    method: a key of `ADVANTAGES`. Raises: GroupTooSmallError when fewer than two count.
    """
    places = [place for place, counted in enumerate(counted_G) if counted]
    found = ADVANTAGES[method]([rewards_G[place] for place in places])
    advantages = [0.0] * len(rewards_G)
    for place, advantage in zip(places, found, strict=True):
        advantages[place] = advantage
    return advantages


def assign_rows(group: TrainingGroup, counted_G: Sequence[bool], method: str) -> list[float]:
    """Return [G] advantages of a group's rows: by `assign`, or between its sessions.

    Of a group of sessions each row has its session's reward minus the mean of the other sessions
    (which does not depend on what this one did), plus its step's own advantage, times its weight. A
    session counts while one of its rows does.
    Raises: GroupTooSmallError when fewer than two answers or sessions count.
    """
    if not group.sessions:
        return assign(group.scores, counted_G, method)
    of_session = session_scores(group, counted_G)
    found = dict(zip(of_session, leave_one_out(list(of_session.values())), strict=True))
    rows = zip(group.sessions, group.weights, group.steps, counted_G, strict=True)
    return [weight * (found[one] + step) if counts else 0.0 for one, weight, step, counts in rows]


def session_scores(group: TrainingGroup, counted_G: Sequence[bool]) -> dict[int, float]:
    """Return the reward of each session of which a row counts; of each answer where a group is
    not of sessions."""
    numbers = group.sessions or range(len(group.scores))
    rows = zip(numbers, group.scores, counted_G, strict=True)
    return {number: score for number, score, counts in rows if counts}


def text_key(token_ids: Sequence[int], temperature: float) -> Hashable:
    """Return what answers that are the same have in common: tokens at one temperature, or none."""
    return (tuple(token_ids), temperature if token_ids else None)


def share(
    rewards_G: Sequence[float], texts_G: Sequence[Hashable], counted_G: Sequence[bool]
) -> tuple[float, ...]:
    """Return [G] rewards, of which answers that are the same share their mean.

    Whatever made the rewards of one text differ (feedback, the judge), it says nothing about the
    text; and the gradients of different advantages would cancel up to their rounding. Answers that
    do not count keep their rewards, and have no part in the mean.

    texts_G: their `text_key`.
    """
    alike: dict[Hashable, list[int]] = {}
    for place, (text, counted) in enumerate(zip(texts_G, counted_G, strict=True)):
        if counted:
            alike.setdefault(text, []).append(place)
    shared = list(rewards_G)
    for places in alike.values():
        found = [rewards_G[place] for place in places]
        if len(set(found)) > 1:
            for place in places:
                shared[place] = fmean(found)
    return tuple(shared)


MIN_SPREAD = 0.02
"""Groups whose scores have a smaller standard deviation are left out while the noise of their judge
is not known. Where it is measured the limit is by it (`learner.runs.selection.spread_gate`)."""
REFERENCE_SPREAD = 0.25
"""Signal of a group, in score units, above which the rate no longer grows with it
(`learner.grpo.optimizer`)."""


def spread(rewards_G: Sequence[float]) -> float:
    """Population standard deviation of a group's scores, in score units.

    The range would grow with G; the standard deviation does not.
    Raises: GroupTooSmallError when G < 2.
    """
    _need_two(rewards_G)
    return pstdev(rewards_G)


def group_spread(group: TrainingGroup, counted_G: Sequence[bool]) -> float:
    """Return the `spread` of the rewards of a group's sessions, or answers, that count."""
    return spread(list(session_scores(group, counted_G).values()))


def _need_two(rewards_G: Sequence[float]) -> None:
    if len(rewards_G) < 2:
        raise GroupTooSmallError(f"need at least 2 rewards, got {len(rewards_G)}")
