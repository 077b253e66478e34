"""Verify a group with all verifiers of its project, and make its rewards.

Equal answers are checked once. Every result is counted by verifier and outcome
(`counter` stage `verifiers`). The judge is not asked before: a group that must wait for a verifier
waits before it costs anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import structlog
from sqlalchemy import select

from ingest.privacy.texts import JudgeView
from ingest.records import Answer, Group, Rewarded
from ingest.verifiers.checkers import (
    Checker,
    NotLoadedError,
    ProcessChecker,
    Processes,
    Spec,
    plain,
)
from ingest.verifiers.hook import HttpChecker, prove_all
from ingest.verifiers.records import OF_THE_ANSWER, Checked, Failure, Finding, Result, Verified
from ingest.verifiers.state import FindingCache, VerifierSeen, content_digest, write_verifiers
from sidecar.errors import StoreError
from sidecar.settings import EntryPointVerifier, HttpVerifier, Reward, Settings, VerifierSection
from sidecar.store.database import Database, count
from sidecar.store.models import ExchangeRow

# Combine the judge's scores with what verifiers found into one reward. Pure.

FAIL_TOP = 0.4
PASS_BOTTOM = 0.6
"""The gap is ten times `MIN_SPREAD` of `learner.grpo.advantages`, so that a gate always tells."""
JUDGE_WEIGHT = 1.0
OnError = Literal["ignore", "fail", "hold"]


def counted_scores(results: Sequence[Result], on_error: OnError) -> tuple[float, ...]:
    """Return the scores of a verifier as they count in a group; empty: it does not count there.

    results: [G] what it found. An answer that it failed over gets 0 under `fail`, when the answer
        may be the cause; any other answer without a score keeps the verifier out.
    """
    scores: list[float] = []
    for result in results:
        if isinstance(result, Finding) and result.score is not None:
            scores.append(result.score)
        elif on_error == "fail" and isinstance(result, Failure) and result.reason in OF_THE_ANSWER:
            scores.append(0.0)
        else:
            return ()
    return tuple(scores)


def weighted_mean(scores: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the mean by weight, in the range of the scores; None when all weights are 0."""
    total = sum(weights)
    if total <= 0.0:
        return None
    mean = sum(weight * score for weight, score in zip(weights, scores, strict=True)) / total
    return min(max(mean, min(scores)), max(scores))  # rounding must not leave the range


def combine(ruler_scores: Sequence[float], checked: Sequence[Checked]) -> Rewarded:
    """Make the rewards of one group: the weighted mean, and what fails a gate below what passes.

    ruler_scores: [G] the judge's scores, 0..1, with JUDGE_WEIGHT beside the verifiers' weights.
    Returns: rewards in 0..1; the judge's scores themselves when no verifier counts.
    """
    counting = [one for one in checked if one.scores]
    places = range(len(ruler_scores))
    means = [
        weighted_mean([one.scores[i] for one in counting], [one.weight for one in counting])
        for i in places
    ]
    independent = tuple(mean for mean in means if mean is not None)
    gates = [one for one in counting if one.gate]
    ranking = [one for one in counting if not one.gate]
    weights = [JUDGE_WEIGHT, *(one.weight for one in ranking)]
    if ranking:
        ranks = [
            weighted_mean([ruler_scores[i], *(one.scores[i] for one in ranking)], weights) or 0.0
            for i in places
        ]
    else:
        ranks = list(ruler_scores)
    passes = [all(one.scores[i] >= one.pass_at for one in gates) for i in places]
    if len(set(passes)) > 1:
        ranks = [
            PASS_BOTTOM + (1.0 - PASS_BOTTOM) * rank if ok else FAIL_TOP * rank
            for rank, ok in zip(ranks, passes, strict=True)
        ]
    return Rewarded(
        rewards=tuple(ranks),
        independent=independent,
        rule=_rule(checked),
        checks=tuple([_check(one, i) for one in checked] for i in places),
    )


_RULE = ("name", "version", "digest", "weight", "gate", "pass_at")


def _rule(checked: Sequence[Checked]) -> dict[str, Any]:
    return {
        "combine": "gate_then_rank" if any(one.gate for one in checked) else "weights",
        "judge_weight": JUDGE_WEIGHT,
        "verifiers": [
            {**{name: getattr(one, name) for name in _RULE}, "counts": bool(one.scores)}
            for one in checked
        ],
    }


def _check(one: Checked, place: int) -> dict[str, Any]:
    result = one.results[place]
    found: dict[str, Any] = {"name": one.name, "version": one.version, "why": result.why}
    if isinstance(result, Failure):
        return {**found, "score": one.scores[place] if one.scores else None, "error": result.reason}
    return {**found, "score": result.score, "error": None}


