"""Answers that users got to one prompt: a group's answers that cost no sampling. Pure.

A regenerated answer, or the answer to a question that came again, is one more draw of the same
policy at the same prompt, so it is an answer of the same group as `n > 1` in one reply is. Two
exchanges are joined only when all of this holds, and then their answers differ by chance alone:

- the same adapter version answered, of one public model, for one project;
- the rendered prompts have the same token ids: a chat template that changed, or tools that were
  shown, differ there;
- the requests have the same sampling fields and fields that end an answer, and no `seed`, which
  would make one draw of two;
- the answers are exact and exchangeable (`exchangeable.served_answers`): their log-probabilities
  were recorded, at the temperature that candidates are sampled with.

By default both must stand in one session, so that no group holds what two users said, and what is
forgotten of a session is all there is of it.

A regeneration exists because a user was not content with the first answer. That makes such prompts
more frequent in groups, as a preference for hard prompts does; which answers a prompt gets, it does
not change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from ingest.grouping.features import Features, share_of
from ingest.grouping.request import PASSIVE_FIELDS
from ingest.records import Answer
from sidecar.records import Exchange
from sidecar.store.codec import pack_ids

JoinServed = Literal["off", "session", "project"]
JOINED: Final = "joined"
"""Reason of an exchange whose answers are part of another exchange's group."""
MIN_FREE: Final = 4
"""Served answers that make a group without a candidate, where `groups.rate` would have none: the
size from which judges rank well (`groups.size`)."""
KEY_BYTES: Final = 16
_NO_DIFFERENCE: Final = PASSIVE_FIELDS | {"messages", "n"}
"""Request fields that may differ: the messages are compared as token ids."""
_NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def prompt_key(exchange: Exchange) -> str | None:
    """Return a digest that exchanges share whose answers are draws of one distribution.

    Equal fields that are written differently (`1` and `1.0`) give different keys: an answer is then
    not joined, and nothing is wrong.
    Returns: 32 hex digits; None when the exchange can share none.
    """
    if (
        exchange.surface != "chat"
        or exchange.status != 200
        or exchange.outcome != "ok"
        or not exchange.choices
        or not exchange.prompt_token_ids
        or exchange.untrainable_reason is not None
        or exchange.sampling.seed is not None
    ):
        return None
    try:
        fields = msgspec.json.decode(exchange.request, type=dict[str, msgspec.Raw])
    except _NOT_JSON:
        return None
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for name in (exchange.project, exchange.public_model, exchange.adapter):
        digest.update(f"{len(name)}\0{name}".encode("utf-8", "surrogatepass"))
    for name in sorted(fields.keys() - _NO_DIFFERENCE):
        value = bytes(fields[name])
        digest.update(f"{name}\0{len(value)}\0".encode("utf-8", "surrogatepass"))
        digest.update(value)
    digest.update(b"\0ids")
    digest.update(pack_ids(exchange.prompt_token_ids))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """An exchange of the same prompt that an earlier batch left out only for its cost."""

    exchange: Exchange
    session_id: str
    selection: str
    """Why it was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamePrompts:
    """What the store holds of the prompts of a batch."""

    keys: Mapping[str, str]
    """Exchange id -> prompt key, of the batch."""
    left_out: Mapping[str, Sequence[Sibling]]
    """Prompt key -> exchanges that are in no group, the newest first."""
    open_groups: Mapping[tuple[str, str], str]
    """(prompt key, session id) -> a group that is still being sampled; the session is "" where
    sessions may be joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAnswers:
    """Answers of other exchanges for a group, and the exchanges that they are of."""

    answers: tuple[Answer, ...] = ()
    mates: tuple[str, ...] = ()
    """Exchanges of the same batch that join the group."""
    siblings: tuple[Sibling, ...] = ()
    """Exchanges of earlier batches that join it."""


NONE_SHARED: Final = SharedAnswers()
NOTHING_ALIKE: Final = SamePrompts(keys={}, left_out={}, open_groups={})


def place_of(key: str, session_id: str, join: JoinServed) -> tuple[str, str]:
    """Return what exchanges must share to be joined."""
    return key, session_id if join == "session" else ""


def exact(answers: Iterable[Answer], *, source: str) -> list[Answer]:
    """Return the answers that take part in the gradient, as answers of another exchange's group."""
    return [
        replace(answer, exchange_id=source)
        for answer in answers
        if answer.untrainable_reason is None
    ]


def joined_answers(own: Sequence[Answer], more: Iterable[Answer], *, size: int) -> list[Answer]:
    """Return a group's first answers, numbered: its own, then the joined ones, up to `size`."""
    return [replace(answer, index=at) for at, answer in enumerate([*own, *more][:size])]


