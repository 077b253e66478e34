"""What a ramp says of a candidate: guards, users' turns, numbers and approvals from outside.

The unit is what is assigned: the sessions of one assignment key share an arm, so they are one unit
however many requests they hold. Two kinds of e-processes read the units in the order in which their
requests began: in the order in which they end, the faster arm comes first. Both condition on the
unit and ask only which arm it met, whose probability is the stored propensity `w`. So they hold
while the weight of the canary grows, while the rate of bad replies drifts, and when both arms fail
together.

- A guard counts a unit at its first bad turn of that kind, and once more if that is the first turn
  of all. If the candidate's rate is at most `ratio` times the champion's, such a unit is the
  candidate's with odds of at most `ratio w / (1 - w)`. It works with a champion that never fails.
  Half of the gamblers bet on each count: nearly all long sessions have a bad turn of a frequent
  kind in either arm, but not their first one; and some kinds come only late in a session. A harm
  may come after long health, so some gamblers begin later (`deploy.evidence.betting.pay_out`).
  They bet on first turns only: of long sessions that began together, the better arm's are the last
  to have a bad turn, and who bets on that stretch alone takes the better arm for the worse one.
- Nearly all of this a client can cause: it breaks streams off, asks for one token, or for words of
  a refusal, under as many session names as it likes. So each guard has a second e-process, which
  counts a *caller* once, at its first bad unit: only that one says something of the candidate
  (`deploy.registry.proof_rule`). A failure after which the other adapter answered the same request
  is no client's doing: there each unit counts in it.
- Two guards read what clients tell: outcomes (0..1: success) and feedback. Each unit that met one
  arm alone counts once, in the order in which its telling was stored; who tells nothing is unknown,
  not bad. A block is some units of one weight that follow each other; the difference of its arms'
  means, -1..1, is one observation, and the bet is that of judged groups against "the candidate's
  mean is no less" (`deploy.evidence.quality`). Given how many of a block are the candidate's, each
  is with the same chance: so this holds while the rates drift. One arm's users may tell more often
  than the other's. The second e-process is here of each caller's first unit, good or bad.
- The mismatch counts every unit once, at its first turn: it is the candidate's with odds
  `w / (1 - w)`. If not, traffic is lost or routed by something else, and no comparison of the arms
  holds.

Source of the guards: Lindon and Malek, "Anytime-valid inference for multinomial count data"
(NeurIPS 2022), here with a mixture over few odds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, NamedTuple, get_args

from deploy.evidence.betting import START, Bets, begin, bet, bet_on_arm, pay_out
from deploy.evidence.quality import FLAWS
from sidecar.visible import counted

Guard = Literal["failed", "cut", "short", "invalid", "evasive"]
GUARDS: tuple[Guard, ...] = get_args(Guard)
"""Kinds of bad turns. failed: vLLM failed, or did not know the adapter. cut: the client left before
the end. The others as in `deploy.evidence.quality`."""
assert set(FLAWS) <= set(GUARDS)
ClientReportKind = Literal["outcome", "feedback"]
TOLD: tuple[ClientReportKind, ...] = get_args(ClientReportKind)
"""Guards that read what clients tell."""
IN_BLOCK = 1.5
"""Units that the arm with fewer has in a block on average. With more of them a large harm is found
later, with fewer a small one."""
WORSE = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""How many times over the accepted ratio the gamblers of a guard believe the candidate's rate to
be."""
_ABSTAIN = (1.0,) * len(WORSE)
_BAD_ONCE, _BAD_AT_FIRST = (*WORSE, *_ABSTAIN, 1.0), (*WORSE, *WORSE, 1.0)
"""Beliefs of all gamblers of a guard, about a unit with a bad turn, and with a bad first one. A
belief of 1 bets nothing; the last one holds what is kept back."""
KEPT = 0.2
"""Share of a guard's wealth that begins to bet later, for harm that comes late. More of it finds
such harm hardly sooner, and harm from the beginning later (docs/log.md)."""
UNEVEN = (0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)
"""Multiples of the odds of the weight that the gamblers of the mismatch believe in."""
MOST_UNITS = 200_000
"""Units that are remembered. Beyond it the one that was met longest ago is forgotten, and counts as
a new one if it comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a user."""

    unit: str
    """Assignment key: what the proxy hashed to choose the arm."""
    canary: bool
    """True when the candidate was to answer it."""
    weight: float
    """Probability of that, as the proxy stored it, 0..1."""
    bad: frozenset[str] = frozenset()
    """Guards that it is bad for."""
    late: bool = False
    """True when it took so long that later ones were counted before it."""
    caller: str = ""
    """Its sender's key or name. Without one, and without an address, the unit stands for it."""
    address: str = ""
    """A hash of the connection's address, where the sender only claims its name; else empty."""
    shared: bool = False
    """True when another adapter was asked the same and failed too."""
    tellers: tuple[str, ...] = ()
    """Keys that told of it, without the scope to speak for others."""