STAGE = "verifiers"
"""Counter rows: (stage, `<verifier>_<outcome>`) -> answers."""
CACHE_FINDINGS = 10_000
"""Findings kept in memory, so that an equal answer is not checked again; each takes 1 kB."""
MEMORY_BYTES = 2**30
"""Address space of a process of verifiers; code that asks for more fails (`error`)."""
LONGEST_S = 300.0
"""Longest time of a group's verification, waiting for a process included. What is not found by then
does not count in the group: a worker's claim on a group must not grow with its verifiers."""
FOR_GOOD = frozenset({"unreadable", "not_redacted"})
"""Failures for which no group waits: the judge sets it aside for the same reason."""
BECOMES = {
    "ignore": "groups are judged without it",
    "fail": "groups are judged without it, and an answer that it failed over gets 0",
    "hold": "groups wait for it",
}
"""`on_error` -> what becomes of groups."""
log = structlog.get_logger()


class Rewarding:
    """Verifies groups and makes their rewards. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        settings: Reward,
        checkers: Mapping[str, Checker],
        *,
        processes: Processes | None = None,
        clock: Callable[[], float] = time.time,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """checkers: one for each of `settings.verifiers`, by name. processes: closed with this.
        announce: tells the operator's terminal."""
        self._database = database
        self._settings = settings
        self._checkers = checkers
        self._processes = processes
        self._cache = FindingCache(CACHE_FINDINGS)
        self._digests = {name: digest_of(one) for name, one in settings.verifiers.items()}
        self._counts: Counter[str] = Counter()
        """Results that are not in the store yet."""
        self._troubles: dict[str, str] = {}
        """Verifier -> failure that was logged last."""
        self._clock = clock
        self._announce = announce
        self._seen = {
            name: VerifierSeen(name=name, kind=kind_of(one))
            for name, one in settings.verifiers.items()
        }
        self._told: dict[str, VerifierSeen] = {}
        """What the store says."""

    async def begin(self) -> None:
        """Try every verifier once, so that log, terminal and `sidecar status` say at the start
        which ones cannot be used."""
        for name, found in (await prove_all(self._checkers, self._settings.verifiers)).items():
            if isinstance(found, Failure):
                self._note(name, (found,))
                self._tell(name, found)
            else:
                self._note(name, (Finding(score=None),))
                log.info("verifier_ready", verifier=name, version=found)
        await self._store_counts()

    async def verify(self, group: Group) -> Verified | None:
        """Check the answers of a group. Returns: None when no verifier checks its project.

        Raises: StoreError when the group's project cannot be read.
        """
        project = await asyncio.to_thread(self._project_of, group)
        if project is None:
            return None
        wanted = {
            name: one
            for name, one in self._settings.verifiers.items()
            if not one.projects or project in one.projects
        }
        if not wanted:
            return None
        keys = [content_digest(group.request, one, project) for one in group.answers]
        end = asyncio.get_running_loop().time() + LONGEST_S
        checked = [
            await self._check(name, one, group, keys, project, end) for name, one in wanted.items()
        ]
        await self._store_counts()
        held = [
            f"{one.name}: {failure.reason}"  # without its words, which may quote the answer
            for one in checked
            if wanted[one.name].on_error == "hold"
            and (failure := _first_failure(one.results)) is not None
            and failure.reason not in FOR_GOOD
        ]
        return Verified(checked=tuple(checked), held="; ".join(held))

    async def aclose(self) -> None:
        """End the processes, close the connections, and store what is not counted yet."""
        await self._store_counts()
        await close_checkers(self._checkers, self._processes)

    async def _check(
        self,
        name: str,
        settings: VerifierSection,
        group: Group,
        keys: Sequence[str],
        project: str,
        end: float,
    ) -> Checked:
        """keys: [G] digest of what a verifier sees of each answer. end: on the loop's clock."""
        try:
            async with asyncio.timeout_at(end):
                version, results, fresh = await self._results(name, group, keys, project)
        except TimeoutError:
            why = f"the group's verification took over {LONGEST_S:g} s"
            version, results = "", (Failure(reason="late", why=why),) * len(keys)
            fresh = results
        for result in results:
            self._counts[f"{name}_{_outcome(result)}"] += 1
        self._note(name, fresh)
        self._tell(name, _first_failure(results))
        return Checked(
            name=name,
            version=version,
            digest=self._digests[name],
            weight=settings.weight,
            gate=settings.gate,
            pass_at=settings.pass_at,
            results=results,
            scores=counted_scores(results, settings.on_error),
        )

    async def _results(
        self, name: str, group: Group, keys: Sequence[str], project: str
    ) -> tuple[str, tuple[Result, ...], tuple[Result, ...]]:
        """Returns: the version, [G] a result for each answer, and those that were not kept."""
        checker = self._checkers[name]
        try:
            version = await checker.version()
        except NotLoadedError as error:
            failure = Failure(reason="not_loaded", why=str(error))
            return "", (failure,) * len(keys), (failure,)
        digest = self._digests[name]
        found: dict[str, Result] = {}
        missing: dict[str, Answer] = {}
        for key, answer in zip(keys, group.answers, strict=True):
            if (kept := self._cache.get((name, version, digest, key))) is not None:
                found[key] = kept
            else:
                missing.setdefault(key, answer)
        results: list[Result] = []
        if missing:
            results = await checker.check(group.request, list(missing.values()), project)
            for key, result in zip(missing, results, strict=True):
                found[key] = result
                if isinstance(result, Finding):
                    self._cache.put((name, version, digest, key), result)
        return version, tuple(found[key] for key in keys), tuple(results)

    def _project_of(self, group: Group) -> str | None:
        with self._database.read() as session:
            return session.scalar(
                select(ExchangeRow.project).where(ExchangeRow.exchange_id == group.exchange_id)
            )

    def _note(self, name: str, fresh: Sequence[Result]) -> None:
        """Remember what was found just now. Findings that were kept tell nothing."""
        seen, now = self._seen[name], self._clock()
        found = any(isinstance(one, Finding) for one in fresh)
        if found:
            seen = seen.works(now)
        if (failure := _first_failure(fresh)) is not None:
            seen = seen.failed(now, failure, whole=not found)
        if seen.fails and not self._seen[name].fails:
            on_error = self._settings.verifiers[name].on_error
            self._announce(f"verifier {name} fails ({seen.error}): {BECOMES[on_error]}")
        elif self._seen[name].fails and not seen.fails:
            self._announce(f"verifier {name} works again")
        self._seen[name] = seen

    def _tell(self, name: str, failure: Failure | None) -> None:
        """Log a verifier's failure when it is another one than before, and its end."""
        reason = failure.reason if failure is not None else ""
        if reason == self._troubles.get(name, ""):
            return
        self._troubles[name] = reason
        if failure is None:
            log.info("verifier_works", verifier=name)
            return
        # An exception's words may quote the answer.
        why = failure.why if failure.reason not in ("error", "bad_finding") else ""
        log.warning("verifier_failed", verifier=name, reason=reason, why=why)

    async def _store_counts(self) -> None:
        counts, self._counts = self._counts, Counter()
        try:
            await asyncio.to_thread(self._count, counts, dict(self._seen))
        except StoreError as error:
            self._counts.update(counts)
            log.warning("verifier_counts_wait", error=str(error))

    def _count(self, counts: Counter[str], seen: Mapping[str, VerifierSeen]) -> None:
        news = any(one.is_news(self._told.get(name)) for name, one in seen.items())
        if not counts and not news:
            return
        with self._database.write(alone=False) as session:
            for reason, answers in sorted(counts.items()):
                count(session, STAGE, reason, answers)
            if news:
                write_verifiers(session, seen.values(), now=self._clock())
        if news:
            self._told = dict(seen)


