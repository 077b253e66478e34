"""Decide which exchanges become groups, and why the others do not. Pure and deterministic.

A hash of the exchange's id selects the share `rate`, so an exchange gets the same decision in every
process and after every restart. First it is checked whether an exchange is fit for learning, then
whether it is wanted; only decisions of `backlog` are made again, when there is room.

A user's turn counts once. Of the exchanges of one turn (a request and the client's retries of it)
that are fit, only the last becomes a group; once one of them was decided, those that arrive later
are too late. So each turn has at most one group, and the counts by reason do not depend on the
order or the batches of arrival.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.grouping.features import (
    Features,
    StructuredOutput,
    Turn,
    counts_elsewhere,
    dump_choice,
    last_of_each_turn,
    mask_of,
    why_refused,
)
from ingest.grouping.request import (
    FLAG,
    UNKNOWN,
    EngineFacts,
    LogprobsMode,
    fill,
    has_media,
    load_facts,
    served_answers,
    state,
)
from ingest.grouping.same_prompt import (
    JOINED,
    MIN_FREE,
    NONE_SHARED,
    NOTHING_ALIKE,
    Choose,
    Draw,
    Joins,
    JoinServed,
    SamePrompts,
    Sibling,
    draw,
    exact,
    joined_answers,
)
from ingest.records import Answer, Group
from sidecar.lines import line_name
from sidecar.records import BASE, IMPORTED, Exchange
from sidecar.routing.table import decode_table
from sidecar.settings import SamplingField, Settings
from sidecar.store.database import DAMAGE, get_flag
from sidecar.store.models import AliasRow, RoutingRow

# The cap by near-identical prompt, and why a group was chosen. Pure.

NEAR_CAP: Final = "near_prompt_cap"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKeys:
    """What the groups of an exchange are found by."""

    project: str
    near: str | None = None
    """Shared by near-identical prompts."""
    opening: str | None = None
    """Shared by steps with the same system prompt and tools."""

    def columns(self, drawn: Draw, features: Features | None) -> dict[str, object]:
        """Return the columns of a new group that say why it was chosen."""
        return {
            "project": self.project,
            "near_key": self.near,
            "opening_key": self.opening,
            "propensity": drawn.propensity,
            "chosen_because": dump_choice(features, drawn.reason),
        }


# Fair shares of the places for groups, by project, then key, then user. Pure.

SHARE: Final = 0.2
"""Part of the places that one caller may hold whatever the others ask: with five callers who have
enough, each gets a fifth."""
DAY_S: Final = 86_400.0


class Caller(NamedTuple):
    """Who asked. What a client may invent, the user, counts within what it cannot, its key."""

    project: str
    key_id: str = ""
    user: str = ""


def daily_demand(
    asked: Iterable[tuple[Caller, float]], *, now: float, each: float = 1.0
) -> dict[Caller, float]:
    """Return the exchanges a day of each caller.

    asked: caller and time of recent exchanges. each: how many exchanges one of them stands for.
    """
    recent = [(caller, at) for caller, at in asked if now - DAY_S <= at <= now]
    if not recent:
        return {}
    seen_s = max(now - min(at for _, at in recent), 1.0)
    number = Counter(caller for caller, _ in recent)
    return {caller: found * each * DAY_S / seen_s for caller, found in number.items()}


def fill_level(demands: Iterable[float], places: float) -> float:
    """Return the level at which the demands, each cut there, fill the places; infinity when they
    do not. Source: max-min fairness by progressive filling."""
    rest, ordered = places, sorted(demands)
    for number, demand in enumerate(ordered):
        level = rest / (len(ordered) - number)
        if demand >= level:
            return level
        rest -= demand
    return float("inf")


class Shares:
    """Who holds how many places, while a batch is decided."""

    def __init__(
        self, places: int, held: Mapping[Caller, int], demand: Mapping[Caller, float]
    ) -> None:
        """held: places by caller. demand: exchanges a day; a caller without one adds nothing."""
        self._least = SHARE * places
        self._held: Counter[tuple[str, ...]] = Counter()
        for caller, number in held.items():
            self.take(caller, number)
        self._demand: dict[tuple[str, ...], dict[str, float]] = {}
        for caller, asked in demand.items():
            for depth in range(3):
                below = self._demand.setdefault(tuple(caller[:depth]), {})
                below[caller[depth]] = below.get(caller[depth], 0.0) + asked
        self._caps: dict[tuple[str, ...], float] = {(): float(places)}

    def has_room(self, caller: Caller) -> bool:
        """Tell whether one more place is within the shares, which are rounded up: rounded down,
        some places would stay empty."""
        return all(self._held[path] < self._cap(path) for path in _paths(caller))

    def take(self, caller: Caller, number: int = 1) -> None:
        for path in _paths(caller):
            self._held[path] += number

    def _cap(self, path: tuple[str, ...]) -> float:
        if path not in self._caps:
            beside = self._demand.get(path[:-1], {})
            level = fill_level(beside.values(), self._cap(path[:-1]))
            self._caps[path] = max(self._least, level)
        return self._caps[path]


def _paths(caller: Caller) -> list[tuple[str, ...]]:
    return [tuple(caller[:depth]) for depth in (1, 2, 3)]


STAGE = "selection"
"""Stage of the counters of reasons."""
CHOSEN = "chosen"
HELD_OUT = "held_out"
REHEARSAL = "rehearsal"
"""No user asked: what a rehearsal says is compared as a whole session (`ingest.tasks`)."""
BACKLOG = "backlog"
RATE = "rate"
SESSION_CAP = "session_cap"
RETRIED_TURN = "retried_turn"
TOO_LONG = "untrainable:prompt_too_long"
"""The learner would leave the group out (`too_long`) after its candidates and scores were paid."""
CUT = "cut"
"""`outcome`, and `untrainable_reason`, of an exchange whose client left."""
TURN_DECIDED = (CHOSEN, RATE, SESSION_CAP, NEAR_CAP)
"""Reasons that decide a whole turn: the turn's other exchanges then do not count."""
CHOSEN_SURFACES = frozenset({"chat"})
"""Surfaces whose exchanges can become groups. Candidates are sampled with chat requests
(`ingest.vllm.sampler`), and the judge is shown their messages. A plain completion has a prompt text
and no messages; the other surfaces give no token ids."""
REASON_LENGTH = 64
"""Length of the columns that hold a reason, in characters."""
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of parsing bytes that an agent sent; the last one for very deep nesting."""


SESSION_WINDOW_S = 86_400.0
"""Older groups of a session do not count against `groups.max_groups_per_session`."""
UNIFORM_SHARE = 0.1
"""With `groups.choose = "prefer"`, the share of `rate` that draws steps whatever their features
say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The operator's rules: settings of the same names, and facts about vLLM."""

    size: int
    rate: float
    settle_s: float = 0.0
    """An exchange is decided so long after it was stored, in seconds."""
    max_groups_per_session: int
    session_window_s: float = SESSION_WINDOW_S
    """Groups of a session older than this do not count against the cap."""
    max_pending_groups: int
    logprobs_mode: LogprobsMode
    sampling_defaults: Mapping[SamplingField, float] | None = None
    """Setting `serving.sampling_defaults`; None: not stated."""
    facts: EngineFacts = UNKNOWN
    """Measured facts about vLLM."""
    max_trained_tokens: int | None = None
    """`learner.pack_tokens`: longest prompt with one answer that is trained on; None: no limit."""
    learner_tells: bool = False
    """True: that limit is what the learner found, once it has told."""
    structured_output: StructuredOutput = "off"
    join_served: JoinServed = "off"
    choose: Choose = "uniform"
    uniform_share: float = UNIFORM_SHARE
    max_groups_per_near_prompt: int = 0
    """Within `session_window_s`; 0: no limit."""
    own_adapters: tuple[str, ...] = ()
    """Projects with a line of adapters of their own."""
    verified: bool = False
    """True: verifiers check groups, also those whose scores come from a best-of-N request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """The state of the store when a batch is decided."""

    live_adapters: frozenset[str]
    """Champion and canary; learning about any other adapter comes too late."""
    own_live: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Project -> champion and canary of its own line, where it has one."""
    pending_groups: int
    """Number of groups that wait for candidates, the judge or a run."""
    held_places: Mapping[Caller, int] = field(default_factory=dict)
    """The same groups by who asked."""
    demand: Mapping[Caller, float] = field(default_factory=dict)
    """Exchanges a day by who asked."""
    groups_by_session: Mapping[str, int]
    """Session id -> number of groups that the session had lately."""
    sessions: Mapping[str, str] = field(default_factory=dict)
    """Exchange id -> session id, where it is not the session's key."""
    decided_turns: frozenset[Turn] = frozenset()
    """Turns that an earlier batch decided (`TURN_DECIDED`)."""
    keys: Mapping[str, GroupKeys] = field(default_factory=dict)
    """Exchange id -> what its group is counted by."""
    groups_by_near: Mapping[str, int] = field(default_factory=dict)
    features: Mapping[str, Features] = field(default_factory=dict)
    """Exchange id -> features; needed with `prefer` alone."""
    alike: SamePrompts = NOTHING_ALIKE
    """What the store holds of the same prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision on one exchange."""

    exchange_id: str
    reason: str
    """Either "chosen" or the reason why not."""
    group: Group | None
    """The new group with its served answers; None when it was not chosen."""
    complete: bool = False
    """The group gets no candidates."""
    joins: tuple[str, tuple[Answer, ...]] | None = None
    """The group, still being sampled, that gets these answers of the exchange."""
    chosen: Mapping[str, object] | None = None
    """Columns of the new group that say why it was chosen."""
    siblings: tuple[Sibling, ...] = ()
    """Exchanges of earlier batches whose answers the group has."""