@dataclass(slots=True)
class GuardState:
    """One guard."""

    bets: Bets = field(default_factory=lambda: begin(2 * len(WORSE), kept=KEPT))
    by_caller: Bets = field(default_factory=lambda: begin(2 * len(WORSE), kept=KEPT))
    """Each caller counts once."""
    canary: int = 0
    """Units of the candidate with a bad turn."""
    champion: int = 0
    callers: int = 0
    """Callers of those of the candidate."""


class Neighbours:
    """Units that follow each other, in blocks of a length that their arms have no part in."""

    def __init__(self) -> None:
        self._open: dict[int, list[tuple[bool, float]]] = {}
        """By the weight in basis points: units of a block that is not full, as arm and value."""

    def add(self, turn: Turn, value: float) -> float | None:
        """Add a unit. value: 0..1. Returns: the canary's mean minus the champion's in the block
        that is full with it, -1..1; None: none is, or all of it is of one arm."""
        weight_bp = round(10_000 * turn.weight)
        block = self._open.setdefault(weight_bp, [])
        block.append((turn.canary, value))
        if len(block) * min(turn.weight, 1.0 - turn.weight) < IN_BLOCK:
            return None
        del self._open[weight_bp]
        canary, champion = ([one for of, one in block if of is arm] for arm in (True, False))
        return fmean(canary) - fmean(champion) if canary and champion else None


@dataclass(slots=True)
class ClientReportState(GuardState):
    """A guard that reads what clients tell. A unit is bad whose value is under 0.5."""

    bets: Bets = START
    by_caller: Bets = START
    units: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """By arm (True: the canary's): units that somebody told of,"""
    sums: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    """and the sum of their values, 0..1."""
    open: Neighbours = field(default_factory=Neighbours)
    open_by_caller: Neighbours = field(default_factory=Neighbours)

    def mean(self, *, canary: bool) -> float | None:
        """Return an arm's mean value, 0..1; None: nobody told of it."""
        return self.sums[canary] / self.units[canary] if self.units[canary] else None


