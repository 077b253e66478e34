"""Load a candidate into every reachable replica, and prove on each that it has an effect, and that
it is served as it was trained.

An unreachable replica is skipped, so that it cannot block a canary for ever. When it returns, its
reconciler loads the candidate, and the proxy sends the candidate's users there only once its list
of models shows the adapter. While no replica is reachable the canary waits.

What one vLLM says of the adapter is held against the adapter only when all that answer say it: that
it has no effect, or another than the learner's. Where one replica proved it, another that refuses
it or serves it otherwise is sick itself. A refused or failed load is tried again, and never a
verdict on the files, which were validated before: vLLM may lack the folder, memory or a flag.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from deploy.engine.vllm_control import (
    AdapterControl,
    Agreement,
    Liveness,
    ask_liveness,
    compare_served,
    in_folder_thread,
    load_checked,
    read_probe_file,
)
from deploy.errors import EngineError, InvalidAdapterError, NotAsRegisteredError
from deploy.records import AdapterVersion
from deploy.registry.canary_rule import LoadEvidence
from sidecar.visible import counted

log = structlog.get_logger()

Facts = dict[str, Any]
"""Evidence as JSON, keyed as in the canary's `evidence` object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Outcome of loading on one reachable replica."""

    replica: str
    liveness: Liveness | None = None
    agreement: Agreement | None = None
    """None where the version never had a `probe.json`, or is not live."""
    invalid: str | None = None
    """What it was found to do here, which would be reason to reject it."""
    altered: bool = False
    """`invalid` is about other bytes than were registered, or none: on the disk, not in vLLM."""
    failed: str | None = None
    """The load failed or was refused, or vLLM's answers tell nothing."""

    @property
    def words(self) -> str:
        found = [one.reason for one in (self.liveness, self.agreement) if one is not None]
        return self.invalid or self.failed or "; ".join(found)


MAX_BASE_KL = 8.0
"""Nats of the KL divergence from the base, on the probe's prompts, over which a candidate is
rejected when it is loaded."""


async def load_everywhere(
    replicas: Mapping[str, AdapterControl],
    version: AdapterVersion,
    *,
    model: str,
    failures: int,
    validate: Callable[[], Awaitable[None]],
) -> tuple[LoadEvidence, Facts]:
    """Load the candidate into every reachable replica and probe it there. Safe to repeat.

    failures: failed loads so far, in which vLLM was up and answered with a server error.
    validate: checks the folder on disk; raises InvalidAdapterError.
    """
    # The replicas are asked first: while all are away, hashing the folder at each tick is useless.
    up, away = await _ask_all(replicas)
    if not up:
        return LoadEvidence(away="; ".join(away.values()), load_failures=failures), {}
    try:
        await validate()
    except InvalidAdapterError as error:
        altered = isinstance(error, NotAsRegisteredError)
        return LoadEvidence(invalid=f"invalid: {error}", altered=altered), {}
    outcomes = await asyncio.gather(
        *(_load(url, replicas[url], names, version, model) for url, names in up.items())
    )
    facts = _facts(outcomes, away)
    for outcome in outcomes:
        if outcome.altered:
            return LoadEvidence(invalid=_describe(outcome, replicas), altered=True), facts
    bad = [one for one in outcomes if one.failed is not None or one.invalid is not None]
    if not bad:
        return LoadEvidence(live=True), facts
    proven = len(outcomes) - len(bad)
    if not proven and all(one.failed is None for one in outcomes):
        return LoadEvidence(invalid=_describe(bad[0], replicas)), facts
    why = "; ".join(_describe(one, replicas) for one in bad)
    if proven:
        why = (
            f"{why} ({counted(proven, 'other replica')} proved it live: mend that vLLM, or take it "
            "out of serving.upstreams)"
        )
    return LoadEvidence(away=why, load_failures=failures + 1, partly=proven > 0), facts


async def _ask_all(
    replicas: Mapping[str, AdapterControl],
) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """Return the loaded adapters by reachable replica, and the errors of the other replicas."""
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
            try:
                await load_checked(control, version.name, version.path, version.digest)
            except NotAsRegisteredError:
                raise
            except InvalidAdapterError as error:  # the folder is valid: vLLM cannot take it
                raise EngineError(str(error)) from error
        liveness = await ask_liveness(control, version.name, model=model)
        agreement = await _ask_agreement(control, version, liveness) if liveness.live else None
    except InvalidAdapterError as error:
        altered = isinstance(error, NotAsRegisteredError)
        return _Outcome(replica=url, invalid=f"invalid: {error}", altered=altered)
    except EngineError as error:
        log.warning("adapter_load_failed", adapter=version.name, replica=url, reason=str(error))
        return _Outcome(replica=url, failed=str(error))
    for one in (liveness, agreement):
        if one is not None and one.unsure:
            log.warning("adapter_probe_unsure", adapter=version.name, replica=url, **asdict(one))
            return _Outcome(replica=url, liveness=liveness, agreement=agreement, failed=one.reason)
    refused = None if liveness.live else liveness.reason
    if agreement is not None and not agreement.same:
        refused = agreement.reason
    if refused is None and liveness.kl > MAX_BASE_KL:
        refused = (
            f"runaway KL: {liveness.kl:.3g} nats from the base on the probe's prompts, the limit "
            f"is {MAX_BASE_KL:g}"
        )
    return _Outcome(replica=url, liveness=liveness, agreement=agreement, invalid=refused)


async def _ask_agreement(
    control: AdapterControl, version: AdapterVersion, liveness: Liveness
) -> Agreement | None:
    """Compare the served log-probabilities with the learner's; None without its `probe.json`.

    Raises: InvalidAdapterError when that file cannot be read, or is not the one that the lineage
        names; EngineError.
    """
    trained = await in_folder_thread(read_probe_file, Path(version.path))
    if trained is None:
        return None
    served = await control.probe(version.name, trained.prompts)
    return compare_served(trained, served, effect=liveness.mean_difference)


def _facts(outcomes: list[_Outcome], away: Mapping[str, str]) -> Facts:
    """Return the weakest probe as evidence and, with several replicas, the outcome on each."""
    facts: Facts = {}
    probes = [outcome.liveness for outcome in outcomes if outcome.liveness is not None]
    if probes:
        weakest = min(probes, key=lambda one: (one.live, one.mean_difference))
        facts["probe"] = asdict(weakest)
    agreements = [outcome.agreement for outcome in outcomes if outcome.agreement is not None]
    if agreements:
        furthest = max(agreements, key=lambda one: (not one.same, one.mean_difference))
        facts["served"] = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(furthest).items()
        }
    if len(outcomes) + len(away) > 1:
        described = {outcome.replica: outcome.words for outcome in outcomes}
        facts["replicas"] = described | {url: f"away: {reason}" for url, reason in away.items()}
    return facts


def _describe(outcome: _Outcome, replicas: Mapping[str, AdapterControl]) -> str:
    return outcome.words if len(replicas) == 1 else f"{outcome.replica}: {outcome.words}"