def select_exchanges(
    batch: Sequence[tuple[Exchange, bool]], store_state: StoreState, rules: Rules
) -> list[Decision]:
    """Decide a batch; each chosen exchange leaves less room for later ones.

    Exchanges whose own answers make a group, which costs no token, come first, then the others in
    the order given.

    batch: (exchange, whether its session is held out). It must also hold the exchanges in the
        backlog that belong to the turns of new ones.
    """
    pending = store_state.pending_groups
    shares = Shares(rules.max_pending_groups, store_state.held_places, store_state.demand)
    by_session = dict(store_state.groups_by_session)
    by_near, most = dict(store_state.groups_by_near), rules.max_groups_per_near_prompt
    read = [
        (exchange, request, _why_unfit(exchange, request, held_out, live, rules))
        for exchange, held_out in batch
        for request in (_object(exchange.request),)
        for live in (store_state.own_live.get(exchange.project, store_state.live_adapters),)
    ]
    counting = last_of_each_turn([exchange for exchange, _, unfit in read if unfit is None])
    joins = Joins(store_state.alike, rules.join_served, lambda one: _served(one, None, rules))
    fit = []
    for exchange, request, reason in read:
        if reason is None and counts_elsewhere(exchange, counting, store_state.decided_turns):
            reason = RETRIED_TURN
        session_id = store_state.sessions.get(exchange.exchange_id, exchange.session_key)
        if reason is None:
            joins.add(exchange, session_id)
        fit.append((exchange, request, reason, session_id))
    decisions: dict[str, Decision] = {}
    fit.sort(key=lambda one: one[2] is not None or not _is_free(one[0], one[1], rules))
    for exchange, request, reason, session_id in fit:
        in_session = by_session.get(session_id, 0)
        if reason is None and exchange.exchange_id in joins.taken:
            reason = JOINED
        open_group = joins.open_group(exchange, session_id) if reason is None else None
        if open_group is not None:
            reason = JOINED
            joins.taken.add(exchange.exchange_id)
        complete, found, group, chosen = False, NONE_SHARED, None, None
        if reason is None:
            own = _served(exchange, request, rules)
            found = joins.find(exchange, session_id, room=rules.size - len(own))
            free = len(exact(own, source="")) + len(found.answers) >= min(MIN_FREE, rules.size)
            drawn = _draw(exchange, store_state, rules)
            complete = not drawn.drawn and free and rules.join_served != "off"
            if complete:
                drawn = Draw(True, 1.0, "served_answers")
            keys = store_state.keys.get(exchange.exchange_id, GroupKeys(project=exchange.project))
            reason = (
                (None if drawn.drawn else RATE)
                or (NEAR_CAP if most and by_near.get(keys.near or "", 0) >= most else None)
                or _why_no_room(in_session, pending, rules)
                or (None if shares.has_room(caller_of(exchange)) else BACKLOG)
            )
        if reason is None:
            group = _make_group(
                exchange, request or {}, rules, session_id=session_id, more=found.answers
            )
            joins.take(exchange, found)
            for name in found.mates:
                if name in decisions:  # left out before, for its cost
                    decisions[name] = replace(decisions[name], reason=JOINED)
            chosen = keys.columns(drawn, store_state.features.get(exchange.exchange_id))
            pending += 1
            shares.take(caller_of(exchange))
            by_session[session_id] = in_session + 1
            if keys.near is not None:
                by_near[keys.near] = by_near.get(keys.near, 0) + 1
        decisions[exchange.exchange_id] = Decision(
            exchange_id=exchange.exchange_id,
            reason=(reason or CHOSEN)[:REASON_LENGTH],
            group=group,
            complete=complete,
            chosen=chosen,
            joins=open_group,
            siblings=found.siblings if group is not None else (),
        )
    return [decisions[name] for name in dict.fromkeys(one.exchange_id for one, _ in batch)]