def open_rewarding(
    settings: Settings,
    database: Database,
    *,
    announce: Callable[[str], None] = lambda _: None,
) -> Rewarding | None:
    """Return what verifies groups by these settings; None when they name no verifier."""
    if not settings.reward.verifiers:
        return None
    checkers, processes = open_checkers(settings)
    return Rewarding(database, settings.reward, checkers, processes=processes, announce=announce)


def open_checkers(settings: Settings) -> tuple[dict[str, Checker], Processes]:
    """Make a checker for each verifier of the settings, and the processes that they share."""
    reward = settings.reward
    in_processes = [one for one in reward.verifiers.values() if not isinstance(one, HttpVerifier)]
    processes = Processes(len(in_processes), MEMORY_BYTES)
    view = JudgeView(settings.privacy)
    checkers: dict[str, Checker] = {
        name: (
            HttpChecker(name, one, view)
            if isinstance(one, HttpVerifier)
            else ProcessChecker(spec_of(name, one), processes, timeout_s=one.timeout_s)
        )
        for name, one in reward.verifiers.items()
    }
    return checkers, processes


async def close_checkers(checkers: Mapping[str, Checker], processes: Processes | None) -> None:
    for checker in checkers.values():
        if isinstance(checker, HttpChecker):
            await checker.aclose()
    if processes is not None:
        await processes.aclose()


def kind_of(settings: VerifierSection) -> str:
    return str(getattr(settings, "kind"))  # noqa: B009 - each subclass has its own literal


def spec_of(name: str, settings: VerifierSection) -> Spec:
    """Return what a process needs to make a verifier."""
    kind = kind_of(settings)
    if isinstance(settings, EntryPointVerifier):
        return Spec(
            name=name,
            kind=kind,
            params=plain(settings.params),
            entry_point=settings.entry_point,
            digest=digest_of(settings),
        )
    own = {*type(settings).model_fields} - {*VerifierSection.model_fields, "kind"}
    params = settings.model_dump(mode="json", include=own)
    return Spec(name=name, kind=kind, params=plain(params), digest=digest_of(settings))


def digest_of(settings: VerifierSection) -> str:
    """Hash what a finding depends on: kind and parameters, not weights and keys; SHA-256 hex."""
    own = {*type(settings).model_fields} - {*VerifierSection.model_fields, "token", "version"}
    return hashlib.sha256(plain(settings.model_dump(mode="json", include=own))).hexdigest()


def _outcome(result: Result) -> str:
    if isinstance(result, Failure):
        return result.reason
    return "scored" if result.score is not None else "does_not_apply"


def _first_failure(results: Sequence[Result]) -> Failure | None:
    return next((one for one in results if isinstance(one, Failure)), None)
