"""Start the processes of a run, or take the place that a launcher gave this one.

Two ways lead to the same run. With `learner.processes` the process of a run starts the others on
this machine, once there is something to learn. With `torchrun -m learner --once`, on one machine or
several, the launcher has started all of them, and the environment says which one this is. The first
process has the store, claims and publishes; the others wait for its work, compute, and end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog
from torch.distributed import (  # type: ignore[attr-defined]  # not in its list of exports
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from learner import ranks
from learner.command import ended_words, learner_command
from learner.distributed.exchange import DataParallel, Exchange, attention_share
from learner.distributed.place import ADDRESS, LOCAL_RANK, LOCAL_SIZE, PORT, RANK, SIZE, Place
from learner.distributed.sharded import Sharded
from learner.errors import RankLostError
from learner.explain import one_line
from learner.grpo.trainer import GrpoTrainer
from learner.policy.costs import known_base
from learner.records import TrainingJob, TrainingOutcome
from sidecar.processes import own_environment
from sidecar.settings import Learner

log = structlog.get_logger()

LOOPBACK = "127.0.0.1"
END_S = 20.0
"""How long the other processes have to end after the run."""


def device_of(name: str, local_rank: int) -> str:
    """Return the device of a process: with cards, each has the next one after the first."""
    kind, _, number = name.partition(":")
    return f"{kind}:{int(number or 0) + local_rank}" if kind == "cuda" else name


def threads_of(settings: Learner, local_size: int) -> int:
    return settings.threads or max(1, (os.cpu_count() or 1) // local_size)


@contextmanager
def joined(place: Place, settings: Learner) -> Iterator[Exchange]:
    """Connect with the processes that a launcher started. Raises: RankLostError."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=ranks.TIMEOUT_S)))
    except (RuntimeError, ValueError) as error:
        raise RankLostError(
            f"process {place.rank} of {place.size} cannot reach the first one at "
            f"{os.environ.get(ADDRESS)}:{os.environ.get(PORT)} within "
            f"{ranks.TIMEOUT_S:g} s: is it started, and "
            f"may this machine connect to that port? ({one_line(error)})"
        ) from error
    with _open(place, settings, store) as exchange:
        yield exchange


@contextmanager
def started(settings: Learner, config: Path | None) -> Iterator[Exchange]:
    """Start the other processes on this machine, and connect with them; they end with this one.

    Raises: RankLostError when they do not come.
    """
    size, listening = settings.processes, socket.create_server((LOOPBACK, 0))
    store = TCPStore(
        LOOPBACK,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=ranks.TIMEOUT_S),
        master_listen_fd=listening.detach(),  # else it would listen on all addresses
    )
    children = _Children([_launch(rank, size, store.port, config) for rank in range(1, size)])
    log.info("ranks_started", processes=size, pids=[one.pid for one in children.processes])
    try:
        with _open(Place(0, size, 0, size), settings, store, children.ended) as exchange:
            yield exchange
    finally:
        children.end()


@contextmanager
def _open(
    place: Place,
    settings: Learner,
    store: Store,
    killed: Callable[[float], Mapping[int, str]] = lambda _: {},
) -> Iterator[Exchange]:
    exchange = Exchange(
        place=place,
        store=PrefixStore("learner", store),
        cards=settings.device.startswith("cuda"),
        timeout_s=ranks.TIMEOUT_S,
        killed=killed,
    )
    try:
        yield exchange
    finally:
        exchange.close()


def _launch(rank: int, size: int, port: int, config: Path | None) -> subprocess.Popen[bytes]:
    command = learner_command(config, "--once")
    environ = {
        **own_environment(os.environ),
        **{RANK: str(rank), SIZE: str(size), LOCAL_RANK: str(rank), LOCAL_SIZE: str(size)},
        **{ADDRESS: LOOPBACK, PORT: str(port)},
    }
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environ)


@dataclass(frozen=True, slots=True)
class _Children:
    processes: Sequence[subprocess.Popen[bytes]]

    def ended(self, wait_s: float) -> Mapping[int, str]:
        """Return how those that are gone failed, by rank. wait_s: for each of the others."""
        found: dict[int, str] = {}
        for rank, process in enumerate(self.processes, start=1):
            with suppress(subprocess.TimeoutExpired):
                if code := process.wait(wait_s):
                    found[rank] = ended_words(code)
        return found

    def end(self) -> None:
        until = time.monotonic() + END_S
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("rank_killed", pid=process.pid, after_s=END_S)
                process.kill()
                process.wait()


# A run over several processes: the first sends the work, and all train alike.


SENT = (
    "base_model_path", "parent", "groups", "settings",
    "quiet", "signals", "least_spread", "references", "samplers", "masked",
)  # fmt: skip
"""Fields of a job that the first process sends: all that needs no store."""


class RankedTrainer:
    """Implements `Trainer` in the first process."""

    def __init__(self, connect: Callable[[], AbstractContextManager[Exchange]]):
        """connect: opens the connections to the other processes."""
        self._connect = connect
        self._connected = False

    def train(self, job: TrainingJob) -> TrainingOutcome:
        """Train with the others. Raises: what `GrpoTrainer.train` raises, RankFailedError,
        RankLostError, RanksDisagreeError."""
        self._connected = True
        with self._connect() as exchange:
            exchange.from_first({name: getattr(job, name) for name in SENT})
            outcome = _train(job, exchange)
        return replace(outcome, algorithm={**outcome.algorithm, "processes": exchange.size})

    def dismiss(self) -> None:
        """Tell the processes that there is no work, if they still wait for it."""
        if not self._connected:
            with self._connect() as exchange:
                exchange.from_first(None)


def work(connect: Callable[[], AbstractContextManager[Exchange]]) -> None:
    """Compute what the first process sends, if it does. Raises: as `RankedTrainer.train`."""
    with connect() as exchange, TemporaryDirectory(prefix="learner-") as folder:
        found: dict[str, Any] | None = exchange.from_first(None)
        if found is None:
            return
        job = TrainingJob(**found, folder=Path(folder), check_stop=lambda: None)
        _train(job, exchange)
    log.info("rank_done", rank=exchange.rank)


def _train(job: TrainingJob, exchange: Exchange) -> TrainingOutcome:
    kind = Sharded if job.settings.shard_base else DataParallel
    ranks = kind(exchange, job.settings.pack_tokens, _attention_share(job.base_model_path))
    settings = job.settings.model_copy(
        update={
            "device": device_of(job.settings.device, exchange.place.local_rank),
            "threads": threads_of(job.settings, exchange.place.local_size),
        }
    )
    return GrpoTrainer().train(replace(job, ranks=ranks, settings=settings))


def _attention_share(base_model_path: str) -> float:
    base = known_base(base_model_path)
    if base is None:
        return 0.0
    model = base.sizes
    return attention_share(
        layers=model.layers, queries=model.queries, weights=base.weights.in_blocks
    )