class Live:
    """Reads the turns of one ramp, in the order in which they began.

    It remembers the units; a process that starts again reads the turns again and ends in the same
    state, to the last bit.
    """

    def __init__(self, ratios: Mapping[str, float]) -> None:
        """ratios: guard -> how many times the champion's rate is accepted, at least 1."""
        self._ratios = ratios
        self._met: OrderedDict[int, int] = OrderedDict()
        """Hash of a unit -> bit mask of the guards that counted it; the one met last at the end."""
        self._spoke: dict[int, int] = {}
        """Hash of a caller -> bit mask of the guards that counted it, and above them of those to
        whose `callers` it belongs."""
        self._addresses = Counter[str]()
        """Units by the address they came from."""
        self._addressed = 0
        """Units with an address."""
        self.guards: dict[str, GuardState] = {kind: GuardState() for kind in GUARDS}
        self.told: dict[str, ClientReportState] = {kind: ClientReportState() for kind in TOLD}
        self._heard: set[tuple[ClientReportKind, int]] = set()
        """Guard and hash of each unit that somebody told of."""
        self.split = begin(len(UNEVEN))
        """Against "units are split by the weight"."""
        self.canary_units = 0
        self.champion_units = 0
        self.late = {"canary": 0, "champion": 0}
        """Turns that took so long that later ones were counted before them."""
        self.forgotten = 0
        """Units beyond `MOST_UNITS`."""

    def read(self, turns: Iterable[Turn]) -> None:
        """Read turns in the order of their beginning. One whose arm was certain says nothing."""
        for turn in turns:
            if 0.0 < turn.weight < 1.0:
                self._read(turn)

    def hear(self, kind: ClientReportKind, turn: Turn, value: float) -> None:
        """Count a unit that somebody told of, in the order in which that was stored; once.

        turn: any of it; it met one arm alone. value: 0 (bad) to 1.
        """
        unit, state, place = (kind, hash(turn.unit)), self.told[kind], 2 * len(GUARDS)
        if not 0.0 < turn.weight < 1.0 or unit in self._heard or len(self._heard) >= MOST_UNITS:
            return
        self._heard.add(unit)
        place += 2 * TOLD.index(kind)
        is_bad = value < 0.5
        state.units[turn.canary] += 1
        state.sums[turn.canary] += value
        state.canary += turn.canary and is_bad
        state.champion += not turn.canary and is_bad
        if turn.canary and is_bad and self._is_new(turn, place + 1):
            state.callers += 1
        state.bets = _bet_on_means(state.bets, state.open.add(turn, value))
        if self._is_new(turn, place):
            state.by_caller = _bet_on_means(state.by_caller, state.open_by_caller.add(turn, value))

    @property
    def mismatch(self) -> float:
        """The largest evidence so far, in nats, that units are not split by the weight."""
        return self.split.peak

    def _read(self, turn: Turn) -> None:
        self.late["canary" if turn.canary else "champion"] += turn.late
        # Two units with one hash would count as one: among 200,000, once in a billion ramps.
        unit = hash(turn.unit)
        met = self._met.pop(unit, None)
        first = met is None
        if met is None:
            met = 0
            self._split(turn)
            if turn.address:
                self._addresses[turn.address] += 1
                self._addressed += 1
            if len(self._met) >= MOST_UNITS:
                self._met.popitem(last=False)
                self.forgotten += 1
        for place, kind in enumerate(GUARDS):
            if kind in turn.bad and not met & (1 << place):
                met |= 1 << place
                self._count(kind, turn, first=first)
        self._met[unit] = met

    def _split(self, turn: Turn) -> None:
        self.canary_units += turn.canary
        self.champion_units += not turn.canary
        odds = turn.weight / (1.0 - turn.weight)
        self.split = bet_on_arm(self.split, turn.canary, odds, UNEVEN)

    def _count(self, kind: Guard, turn: Turn, *, first: bool) -> None:
        state, ratio = self.guards[kind], self._ratios[kind]
        state.canary += turn.canary
        state.champion += not turn.canary
        odds = ratio * turn.weight / (1.0 - turn.weight)
        state.bets = _bet(state.bets, turn.canary, odds, first=first)
        place = GUARDS.index(kind)
        if turn.canary and self._is_new(turn, place + len(GUARDS)):
            state.callers += 1
        if (kind == "failed" and not turn.shared) or self._is_new(turn, place):
            state.by_caller = _bet(state.by_caller, turn.canary, odds, first=first)

    def _is_new(self, turn: Turn, place: int) -> bool:
        """Return True when the caller is met for the first time for this bit, and note it.

        A claimed name is as cheap as a session's, so its address must be new too; except one that
        half of all units come from: that is a gateway or the application, which names its users.
        """
        claimed = [hash(name) for name in (turn.caller, *turn.tellers) if name]
        address = [hash(turn.address)] if turn.address else []
        names = claimed + address or [hash(turn.unit)]
        main = 2 * self._addresses[turn.address] >= self._addressed
        counted = claimed if main and turn.caller else names
        is_new = not any(self._spoke.get(name, 0) & 1 << place for name in counted)
        if len(self._spoke) >= MOST_UNITS:
            return False
        for name in names:
            self._spoke[name] = self._spoke.get(name, 0) | 1 << place
        return is_new


