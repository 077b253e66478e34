"""Which prompts candidate, champion and anchor answer next, and in which order they count.

A prompt gets its place when it is drawn, before anything is asked. No further prompt is drawn
before all that were drawn have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from deploy.canary import gate_store
from deploy.canary.gate_store import HeldOutPrompt, comparison_id
from deploy.canary.judged import Judged
from deploy.evidence.quality import Quality
from deploy.records import Canary
from deploy.registry import proof_rule
from sidecar.lines import Line
from sidecar.settings import Canary as CanarySettings
from sidecar.store.database import Database

SPARE_PROMPTS = 2
"""Most prompts that the gate tries, as a multiple of those that it wants: some are set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A prompt that was drawn and has not ended."""

    place: int
    prompt: HeldOutPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What can be compared."""

    sessions: int = 0
    """Sessions that take part, compared or not."""
    missing: tuple[HeldOutPrompt, ...] = ()
    """Prompts that may be drawn now."""
    drawn: int = 0
    """Largest place in the store."""
    quality: Quality = field(default_factory=Quality)
    """What the groups say that may be counted; of the gate alone."""


class Drawing:
    """Remembers what was drawn for one canary. After a restart it is drawn again, at later places:
    a kill does not depend on an answer."""

    def __init__(
        self,
        database: Database,
        rules: CanarySettings,
        *,
        parallel: int,
        clock: Callable[[], float],
        line: Line | None = None,
    ) -> None:
        """line: of the canaries; None: the default one of a model without others."""
        self._of = line
        self._database = database
        self._rules = rules
        self._parallel = parallel
        self._clock = clock
        self._drawn: dict[str, Drawn] = {}
        """By comparison id."""
        self._drawn_for = ""
        """Id of the canary."""
        self._judged = Judged(rules)

    def _line(self, canary: Canary) -> Line:
        return self._of or Line(name=canary.model)

    def _counted(self, canary: Canary) -> tuple[str, ...]:
        """Return the ids of the canaries whose sessions are not judged again."""
        return (*proof_rule.tries_of(canary, self._rules), canary.canary_id)

    def is_for(self, canary: Canary) -> bool:
        return self._drawn_for == canary.canary_id

    def draw(self, canary: Canary, prompts: Prompts) -> list[Drawn]:
        """Return what was drawn and has not ended; if all has, draw the next ones."""
        if not self.is_for(canary):
            self._drawn, self._drawn_for = {}, canary.canary_id
        if not self._drawn:
            for number, prompt in enumerate(prompts.missing[: self._parallel], start=1):
                name = comparison_id(canary, prompt)
                self._drawn[name] = Drawn(place=prompts.drawn + number, prompt=prompt)
        return list(self._drawn.values())

    def place_of(self, name: str) -> int:
        """Return the place of a comparison; 0 when it was not drawn."""
        drawn = self._drawn.get(name)
        return drawn.place if drawn is not None else 0

    def end(self, name: str) -> None:
        """Note that a comparison is stored."""
        self._drawn.pop(name, None)

    def open_from(self, canary: Canary) -> int:
        """Return the first place that may not be counted yet. Reads the store.

        Places below it have ended and are stored, or will never be. Prompts that are drawn while
        this is read get places beyond those in the store: of these one may be stored before an
        earlier one, so none is counted.
        """
        with self._database.read() as session:
            beyond = gate_store.drawn(session, canary.canary_id) + 1
        # After the store was read: what is open no more now was stored before.
        drawn = list(self._drawn.values()) if self.is_for(canary) else []
        return min([beyond, *(one.place for one in drawn)])

    def for_gate(self, canary: Canary) -> Prompts:
        """Return the held-out prompts that the gate still lacks, and what its groups say so far.
        Reads the store."""
        open_from = self.open_from(canary)
        with self._database.read() as session:
            quality = self._judged.read(session, canary, open_from=open_from)
            wanted = proof_rule.gate_prompts(quality, self._rules)
            limit = SPARE_PROMPTS * wanted
            done = gate_store.compared_sessions(session, self._counted(canary))
            left = limit - gate_store.made(session, canary.canary_id)
            missing = self._held_out(session, canary, done, left)
            if (more := left - len(missing)) > 0:  # rather those that go on than none
                known = done | {prompt.session_id for prompt in missing}
                missing += self._held_out(session, canary, known, more, settled=False)
            judged = gate_store.comparisons(session, canary.canary_id)
            drawn = gate_store.drawn(session, canary.canary_id)
        quick = self._rules.promote_on == "quick"
        telling = [
            one
            for one in judged
            if one.difference is not None or (one.fault == "candidate" and not quick)
        ]
        room = min(left, wanted - self._judged.carried - len(telling))
        return Prompts(
            sessions=len(done) + len(missing),
            missing=tuple(missing[: max(0, room)]),
            drawn=drawn,
            quality=quality,
        )

    def for_shadow(self, canary: Canary) -> Prompts:
        """Return the prompts that the ramp may draw now: held-out ones, then those of users'
        sessions since the canary began. Reads the store."""
        rules = self._rules
        if proof_rule.is_proven(canary.proven, rules) and not self._is_wanted(canary):
            return Prompts()
        hours = max(0.0, self._clock() - canary.created_at) / 3_600.0
        allowed = min(rules.max_groups, rules.gate_prompts + int(rules.groups_per_hour * hours))
        with self._database.read() as session:
            room = min(self._parallel, allowed - gate_store.made(session, canary.canary_id))
            if room <= 0:
                return Prompts()
            done = gate_store.compared_sessions(session, self._counted(canary))
            missing = self._held_out(session, canary, done, room)
            if len(missing) < room:
                missing += gate_store.live_prompts(
                    session,
                    canary,
                    self._line(canary),
                    after=canary.created_at if canary.tried_since is None else canary.tried_since,
                    until=self._clock() - gate_store.SETTLED_S,
                    limit=room - len(missing),
                    known=done | {prompt.session_id for prompt in missing},
                )
            drawn = gate_store.drawn(session, canary.canary_id)
        return Prompts(sessions=len(done) + len(missing), missing=tuple(missing), drawn=drawn)

    def _held_out(
        self,
        session: Session,
        canary: Canary,
        known: Collection[str],
        limit: int,
        *,
        settled: bool = True,
    ) -> list[HeldOutPrompt]:
        """Draw prompts of held-out sessions. settled: False takes those that go on as well."""
        if limit <= 0:
            return []
        return gate_store.held_out_prompts(
            session,
            self._line(canary),
            limit=limit,
            known=known,
            without=canary.candidate,
            salt=canary.salt,
            until=self._clock() - gate_store.SETTLED_S if settled else None,
        )

    def _is_wanted(self, canary: Canary) -> bool:
        """Return True when a promotion waits for groups although its claims are proven."""
        open_from = self.open_from(canary)
        with self._database.read() as session:
            quality = self._judged.read(session, canary, open_from=open_from)
        lacking = proof_rule.lacking(quality, canary.proven, self._rules)
        return (lacking or proof_rule.flaw_suspicion(quality, self._rules)) is not None
