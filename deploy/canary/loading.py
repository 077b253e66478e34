"""Load a candidate into every replica that answers, and prove on each that it is live.

A replica that is down is left out: it must not block a canary for ever. When it comes back its
reconciler loads the candidate there, and until its list of models has it the proxy sends the
candidate's users elsewhere. All that answer must take the adapter: one that refuses it, or on
which it does nothing, is enough to reject it. Without any replica the canary waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from deploy.engine.checked_load import load_checked
from deploy.engine.probe import Liveness, compare
from deploy.engine.vllm_control import AdapterControl
from deploy.errors import EngineError, InvalidAdapterError
from deploy.records import AdapterVersion
from deploy.registry.canary_rule import LoadEvidence

log = structlog.get_logger()

Facts = dict[str, Any]
"""Evidence as JSON, by the key under which the canary keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What came of one replica that answered."""

    replica: str
    liveness: Liveness | None = None
    invalid: str | None = None
    failed: str | None = None

    @property
    def words(self) -> str:
        return self.invalid or self.failed or (self.liveness.reason if self.liveness else "")


async def load_everywhere(
    replicas: Mapping[str, AdapterControl],
    version: AdapterVersion,
    *,
    model: str,
    failures: int,
    validate: Callable[[], Awaitable[None]],
) -> tuple[LoadEvidence, Facts]:
    """Take the candidate as far into vLLM as it goes now. Safe to repeat.

    failures: loads that vLLM, though up, failed so far.
    validate: the check on disk; raises InvalidAdapterError.
    """
    # Asked first: while vLLM is away there is no use in hashing the folder again and again.
    up, away = await _ask_all(replicas)
    if not up:
        return LoadEvidence(away="; ".join(away.values()), load_failures=failures), {}
    try:
        await validate()
    except InvalidAdapterError as error:
        return LoadEvidence(invalid=f"invalid: {error}"), {}
    outcomes = await asyncio.gather(
        *(_load(url, replicas[url], names, version, model) for url, names in up.items())
    )
    facts = _facts(outcomes, away)
    for outcome in outcomes:
        if outcome.invalid is not None:
            return LoadEvidence(invalid=_said(outcome, replicas)), facts
    for outcome in outcomes:
        if outcome.failed is not None:
            return LoadEvidence(away=_said(outcome, replicas), load_failures=failures + 1), facts
    return LoadEvidence(live=True), facts


async def _ask_all(
    replicas: Mapping[str, AdapterControl],
) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """(adapters loaded, by replica that answers; why the others do not)."""
    answers = await asyncio.gather(
        *(one.loaded() for one in replicas.values()), return_exceptions=True
    )
    up: dict[str, frozenset[str]] = {}
    away: dict[str, str] = {}
    for url, answer in zip(replicas, answers, strict=True):
        if isinstance(answer, EngineError):
            away[url] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            up[url] = answer
    return up, away


async def _load(
    url: str,
    control: AdapterControl,
    loaded: frozenset[str],
    version: AdapterVersion,
    model: str,
) -> _Outcome:
    try:
        if version.name not in loaded:
            await load_checked(control, version.name, version.path, version.digest)
        before = await control.probe(model)
        adapter = await control.probe(version.name)
        after = await control.probe(model)
    except InvalidAdapterError as error:
        return _Outcome(replica=url, invalid=f"invalid: {error}")
    except EngineError as error:
        log.warning("adapter_load_failed", adapter=version.name, replica=url, reason=str(error))
        return _Outcome(replica=url, failed=str(error))
    liveness = compare(version.name, adapter=adapter, base_before=before, base_after=after)
    return _Outcome(
        replica=url, liveness=liveness, invalid=None if liveness.live else liveness.reason
    )


def _facts(outcomes: list[_Outcome], away: Mapping[str, str]) -> Facts:
    """The probe that says least for the candidate, and of several replicas what each said."""
    facts: Facts = {}
    probes = [outcome.liveness for outcome in outcomes if outcome.liveness is not None]
    if probes:
        weakest = min(probes, key=lambda one: (one.live, one.mean_difference))
        facts["probe"] = asdict(weakest)
    if len(outcomes) + len(away) > 1:
        said = {outcome.replica: outcome.words for outcome in outcomes}
        facts["replicas"] = said | {url: f"away: {reason}" for url, reason in away.items()}
    return facts


def _said(outcome: _Outcome, replicas: Mapping[str, AdapterControl]) -> str:
    return outcome.words if len(replicas) == 1 else f"{outcome.replica}: {outcome.words}"
