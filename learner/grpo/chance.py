"""The shuffle gate: do the rewards of sessions say more than chance? Pure.

By its later steps a run has moved the policy. Where rewards mean something, the sessions that
became likelier meanwhile are those that ended better, in groups that no step has used yet. So each
group of sessions of a later step gives

    t = sum of a * c     over its sessions; a: reward minus the mean of the others'; c: mean over
                         its tokens of pi / pi_0 - 1, by which they became likelier since the run
                         began. Its mean is 0 in every context: of log(pi / pi_0) it would not be,
                         and rewards that depend on the user alone would look like a signal
    v = sum of a^2 * sum of (c - mean c)^2 / (n - 1)

v is the variance of t over all ways to give the group's rewards to its n sessions, by which its
mean is 0. z = sum of t / sqrt(sum of v) over the groups of a run. One run tells little, so that the
z of the line's runs are pooled: sum of DECAY^k z_k / sqrt(sum of DECAY^2k), k = 0 for this run.
Nothing is learned from sessions while |z| is not over `LEAST`, nor by a run in which no step could
tell. A large negative z is a signal too: other groups of the run pushed against what makes tasks
end well.

On a simulated site (`make bench BENCH=tasks`, 16 nights, 20 seeds) this keeps 0.52 of the gain of
0.53, and where outcomes are shuffled it moves the policy by 0.19 of that in place of 0.33. By each
run alone, without pooling, it would keep 0.46 at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from learner.grpo.advantages import leave_one_out, session_scores
from learner.records import TrainingGroup
from sidecar.visible import counted

BY_CHANCE = "by_chance"
"""Reason of groups of sessions whose rewards say no more than chance."""
LEAST = 1.0
"""Exceeded, to either side, by a third of the runs whose rewards mean nothing, by a half where they
have two groups of two sessions. At 1.28, a fifth of them, a site of 26 sessions a night gains 0.20
in place of 0.28 (`make bench BENCH=tasks`)."""
LEAST_STEPS = 3
"""Of a run with sessions: two thirds of them are compared. With two steps a half is, and one user
with nine tenths of the sessions of a small site took 0.10 of its gain in place of 0.05."""
MOST = 3.0
"""z of a run is cut to this: a huge one, of few sessions, let a dozen later runs learn."""
DECAY = 0.8
"""Weight of a run in the one after it: about five runs count."""
MOST_RUNS = 16
"""Earlier runs that are read; the weight of the next one would be 0.02."""


def number_of_steps(answers: int, sessions: int, per_step: int) -> int:
    """Return over how many steps so many groups of answers and of sessions are dealt."""
    least = max(min(LEAST_STEPS, sessions), 1)
    return min(max(least, round((answers + sessions) / per_step)), max(answers, sessions))


def deal(groups: Sequence[TrainingGroup], per_step: int) -> list[list[TrainingGroup]]:
    """Distribute the groups over steps of about `per_step` in turn; each group is used once, no
    step is empty.

    Groups of sessions are dealt by themselves, over `LEAST_STEPS` at least: the gate compares those
    of a step with what the steps before it learned from others.
    """
    kinds = [[one for one in groups if bool(one.sessions) is of] for of in (False, True)]
    steps = number_of_steps(len(kinds[0]), len(kinds[1]), per_step)
    return [[one for kind in kinds for one in kind[first::steps]] for first in range(steps)]


def alignment(rewards_G: Sequence[float], moved_G: Sequence[float]) -> tuple[float, float]:
    """Return (t, v) of G sessions, G > 1. moved_G: c of each."""
    a, mean = leave_one_out(rewards_G), math.fsum(moved_G) / len(moved_G)
    t = math.fsum(x * (y - mean) for x, y in zip(a, moved_G, strict=True))
    squares = math.fsum(x * x for x in a) * math.fsum((y - mean) ** 2 for y in moved_G)
    return t, squares / (len(a) - 1)


def of_group(group: TrainingGroup, moved_A: Sequence[float]) -> tuple[float, float]:
    """Return (t, v) of a group of sessions.

    moved_A: sum of pi / pi_0 - 1 over the tokens of each trainable row, in order.
    """
    rows = [row.trainable for row in group.rows]
    rewards = session_scores(group, rows)
    moved, tokens = dict.fromkeys(rewards, 0.0), dict.fromkeys(rewards, 0)
    left = iter(moved_A)
    for number, row in zip(group.sessions, group.rows, strict=True):
        if row.trainable:
            moved[number] += next(left)
            tokens[number] += row.kept_tokens
    return alignment(list(rewards.values()), [moved[one] / tokens[one] for one in rewards])


def score(found: Sequence[tuple[float, float]]) -> float | None:
    """Return z of a run, cut to `MOST`; None where no step could tell: it takes two.

    found: (t, v) of its groups, or their sums by step.
    """
    variance = math.fsum(v for _, v in found)
    if not variance:
        return None
    return max(-MOST, min(MOST, math.fsum(t for t, _ in found) / math.sqrt(variance)))


def pooled(z: float, before: Sequence[float]) -> float:
    """Return z of the line. before: z of its earlier runs, the newest first."""
    weights = [DECAY**k for k in range(len(before) + 1)]
    total = math.fsum(w * one for w, one in zip(weights, (z, *before), strict=True))
    return total / math.sqrt(math.fsum(w * w for w in weights))


def why_not(z: float | None, before: Sequence[float]) -> str | None:
    """Return why a run does not learn from its sessions; None: it does. before: as of `pooled`."""
    if z is None:
        return "no step could compare sessions with what others had taught: it takes two steps"
    of_line, runs = pooled(z, before), counted(len(before) + 1, "run")
    if abs(of_line) > LEAST + 1e-9:  # with two sessions |z| is 1, up to rounding
        return None
    said = f"z {of_line:.2f} over {runs}, of more than {LEAST}"
    return f"rewards of sessions say no more than chance: {said}"
