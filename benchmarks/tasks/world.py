"""A simulated site whose sessions are grouped, rewarded and compared by the product's own code.

A session has 6 steps of 4 actions. Two steps are traps: the action that looks best costs the task
most. The policy is a table of logits; a night's sessions are drawn from it, and some steps of
gradient ascent follow. Only the site and the policy are simulated: who is compared with whom is
`ingest.tasks.keys.draw`, the reward is `ingest.tasks.rewards.reward_of`, the advantage is
`learner.grpo.advantages`, and whether the night is learned from is `learner.grpo.chance`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ingest.tasks.keys import Ready, draw
from ingest.tasks.rewards import Outcome, Scale, reward_of
from learner.grpo.advantages import ADVANTAGES
from learner.grpo.chance import LEAST, MOST_RUNS, alignment, number_of_steps, pooled, score
from sidecar.settings import Learner

Floats = NDArray[np.float64]
STEPS, ACTIONS = 6, 4
TRAPS: Final = (1, 4)
"""Steps at which action 0 looks best and costs most."""
SESSIONS: Final = 256
"""Of a night."""
TEMPLATES: Final = 8
SIZE: Final = 4
"""Sessions of a group, and answers of a next-action group."""
RATE: Final = 3.0
"""Logits that a night moves for an advantage of 1 in every session. The same in all cases."""
PER_STEP: Final = Learner().groups_per_step
DIFFICULTY: Final = 0.3
"""Standard deviation of the tasks' difficulty, in logits of success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What actions do and how they look. Both [STEPS, ACTIONS]."""

    effect: Floats
    """Logits of success."""
    looks: Floats

    @property
    def best(self) -> float:
        """The value of the best policy."""
        return float(self.effect.max(axis=1).sum())

    def value(self, logits: Floats) -> float:
        """The expected effect of a session of this policy."""
        return float((policy(logits) * self.effect).sum())

    def gained(self, logits: Floats) -> float:
        """Share of the possible gain over the uniform policy; negative: it became worse."""
        start = self.value(np.zeros_like(logits))
        return (self.value(logits) - start) / (self.best - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One session."""

    actions: tuple[int, ...]
    ready: Ready
    template: int
    outcomes: tuple[Outcome, ...]


def site(rng: np.random.Generator) -> Site:
    """Draw a site: small honest differences, and the two traps."""
    effect = rng.normal(0.0, 0.2, (STEPS, ACTIONS))
    looks = effect.copy()
    for step in TRAPS:
        effect[step] = (-1.0, 0.4, 0.2, 0.4)
        looks[step] = (1.0, 0.0, 0.1, 0.0)
    return Site(effect=effect, looks=looks)


def policy(logits: Floats) -> Floats:
    """Softmax over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def play(place: Site, logits: Floats, rng: np.random.Generator, night: int) -> list[Played]:
    """Play a night: each session is another user's."""
    chosen = _sample(policy(logits), SESSIONS, rng)
    scores = place.effect[np.arange(STEPS), chosen].sum(axis=1)
    succeeded = rng.random(SESSIONS) < _chance(scores + rng.normal(0.0, DIFFICULTY, SESSIONS))
    found = []
    for number, (row, success) in enumerate(zip(chosen, succeeded.tolist(), strict=True)):
        actions, name = tuple(row.tolist()), f"{night}-{number}"
        found.append(
            Played(
                actions=actions,
                ready=Ready(session_id=name, caller=f"user:{name}", began_at=float(number)),
                template=int(rng.integers(TEMPLATES)),
                outcomes=(Outcome(voice=name, received_at=0.0, success=success),),
            )
        )
    return found


def _sample(chances: Floats, number: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw [number, STEPS] actions."""
    drawn = rng.random((number, len(chances), 1))
    above = drawn >= chances.cumsum(axis=1)[None, :, :-1]
    return np.asarray(above.sum(axis=2))


def groups(played: Sequence[Played]) -> list[list[tuple[Played, float]]]:
    """Return groups of (session, reward), as the product draws and rewards them."""
    pools: dict[int, dict[str, tuple[Played, float]]] = defaultdict(dict)
    for one in played:
        reward = reward_of(one.outcomes, Scale())
        if reward is not None:  # nobody told how it ended: it is in no group
            pools[one.template][one.ready.session_id] = (one, reward)
    found = []
    for left in pools.values():
        while chosen := draw([one.ready for one, _ in left.values()], kind="template", size=SIZE):
            found.append([left.pop(one.session_id) for one in chosen])
    return found


Change = Callable[[list[Played], np.random.Generator], list[Played]]
"""What a case does to a night's sessions before they are grouped."""


def as_played(played: list[Played], _rng: np.random.Generator) -> list[Played]:
    return played


def shuffled(played: list[Played], rng: np.random.Generator) -> list[Played]:
    """Null: outcomes go to other sessions."""
    order = rng.permutation(len(played))
    return [
        replace(one, outcomes=played[at].outcomes) for one, at in zip(played, order, strict=True)
    ]


def survivors(played: list[Played], rng: np.random.Generator) -> list[Played]:
    """Half of the failures never tell."""
    return [
        one if one.outcomes[0].success or rng.random() < 0.5 else replace(one, outcomes=())
        for one in played
    ]


def few(played: list[Played], _rng: np.random.Generator) -> list[Played]:
    """A tenth of the sessions."""
    return [one for at, one in enumerate(played) if at % 10 == 0]


def one_user(played: list[Played], rng: np.random.Generator) -> list[Played]:
    """One user has nine tenths of the sessions, and his outcomes say nothing."""
    own = [bool(one) for one in rng.random(len(played)) < 0.5]
    return [
        one
        if at % 10 == 0
        else replace(
            one,
            ready=replace(one.ready, caller="user:one"),
            outcomes=(Outcome(voice="one", received_at=0.0, success=own[at]),),
        )
        for at, one in enumerate(played)
    ]


def liar(played: list[Played], _rng: np.random.Generator) -> list[Played]:
    """A key without the right to speak for others tells of each session 100 times the opposite,
    under invented sources, and at last the truth: a key is one voice."""
    return [
        replace(
            one,
            outcomes=(
                *(replace(one.outcomes[0], success=not one.outcomes[0].success),) * 100,
                replace(one.outcomes[0], received_at=1.0),
            ),
        )
        for one in played
    ]


Advantages = Callable[[Sequence[Sequence[float]]], list[float]]
"""Of the sessions of a step, from the rewards of its groups."""


def leave_one_out(rewards: Sequence[Sequence[float]]) -> list[float]:
    """The product's."""
    return [one for group in rewards for one in ADVANTAGES["leave_one_out"](group)]


def as_large(advantages: Advantages, others: Advantages) -> Advantages:
    """Return advantages that are multiplied, step by step, so that their sizes add up to those of
    the others: a step of both moves as much."""

    def found(rewards: Sequence[Sequence[float]]) -> list[float]:
        own, size = advantages(rewards), sum(map(abs, others(rewards)))
        return [one * size / (sum(map(abs, own)) or 1.0) for one in own]

    return found


def whole_tasks(
    place: Site,
    nights: int,
    rng: np.random.Generator,
    change: Change = as_played,
    *,
    advantages: Advantages = leave_one_out,
    gate: bool = True,
) -> Floats:
    """Learn from groups of sessions, as the learner does: with the gate a night whose rewards say
    no more than chance moves nothing. Returns: logits."""
    logits, signals = np.zeros((STEPS, ACTIONS)), list[float]()
    for night in range(nights):
        drawn = groups(change(play(place, logits, rng, night), rng))
        after, z = _run(logits, drawn, advantages)
        is_chance = gate and z is not None and abs(pooled(z, signals[:MOST_RUNS])) < LEAST
        if z is not None:
            signals.insert(0, z)
        logits = logits if is_chance else after
    return logits


def _run(
    logits: Floats, drawn: Sequence[Sequence[tuple[Played, float]]], advantages: Advantages
) -> tuple[Floats, float | None]:
    """Take the steps of a run. Returns: (logits after them, z of the run or None)."""
    after, found = logits, list[tuple[float, float]]()
    steps = number_of_steps(0, len(drawn), PER_STEP)
    for first in range(steps):
        dealt = drawn[first::steps]
        likelier = policy(after) / policy(logits) - 1.0
        rewards = [[reward for _, reward in group] for group in dealt]
        if first:
            moved = [
                [float(likelier[np.arange(STEPS), one.actions].mean()) for one, _ in group]
                for group in dealt
            ]
            found += [alignment(*both) for both in zip(rewards, moved, strict=True)]
        update = gradient(
            after, [one.actions for group in dealt for one, _ in group], advantages(rewards)
        )
        after = after + RATE / steps * update
    return after, score(found)


def gradient(
    logits: Floats, actions: Sequence[Sequence[int]], advantages: Sequence[float]
) -> Floats:
    """Return the policy gradient: the advantage goes to every step, a session counts as one."""
    chances, total = policy(logits), np.zeros_like(logits)
    for taken, advantage in zip(actions, advantages, strict=True):
        for step, action in enumerate(taken):
            total[step] -= advantage * chances[step]
            total[step, action] += advantage
    return total / max(1, len(actions))


def next_action(place: Site, nights: int, rng: np.random.Generator) -> Floats:
    """Learn from groups of answers to one step, scored by how they look."""
    logits = np.zeros((STEPS, ACTIONS))
    for _ in range(nights):
        chances, total = policy(logits), np.zeros_like(logits)
        for _ in range(SESSIONS // SIZE):
            for step, drawn in enumerate(_sample(chances, SIZE, rng).T):
                scores = place.looks[step, drawn] + rng.normal(0.0, 0.1, SIZE)
                advantages = ADVANTAGES["mean"](scores.tolist())
                for action, advantage in zip(drawn, advantages, strict=True):
                    total[step] -= advantage * chances[step]
                    total[step, action] += advantage
        logits = logits + RATE * total / SESSIONS
    return logits


def turns(nights: int, rng: np.random.Generator) -> tuple[float, float]:
    """Learn when to stop, where success does not depend on it. Returns: mean turns (before, after).

    A baseline by turn would favour sessions of another length (verl #7244).
    """
    longest = 12
    logits = np.full(longest - 1, -1.5)  # of stopping after a turn; the last one ends anyhow

    def mean_turns() -> float:
        return 1.0 + float(np.cumprod(1.0 - _chance(logits)).sum())

    before = mean_turns()
    for _ in range(nights):
        stops = _chance(logits)
        stopped = rng.random((SESSIONS, longest - 1)) < stops
        lengths = np.where(stopped.any(axis=1), stopped.argmax(axis=1) + 1, longest)
        played = [
            Played(
                actions=(int(length),),
                ready=Ready(session_id=str(at), caller=f"user:{at}", began_at=float(at)),
                template=at % TEMPLATES,
                outcomes=(Outcome(voice="", received_at=0.0, success=bool(rng.random() < 0.5)),),
            )
            for at, length in enumerate(lengths)
        ]
        total, count = np.zeros_like(logits), 0
        for group in groups(played):
            advantages = ADVANTAGES["leave_one_out"]([reward for _, reward in group])
            for (one, _), advantage in zip(group, advantages, strict=True):
                length = one.actions[0]
                total[:length] -= advantage * stops[:length]
                if length < longest:
                    total[length - 1] += advantage
                count += 1
        logits = logits + RATE * total / count
    return before, mean_turns()


def _chance(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))
