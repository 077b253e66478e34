"""A run over several processes: the first sends the work, and all train alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from learner.distributed.dealing import attention_share
from learner.distributed.exchange import Exchange
from learner.distributed.place import Place
from learner.distributed.ranks import DataParallel
from learner.distributed.sharded import Sharded
from learner.distributed.start import device_of, threads_of
from learner.grpo.trainer import GrpoTrainer
from learner.policy.known import known_base
from learner.records import Parent, TrainingGroup, TrainingJob, TrainingOutcome
from sidecar.settings import Learner

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Work:
    """What the first process sends of a job: all that needs no store."""

    base_model_path: str
    parent: Parent
    groups: tuple[TrainingGroup, ...]
    settings: Learner
    quiet: int
    least_spread: Mapping[str, float]
    samplers: Mapping[str, Parent]
    masked: Mapping[str, Mapping[int, str]]


class RankedTrainer:
    """Implements `Trainer` in the first process."""

    def __init__(self, connect: Callable[[], AbstractContextManager[Exchange]], place: Place):
        """connect: opens the connections to the other processes."""
        self._connect = connect
        self._place = place

    def train(self, job: TrainingJob) -> TrainingOutcome:
        """Train with the others. Raises: what `GrpoTrainer.train` raises, RankFailedError,
        RankLostError, RanksDisagreeError."""
        work = _Work(
            base_model_path=job.base_model_path,
            parent=job.parent,
            groups=job.groups,
            settings=job.settings,
            quiet=job.quiet,
            least_spread=job.least_spread,
            samplers=job.samplers,
            masked=job.masked,
        )
        with self._connect() as exchange:
            exchange.from_first(work)
            outcome = _train(job, exchange, self._place)
        return replace(outcome, algorithm={**outcome.algorithm, "processes": exchange.size})


def dismiss(connect: Callable[[], AbstractContextManager[Exchange]]) -> None:
    """Tell the processes that wait for work that there is none."""
    with connect() as exchange:
        exchange.from_first(None)


def work(connect: Callable[[], AbstractContextManager[Exchange]], place: Place) -> bool:
    """Compute what the first process sends, as another one.

    Returns: False when there was nothing to do. Raises: as `RankedTrainer.train`.
    """
    with connect() as exchange, TemporaryDirectory(prefix="learner-") as folder:
        found: _Work | None = exchange.from_first(None)
        if found is None:
            return False
        job = TrainingJob(
            base_model_path=found.base_model_path,
            parent=found.parent,
            groups=found.groups,
            settings=found.settings,
            folder=Path(folder),
            check_stop=lambda: None,
            quiet=found.quiet,
            least_spread=found.least_spread,
            samplers=found.samplers,
            masked=found.masked,
        )
        _train(job, exchange, place)
    log.info("rank_done", rank=place.rank)
    return True


def _train(job: TrainingJob, exchange: Exchange, place: Place) -> TrainingOutcome:
    kind = Sharded if job.settings.shard_base else DataParallel
    ranks = kind(exchange, job.settings.pack_tokens, _attention_share(job.base_model_path))
    settings = job.settings.model_copy(
        update={
            "device": device_of(job.settings.device, place.local_rank),
            "threads": threads_of(job.settings, place.local_size),
        }
    )
    return GrpoTrainer().train(replace(job, ranks=ranks, settings=settings))


def _attention_share(base_model_path: str) -> float:
    """Read c of `learner.distributed.dealing` from a base; 0 where its files do not say it."""
    base = known_base(base_model_path)
    if base is None:
        return 0.0
    model = base.sizes
    return attention_share(
        layers=model.layers, queries=model.queries, weights=base.weights.in_blocks
    )