def _bet(bets: Bets, canary: bool, odds: float, *, first: bool) -> Bets:
    if first:
        bets = pay_out(bets, len(WORSE))
    return bet_on_arm(bets, canary, odds, _BAD_AT_FIRST if first else _BAD_ONCE)


def _bet_on_means(bets: Bets, difference: float | None) -> Bets:
    """Bet that the canary's mean is less."""
    return bets if difference is None else bet(bets, (1.0 - difference) / 2.0, 0.5)


# What numbers from outside say of a canary: each check, and what some in a row mean. Pure.

Outcome = Literal["ok", "failing", "no_data", "error"]
Mode = Literal["dry_run", "signal", "guardrail"]
CHECKS_KEPT = 20
"""Newest checks of a metric that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One answer to a metric's question."""

    at: float
    """Unix seconds."""
    outcome: Outcome
    value: float | None = None
    why: str = ""
    """What is wrong and what to do, of an error; why there is no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricState:
    """What is known of one metric."""

    mode: Mode = "dry_run"
    min: float | None = None
    max: float | None = None
    """Limits of a good value, when it was checked last."""
    fails_at: int = 1
    """Failing checks in a row that mean something."""
    errs_at: int = 1
    """Errors in a row that mean something."""
    failures: int = 0
    """Failing checks in a row; checks without data between them do not count."""
    errors: int = 0
    """Errors in a row."""
    known_at: float = 0.0
    """When a check last gave a value, Unix seconds; 0: none did."""
    history: tuple[Check, ...] = field(default=())
    """The newest checks, the oldest first; at most `KEPT`."""

    @property
    def last(self) -> Check | None:
        return self.history[-1] if self.history else None

    @property
    def fails(self) -> bool:
        return self.failures >= self.fails_at

    @property
    def is_away(self) -> bool:
        return self.errors >= self.errs_at


def outcome_of(value: float | None, low: float | None, high: float | None) -> Outcome:
    """Return what a value means. low, high: limits of a good value; None: there is none.

    None and NaN are no data: a query that divides nothing by nothing gives NaN.
    """
    if value is None or value != value:
        return "no_data"
    beyond = (low is not None and value < low) or (high is not None and value > high)
    return "failing" if beyond else "ok"


def add_check(state: MetricState, check: Check) -> MetricState:
    """Return the state after one more check."""
    failures = {"ok": 0, "failing": state.failures + 1}.get(check.outcome, state.failures)
    return replace(
        state,
        failures=failures,
        errors=state.errors + 1 if check.outcome == "error" else 0,
        known_at=check.at if check.outcome in ("ok", "failing") else state.known_at,
        history=(*state.history, check)[-CHECKS_KEPT:],
    )


def broken_guardrail(metrics: Mapping[str, MetricState], *, since: float = 0.0) -> str | None:
    """Return in words which guardrail failed often enough to roll back, or None.

    since: Unix seconds; a guardrail whose newest value is older says nothing of what serves now.
    """
    for name, state in metrics.items():
        if state.mode == "guardrail" and state.fails and state.known_at >= since:
            return f"guardrail {name}: {_beyond(state)}"
    return None


def holding_signal(metrics: Mapping[str, MetricState]) -> str | None:
    """Return in words which signal holds the ramp, or None. It goes on when the signal recovers."""
    for name, state in metrics.items():
        if state.mode == "signal" and state.fails:
            return f"signal {name}: {_beyond(state)}"
    return None


def away(metrics: Mapping[str, MetricState]) -> tuple[str, str] | None:
    """Return the metric that cannot be asked, and that in words. It holds, and proves nothing."""
    for name, state in metrics.items():
        if state.mode != "dry_run" and state.is_away and state.last is not None:
            tries = counted(state.errors, "time")
            return name, f"metric {name} gave no answer {tries} in a row: {state.last.why}"
    return None


def unseen(
    metrics: Mapping[str, MetricState], wanted: Iterable[str], *, since: float
) -> str | None:
    """Return in words which metric has no value of the present step yet, or None.

    wanted: metrics that may hold or roll back. since: Unix seconds at which the step began.
    """
    for name in wanted:
        state = metrics.get(name)
        if state is None or state.known_at < since:
            return f"metric {name}, which has no value yet"
    return None


def _beyond(state: MetricState) -> str:
    values = [one.value for one in state.history if one.outcome == "failing"][-state.failures :]
    shown = ", ".join(f"{value:g}" for value in values[-3:] if value is not None)
    limits = [
        f"{word} {limit:g}"
        for word, limit in (("below", state.min), ("above", state.max))
        if limit is not None
    ]
    are = "is" if len(values) == 1 else "are"
    return f"{shown} {are} {' or '.join(limits)} in {counted(state.failures, 'check')} in a row"


# What the approval service of an operator said, and what that means for a move. Pure.

Stage = Literal["ramp", "promotion"]
Answer = Literal["asked", "allow", "deny", "wait", "error"]
"""asked: it has not answered yet; error: it could not be asked, or its answer was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """One move that waits for the service, or did."""

    before: Stage
    since: float
    """Unix seconds since which the move waits."""
    answer: Answer = "asked"
    reason: str = ""
    """The service's words, or what is wrong and what to do."""
    at: float = 0.0
    """When it last answered, or failed to; 0: not yet."""
    asked: int = 0
    """Calls so far."""