def caller_of(exchange: Exchange) -> Caller:
    return Caller(exchange.project, exchange.key_id, exchange.user)


def _is_free(exchange: Exchange, request: Mapping[str, Any] | None, rules: Rules) -> bool:
    """Return True when the exchange's own answers make a group without a candidate (`n` > 1)."""
    if rules.join_served == "off" or len(exchange.choices) < 2:
        return False
    return len(exact(_served(exchange, request, rules), source="")) >= min(MIN_FREE, rules.size)


def group_id_of(exchange_id: str) -> str:
    """Return the id of an exchange's one group: choosing the exchange twice has no effect."""
    return "g-" + hashlib.sha256(exchange_id.encode()).hexdigest()[:24]


def _why_unfit(
    exchange: Exchange,
    request: Mapping[str, Any] | None,
    held_out: bool,
    live_adapters: frozenset[str],
    rules: Rules,
) -> str | None:
    """Return the reason why the exchange is unfit for learning, or None."""
    if exchange.origin not in ("user", IMPORTED):
        return REHEARSAL
    if held_out:
        return HELD_OUT
    unanswered = _is_prompt_alone(exchange)
    if (exchange.outcome != "ok" and not unanswered) or exchange.status != 200:
        return "outcome"
    if exchange.untrainable_reason is not None and not unanswered:
        return f"untrainable:{exchange.untrainable_reason}"
    if exchange.surface not in CHOSEN_SURFACES:
        return "surface"
    if not exchange.prompt_token_ids:
        return "untrainable:no_prompt_token_ids"
    most = rules.max_trained_tokens
    if most is not None and len(exchange.prompt_token_ids) > most:
        return TOO_LONG
    if request is None:
        return "untrainable:request_not_json"
    refused = why_refused(
        request, rules.facts.grammar, mode=rules.logprobs_mode, structured=rules.structured_output
    )
    if refused is not None:
        return f"untrainable:{refused}"
    if has_media(request):
        return "untrainable:prompt_has_media"
    if most is not None and _trained_tokens(exchange, request, rules) > most:
        return TOO_LONG
    if not exchange.choices and not unanswered:
        return "no_answer"
    return None if exchange.adapter in live_adapters else "stale_adapter"