class Joins:
    """Finds the exchanges of a batch, and of earlier ones, that are answers of one group."""

    def __init__(
        self,
        alike: SamePrompts,
        join: JoinServed,
        answers_of: Callable[[Exchange], Sequence[Answer]],
    ) -> None:
        """answers_of: an exchange's own served answers."""
        self._alike = alike
        self._join = join
        self._answers_of = answers_of
        self._mates: dict[tuple[str, str], list[Exchange]] = {}
        self.taken: set[str] = set()
        """Exchanges whose answers a group has."""

    def add(self, exchange: Exchange, session_id: str) -> None:
        """Say that this exchange of the batch may be joined."""
        place = self._place(exchange, session_id)
        if place is not None:
            self._mates.setdefault(place, []).append(exchange)

    def open_group(
        self, exchange: Exchange, session_id: str
    ) -> tuple[str, tuple[Answer, ...]] | None:
        """Return the group that is being sampled for this prompt, with the answers that it gets."""
        place = self._place(exchange, session_id)
        group_id = None if place is None else self._alike.open_groups.get(place)
        if group_id is None:
            return None
        answers = exact(self._answers_of(exchange), source=exchange.exchange_id)
        return (group_id, tuple(answers)) if answers else None

    def find(self, exchange: Exchange, session_id: str, *, room: int) -> SharedAnswers:
        """Find other exchanges' answers for a group of this exchange, at most `room` of them.

        room: answers that the group lacks; a group that has enough leaves the others alone.
        """
        place = self._place(exchange, session_id)
        if place is None:
            return NONE_SHARED
        answers: list[Answer] = []
        mates: list[str] = []
        siblings: list[Sibling] = []
        for mate in self._mates.get(place, ()):
            own = mate.exchange_id == exchange.exchange_id
            if own or mate.exchange_id in self.taken or len(answers) >= room:
                continue
            if more := exact(self._answers_of(mate), source=mate.exchange_id):
                answers += more
                mates.append(mate.exchange_id)
        for sibling in self._alike.left_out.get(place[0], ()):
            if len(answers) >= room:
                break
            if place_of(place[0], sibling.session_id, self._join) != place:
                continue
            source = sibling.exchange.exchange_id
            if source in self.taken:
                continue
            if more := exact(self._answers_of(sibling.exchange), source=source):
                answers += more
                siblings.append(sibling)
        return SharedAnswers(
            answers=tuple(answers[:room]), mates=tuple(mates), siblings=tuple(siblings)
        )

    def take(self, exchange: Exchange, found: SharedAnswers) -> None:
        """Say that this exchange has a group, with these answers."""
        self.taken.add(exchange.exchange_id)
        self.taken.update(found.mates)
        self.taken.update(one.exchange.exchange_id for one in found.siblings)

    def _place(self, exchange: Exchange, session_id: str) -> tuple[str, str] | None:
        key = self._alike.keys.get(exchange.exchange_id)
        if self._join == "off" or key is None:
            return None
        return place_of(key, session_id, self._join)


# Prefer the steps where answers are likely to differ. Pure and seeded.

Choose = Literal["uniform", "prefer"]
PRIOR_GROUPS: Final = 2.0
"""Groups without an outcome that every opening is credited with: a new one is neither good nor
bad."""
PRIOR_SPREAD: Final = 0.5
STEEPNESS: Final = 6.0
"""Exponent by which the chance to be drawn falls below the pivot."""
PIVOT: Final = 0.6
"""Chance of a spread from which a step is always kept."""
WEIGHTS: Final[Mapping[str, float]] = {
    "bias": 0.58,
    "surprisal": -0.17,
    "forks": 0.30,
    "cut": -0.80,
    "log_tokens": -0.59,
    "earlier": 1.08,
}
"""Log-odds."""
DECIDES: Final = 0.5
"""Log-odds that the first choice of a tool, or a final answer, has over the steps between them,
which mostly follow from what a tool gave: not fitted, for the recording has no such steps."""
TOLD: Final = 1.0
"""Log-odds that a user's discontent adds: not fitted, for the recording has no users. Whoever asks
again says that a better answer was possible."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Whether a step is drawn, with what probability, and why."""

    drawn: bool
    propensity: float
    """Probability of being drawn given the features, 0..1; caps and the backlog come after it."""
    reason: str


def inputs(features: Features) -> dict[str, float]:
    """Return the inputs of the logistic model, each of the order of 1."""
    share = (features.earlier_spread + PRIOR_GROUPS * PRIOR_SPREAD) / (
        features.earlier + PRIOR_GROUPS
    )
    return {
        "bias": 1.0,
        "surprisal": min(features.surprisal, 5.0),
        "forks": features.forks,
        "cut": float(features.cut),
        "log_tokens": math.log1p(min(features.tokens, 4_096)) / 4,
        "earlier": math.log(share / (1 - share)),
    }


def prior(features: Features) -> float:
    """Return the log-odds of what is not fitted."""
    decides = features.tool_choice or features.final_answer
    return DECIDES * decides + TOLD * (features.corrected or features.negative)


def chance_of_spread(features: Features) -> float:
    """Estimate the probability that a group of this step has a spread, 0..1."""
    logit = sum(WEIGHTS[name] * value for name, value in inputs(features).items())
    logit += prior(features)
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, logit))))


def propensity(features: Features, *, rate: float, uniform_share: float) -> float:
    """Return the probability to draw a step: `rate` times a keep of at least `uniform_share`."""
    kept: float = min(1.0, (chance_of_spread(features) / PIVOT) ** STEEPNESS)
    return rate * (uniform_share + (1 - uniform_share) * kept)


def draw(
    name: str, features: Features, *, choose: Choose, rate: float, uniform_share: float
) -> Draw:
    """Draw a step by a hash of its name: the same in every process and after every restart."""
    if choose == "uniform":
        return Draw(share_of(f"rate\x00{name}") < rate, rate, "uniform")
    probability = propensity(features, rate=rate, uniform_share=uniform_share)
    luck = share_of(f"rate\x00{name}")
    reason = "uniform_share" if luck < rate * uniform_share else "likely_spread"
    return Draw(luck < probability, probability, reason)