def verdict(
    known: Approval | None, stage: Stage, *, holds_s: float, max_wait_s: float, now: float
) -> Literal["begin", "go", "deny", "wait", "give_up"]:
    """Return what a move that wants approval does now.

    begin: the service is to be asked. holds_s: how long an answer holds: an older `allow` was about
        older evidence. max_wait_s: time after which nobody waits any more. now: Unix seconds.
    """
    if known is None or known.before != stage:
        return "begin"
    if known.answer == "deny":
        return "deny"
    if known.answer == "allow" and 0.0 <= now - known.at <= holds_s:
        return "go"
    return "give_up" if now - known.since > max_wait_s else "wait"


def described(known: Approval | None, stage: Stage) -> str:
    """Say what a move waits for."""
    said = {
        "allow": "it allowed it, and is asked again about the newest evidence",
        "wait": f"it says wait ({known.reason})" if known is not None else "",
        "error": f"it gave no answer ({known.reason})" if known is not None else "",
    }.get(known.answer if known is not None and known.before == stage else "", "it is being asked")
    return f"waits for the approval service before the {stage}: {said}"


# Users' turns of a ramp in an order that neither arm's speed decides. Pure.

MOST_HELD = 100_000
"""Turns that wait for earlier ones; beyond it the oldest wait no longer, and count as late."""
COMMIT_S = 5.0
"""Longest time from the end of a turn to when it can be read, in seconds; part of the wait."""
QUIET_S = 600.0
"""Longest time without a new request for which turns wait, seconds. Longer than a restart of ingest
takes, and than the clocks of proxies and control differ."""
MOST_AHEAD_S = 3_600.0
"""A turn counts no later than this and the wait after it was stored: a proxy's clock may be days
ahead."""
LONGEST_LAG_S = 3_600.0
"""Longest wait of a request because earlier ones of its unit followed each other quickly. A unit of
hundreds of requests, as a popular opening is one, is so long behind at most."""
MOST_INTERVAL = 2.5
"""Longest interval between two requests that is made up for, as a multiple of the wait. Equal
adapters whose users pause 10 s beside 90 s were rolled back in 29 of 30 simulated ramps when only
the replies' time was (docs/log.md)."""
LONG_SHARE = 0.05
"""Share of the intervals that are longer than a long one."""
_GROWTH = 1.25
"""Intervals are counted in classes, each so many times as long as the one before."""
_LOG_GROWTH = math.log(_GROWTH)
_SHORTEST_S = 0.1
_UNSEEN = 5
"""Longest intervals that each arm begins with: nothing is known of it yet. With `LONG_SHARE` the
first hundred intervals of an arm are taken for long ones."""