def _trained_tokens(exchange: Exchange, request: Mapping[str, Any], rules: Rules) -> int:
    """Return the longest input that the learner would have to compute for the served answers.

    Their last tokens are predicted, and not computed (`learner.policy.packing.packed_length`).
    """
    served = _served(exchange, request, rules)
    own = [len(answer.token_ids) for answer in served if answer.untrainable_reason is None]
    return len(exchange.prompt_token_ids) + max(own, default=1) - 1


def _is_prompt_alone(exchange: Exchange) -> bool:
    """Return True when the prompt may start a group, and what was recorded is no answer of it.

    The client left before the answer was complete: answers that nobody waits for are among those to
    learn from, and this one was cut by the client and not by the model. Or it was imported, and
    another model answered.
    """
    left = exchange.outcome == CUT and exchange.untrainable_reason in (None, CUT)
    return left or exchange.untrainable_reason == IMPORTED


def _draw(exchange: Exchange, store_state: StoreState, rules: Rules) -> Draw:
    """Draw a fit exchange. A retry draws what its turn drew: else a turn would have one more chance
    with each."""
    return draw(
        exchange.turn_id or exchange.exchange_id,
        store_state.features.get(exchange.exchange_id, Features()),
        choose=rules.choose,
        rate=rules.rate,
        uniform_share=rules.uniform_share,
    )


