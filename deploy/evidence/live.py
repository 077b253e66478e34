"""What users' sessions say of a candidate: guards, and whether traffic is split as it should be.

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
- The mismatch counts every unit once, at its first turn: it is the candidate's with odds
  `w / (1 - w)`. If not, traffic is lost or routed by something else, and no comparison of the arms
  holds.

Source of the guards: Lindon and Malek, "Anytime-valid inference for multinomial count data"
(NeurIPS 2022), here with a mixture over few odds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from deploy.evidence.betting import Bets, begin, bet_on_arm, pay_out
from deploy.evidence.quality import FLAWS

Guard = Literal["failed", "cut", "short", "invalid", "evasive"]
GUARDS: tuple[Guard, ...] = get_args(Guard)
"""Kinds of bad turns. failed: vLLM failed, or did not know the adapter. cut: the client left before
the end. The others as in `deploy.evidence.quality`."""
assert set(FLAWS) <= set(GUARDS)
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
        names = [hash(name) for name in (turn.caller, turn.address) if name] or [hash(turn.unit)]
        main = 2 * self._addresses[turn.address] >= self._addressed
        counted = names[:1] if main else names
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