class LongIntervals:
    """What is a long time from one request of a unit to the next: the slower arm's quantile."""

    def __init__(self, most_s: float) -> None:
        """most_s: the longest that it may be, seconds."""
        self._most_s = most_s
        self._counts = {arm: Counter({_class_of(most_s): _UNSEEN}) for arm in (True, False)}
        """By arm (True: the canary's), replies in each class of times."""
        self._long_s = dict.fromkeys(self._counts, most_s)

    @property
    def long_s(self) -> float:
        """Seconds after which all but `LONG_SHARE` of the next requests of either arm had come."""
        return max(self._long_s.values())

    def add(self, interval_s: float, *, canary: bool) -> None:
        """Count one."""
        counts = self._counts[canary]
        counts[_class_of(min(interval_s, self._most_s))] += 1
        left = LONG_SHARE * counts.total()
        for one in sorted(counts, reverse=True):
            left -= counts[one]
            if left < 0.0:
                self._long_s[canary] = min(self._most_s, _GROWTH**one)
                return


class _Unit(NamedTuple):
    requests: int
    """Those that came one after the other."""
    began_at: float
    newest_at: float
    """When the newest of them began,"""
    ends_at: float
    """and ended."""


class InOrder:
    """Holds the turns that wait."""

    def __init__(self, wait_s: float) -> None:
        """wait_s: seconds from the beginning of a request to when it counts."""
        self._wait_s = wait_s
        self._grace_s = max(0.0, wait_s - COMMIT_S)
        self._held: list[tuple[float, float, int, Turn]] = []
        """When they count, when they began, their place in the table; a heap."""
        self._newest_end = -math.inf
        """Newest end of a request that was read."""
        self._long = LongIntervals(MOST_INTERVAL * wait_s)
        self._units: OrderedDict[int, _Unit] = OrderedDict()
        """By the hash of a unit, the one that was met last at the end."""

    def __len__(self) -> int:
        """Return the number of turns that wait."""
        return len(self._held)

    def add(
        self, turn: Turn, *, started_at: float, stored_at: float, took_s: float, place: int
    ) -> None:
        """Take a turn that ended; those of one conversation in their order.

        Times are Unix seconds; took_s: seconds from the request to the end of its reply; place: its
        number, for equal times.
        """
        ended_at = min(started_at + took_s, stored_at)
        if stored_at < self._newest_end - QUIET_S:  # the clock was set back
            self._newest_end = ended_at
        self._newest_end = max(self._newest_end, ended_at)
        # Nothing later has been counted: what `take` gave out was this wait before the newest end.
        earliest = max(self._newest_end, stored_at - QUIET_S) - self._grace_s
        at = min(max(started_at, earliest), stored_at + MOST_AHEAD_S)
        if at - started_at > COMMIT_S:
            turn = replace(turn, late=True)
        at += self._lag_s(turn, started_at, took_s)
        heapq.heappush(self._held, (at, started_at, place, turn))

    def take(self, now: float) -> Iterator[Turn]:
        """Yield the turns that have waited long enough, in their order. now: Unix seconds; every
        turn that was stored until then has been added."""
        until = min(now, max(self._newest_end, now - QUIET_S)) - self._wait_s
        while self._held and self._held[0][0] <= until:
            yield heapq.heappop(self._held)[-1]
        while len(self._held) > MOST_HELD:
            yield replace(heapq.heappop(self._held)[-1], late=True)

    def _lag_s(self, turn: Turn, started_at: float, took_s: float) -> float:
        """Return how much later the request would have begun after long intervals; note it."""
        key = hash(turn.unit)
        ends_at = started_at + took_s
        unit = self._units.pop(key, None)
        if unit is None:
            self._units[key] = _Unit(1, started_at, started_at, ends_at)
            if len(self._units) > MOST_UNITS:
                self._units.popitem(last=False)
            return 0.0
        lag_s = unit.requests * self._long.long_s - (started_at - unit.began_at)
        # Of requests at the same time only one is on the way to the next.
        if started_at >= unit.ends_at:
            self._long.add(started_at - unit.newest_at, canary=turn.canary)
            unit = _Unit(unit.requests + 1, unit.began_at, started_at, ends_at)
        self._units[key] = unit
        return min(max(0.0, lag_s), LONGEST_LAG_S)


def _class_of(interval_s: float) -> int:
    return math.ceil(math.log(max(interval_s, _SHORTEST_S)) / _LOG_GROWTH)