def _why_no_room(in_session: int, pending: int, rules: Rules) -> str | None:
    if in_session >= rules.max_groups_per_session:
        return SESSION_CAP
    return BACKLOG if pending >= rules.max_pending_groups else None


def judged_group(
    exchange: Exchange,
    held_out: bool,
    *,
    live_adapters: frozenset[str],
    session_id: str,
    in_session: int,
    rules: Rules,
) -> Group | str:
    """Build a group of the reply's answers alone, for scores that exist already.

    Such a group costs nothing more, so `rate` and the backlog do not apply. The session's cap does,
    because it keeps one session from filling a run.
    Returns: the group, or the reason why there is none.
    """
    request = _object(exchange.request)
    reason = _why_unfit(exchange, request, held_out, live_adapters, rules)
    if reason is None and in_session >= rules.max_groups_per_session:
        reason = "session_cap"
    if reason is not None:
        return reason[:REASON_LENGTH]
    rules = replace(rules, size=len(exchange.choices))
    group = _make_group(exchange, request or {}, rules, session_id=session_id)
    masks = [answer.untrainable_reason for answer in group.answers]
    if masks.count(None) < 2:
        masked_by = next((mask for mask in masks if mask is not None), "alone")
        return f"masked_by_{masked_by}"[:REASON_LENGTH]
    return group


def _make_group(
    exchange: Exchange,
    request: Mapping[str, Any],
    rules: Rules,
    *,
    session_id: str,
    more: Sequence[Answer] = (),
) -> Group:
    own = _served(exchange, request, rules)
    return Group(
        group_id=group_id_of(exchange.exchange_id),
        exchange_id=exchange.exchange_id,
        session_key=exchange.session_key,
        session_id=session_id,
        project=exchange.project,
        adapter=exchange.adapter,
        request=exchange.request,
        prompt_token_ids=exchange.prompt_token_ids,
        masked_by=mask_of(request, rules.facts.grammar),
        answers=tuple(joined_answers(own, more, size=rules.size)),
    )


def exact_answers(exchange: Exchange, rules: Rules) -> tuple[Answer, ...]:
    """Return the answers of an exchange with the reasons why they are not exact; none where the
    client left, or something forbade tokens or may have."""
    request = _object(exchange.request) or {}
    if mask_of(request, rules.facts.grammar) is not None:
        return ()
    return _served(exchange, request, rules)


def _served(
    exchange: Exchange, request: Mapping[str, Any] | None, rules: Rules
) -> tuple[Answer, ...]:
    """Return the first answers of an exchange's group. request: None: it is read again."""
    if _is_prompt_alone(exchange):
        return ()
    return served_answers(
        exchange,
        (_object(exchange.request) or {}) if request is None else request,
        sampling=fill(exchange.sampling, rules.sampling_defaults),
        defaults=rules.facts.defaults,
        mode=rules.logprobs_mode,
        limit=rules.size,
    )


def _object(data: bytes) -> Mapping[str, Any] | None:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except NOT_JSON:
        return None


# Inputs of selection besides the exchange: settings, facts about vLLM, live adapters.

log = structlog.get_logger()

TRAINABLE_FLAG = "learner_trainable_tokens"
"""Row of the `flag` table: the longest input that the learner's memory holds, written by it."""
UNTOLD_TOKENS = 2048
"""`learner.pack_tokens = "auto"` before the learner has told what it found."""


def rules_of(settings: Settings) -> Rules:
    """Build selection's rules from the settings."""
    return Rules(
        size=settings.groups.size,
        rate=settings.groups.rate,
        settle_s=settings.groups.settle_s,
        max_groups_per_session=settings.groups.max_groups_per_session,
        max_pending_groups=settings.learner.max_groups,
        logprobs_mode=settings.serving.logprobs_mode,
        sampling_defaults=settings.serving.sampling_defaults,
        facts=state(UNKNOWN, settings.serving),
        max_trained_tokens=settings.learner.pack_tokens or UNTOLD_TOKENS,
        learner_tells=not settings.learner.pack_tokens,
        structured_output="free_tokens",
        join_served="session",
        choose=settings.groups.choose,
        max_groups_per_near_prompt=settings.groups.max_groups_per_near_prompt,
        own_adapters=settings.serving.own_adapters,
        verified=bool(settings.reward.verifiers),
    )


def rules_now(session: Session, rules: Rules) -> Rules:
    """Add the latest facts about vLLM and the learner to the rules, where there are any."""
    found = get_flag(session, FLAG)
    if found is not None:
        rules = replace(rules, facts=load_facts(found))
    told = get_flag(session, TRAINABLE_FLAG) if rules.learner_tells else None
    return replace(rules, max_trained_tokens=int(told)) if told and told.isdecimal() else rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The adapters that serve now, in each line of adapters."""

    shared: frozenset[str]
    """Adapters that serve on the default line."""
    own: Mapping[str, frozenset[str]]
    """Project -> those of its own line, where it has one."""

    def of(self, project: str) -> frozenset[str]:
        """Return the adapters that answer a project's requests."""
        return self.own.get(project, self.shared)

    @property
    def all(self) -> frozenset[str]:
        return self.shared.union(*self.own.values())


def live_now(session: Session, model: str, rules: Rules) -> Live:
    """Return the adapters that serve now, in every line of a model."""
    return Live(
        shared=live_adapters(session, model),
        own={
            project: live_adapters(session, line_name(model, project))
            for project in rules.own_adapters
        },
    )


def live_adapters(session: Session, model: str) -> frozenset[str]:
    """Return the adapters that the routing table serves now; the base until there is a table.

    model: name of the line.

    A damaged table is not read: until control writes it anew, the champion alone counts.
    """
    row = session.get(RoutingRow, model)
    if row is None:
        return frozenset({BASE})
    try:
        table = decode_table(row.body)
    except DAMAGE as error:
        log.error("routing_table_damaged", model=model, why=f"{type(error).__name__}: {error}")
        alias = session.get(AliasRow, (model, "champion"))
        return frozenset({alias.adapter if alias is not None else BASE})
    return frozenset({table.champion, table.canary or table.champion})


def kept_adapters(session: Session, model: str) -> frozenset[str]:
    """Return the adapters that control keeps loaded in vLLM: those that serve, and the champion's
    and its predecessor's. model: name of the line."""
    aliases = session.scalars(select(AliasRow.adapter).where(AliasRow.model == model))
    return live_adapters(session, model) | frozenset(aliases)
