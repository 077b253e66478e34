"""How the suite runs: its tiers, which tests share a worker of pytest-xdist, and which go first.

Tier 1 (`--tier 1`, `make test`) runs laws, contracts and examples, and one real loop on a real
vLLM. Tier 2 (`make test-all`, and pytest without the option) adds `TIER_2`.

A worker gets whole files, so that what a file's tests share is made once. The files that start a
real vLLM go first, because they take longest, and share a worker, so that one engine computes at a
time: two of them take more than twice as long. Some folders share a process that is slow to start.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import structlog

from support.kafka_broker import broker, running_broker
from support.stores import empty_store, new_store, postgres, run_on_both, store_kind

__all__ = [  # fixtures of all tests
    "broker",
    "empty_store",
    "new_store",
    "postgres",
    "running_broker",
    "store_kind",
]

FIRST = (
    "tests/end_to_end/test_loop.py",
    "tests/end_to_end/test_sabotage.py",
    "tests/clients/test_vllm_unasked.py",
    "tests/clients/",
    "tests/sidecar/test_compiled.py",
    "tests/deploy/supervise/test_up.py",
)
"""Beginnings of node ids, the longest first. The engines of `end_to_end` and the one of
`test_vllm_unasked.py` end with the file, the one of `clients` with the worker: in this order they
do not run together."""
ONE_WORKER = {
    "tests/end_to_end/": "engines",
    "tests/clients/": "engines",
    "tests/learner/distributed/": "distributed",
    "tests/learner/resume/": "resume",
}
"""Beginning of a node id -> name of what shares a worker."""
TIER_2 = (
    "tests/benchmarks/",
    "tests/clients/",
    "tests/demo/",
    "tests/deploy/canary/test_shadow.py/",
    "tests/deploy/cli/test_exit_codes.py/",
    "tests/deploy/cli/test_judge.py/",
    "tests/deploy/crashes/",
    "tests/deploy/doctor/test_end.py/",
    "tests/deploy/page/test_live_parts.py/",
    "tests/deploy/page/test_look.py/",
    "tests/deploy/supervise/",
    "tests/deploy/test_process.py/",
    "tests/end_to_end/test_sabotage.py/",
    "tests/ingest/intake/test_consume_killed.py/",
    "tests/ingest/intake/test_power_cut.py/",
    "tests/ingest/intake/test_same_on_both.py/",
    "tests/ingest/intake/test_server_away.py/",
    "tests/ingest/ruler/test_judging_brownout.py/",
    "tests/ingest/ruler/test_judging_killed.py/",
    "tests/ingest/ruler/test_judging_poison.py/",
    "tests/ingest/test_score.py/",
    "tests/ingest/vllm/test_slowdown.py/",
    "tests/learner/distributed/",
    "tests/learner/grpo/test_drift.py/",
    "tests/learner/grpo/test_losses_against_trl.py/",
    "tests/learner/resume/",
    "tests/learner/runs/test_bad_groups.py/",
    "tests/learner/runs/test_blame.py/",
    "tests/learner/test_tinker_server.py/",
    "tests/rooms/test_query_plans.py/",
    "tests/rooms/test_store_opening.py/",
    "tests/rooms/test_two_projects.py/",
    "tests/sidecar/capture/test_capture_killed.py/",
    "tests/sidecar/faults/",
    "tests/sidecar/hardening/test_back_pressure.py/",
    "tests/sidecar/hardening/test_cuts.py/",
    "tests/sidecar/hardening/test_drain.py/",
    "tests/sidecar/hardening/test_held_bodies.py/",
    "tests/sidecar/hardening/test_limits.py/",
    "tests/sidecar/hardening/test_mutations.py/",
    "tests/sidecar/test_compiled.py/",
    "tests/sidecar/test_main.py/",
    "tests/sidecar/workers/",
)
"""Kills, processes, browsers, clients, engines and long runs. Of the other files the
tests on PostgreSQL and Kafka, and those that start a proxy's process, are of tier 2 as well."""
SERVICES = {"fork", "running_broker", "start_process"}
"""Fixtures that start a process of their own."""
WAITING_WORKERS = 2
"""Workers beyond one for each core: one waits for an engine, others for processes and clocks."""


_configure = structlog.configure


def _configure_without_cache(*given: Any, **named: Any) -> None:
    """A logger that is kept at its first use would show nothing to tests that run after a test in
    which a process set up its logs."""
    _configure(*given, **{**named, "cache_logger_on_first_use": False})


structlog.configure = _configure_without_cache


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Take back the logs that a process set up in a test, or in a fixture of several tests: `main`
    runs in the tests' own process. Else the logs of all later tests go where that one's went."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", type=int, choices=(1, 2), default=2, help="1: the fast tests alone")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    relative = f"{collection_path.relative_to(config.rootpath).as_posix()}/"
    return True if config.getoption("tier") == 1 and relative.startswith(TIER_2) else None


def pytest_configure(config: pytest.Config) -> None:
    """Have each worker collect all tests from another folder on: each compiles the files that the
    others come to later, and finds the others' compiled. `pytest_collection_modifyitems` puts all
    tests in one order again."""
    told = getattr(config, "workerinput", None)
    if told is not None and config.args == ["tests"]:
        share = int(told["workerid"].removeprefix("gw")) / told["workercount"]
        config.args[:] = from_share_on(share, parts(config.rootpath / "tests"))


def parts(folder: Path) -> dict[str, int]:
    """What the folder holds, in order -> how many test files that is."""
    held = {
        one: 1 if one.is_file() else sum(1 for _ in one.rglob("test_*.py"))
        for one in sorted(folder.iterdir())
        if one.is_dir() or one.match("test_*.py")
    }
    return {str(one): number for one, number in held.items() if number}


def from_share_on(share: float, sizes: Mapping[str, int]) -> list[str]:
    """The names in their order, which begins anew after the last one: first comes the one in which
    `share` (0 to 1) of all that they hold ends."""
    ends = accumulate(sizes.values())
    limit = share * sum(sizes.values())
    first = next(number for number, end in enumerate(ends) if end > limit)
    names = list(sizes)
    return [*names[first:], *names[:first]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_on_both(metafunc)


def needs_service(item: pytest.Item) -> bool:
    """Whether the test starts PostgreSQL, Kafka or a proxy's process."""
    spec = getattr(item, "callspec", None)
    given = spec.params.values() if spec else ()
    named = any(one in ("postgres", "kafka") for one in given)
    return named or not SERVICES.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order by `FIRST`, then by file; those of a file stay as they are. A test id with the address
    of an object in it is another one in each worker, and pytest-xdist then runs no test at all:
    name it here, where one process can see it."""
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"test ids with the address of an object in them: {unstable}")
    if config.getoption("tier") == 1:
        services = [item for item in items if needs_service(item)]
        config.hook.pytest_deselected(items=services)
        items[:] = [item for item in items if not needs_service(item)]
    items.sort(key=lambda item: (place(item.nodeid), item.nodeid.split("::")[0]))


def pytest_collection_finish() -> None:
    """The garbage collector need not look at the imported libraries and the tests themselves again
    and again: with them a search takes a quarter of a second and more."""
    gc.collect()
    gc.freeze()


def place(nodeid: str) -> int:
    return next((i for i, start in enumerate(FIRST) if nodeid.startswith(start)), len(FIRST))


def lane(nodeid: str) -> str:
    """Name what must run in one worker: a file, what `ONE_WORKER` names, or all tests with Kafka in
    their names, which share a broker."""
    if "kafka" in nodeid:
        return "kafka"
    return next(
        (name for start, name in ONE_WORKER.items() if nodeid.startswith(start)),
        nodeid.split("::")[0],
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`--numprocesses auto`."""
    return len(os.sched_getaffinity(0)) + WAITING_WORKERS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByLane(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    return ByLane(config, log)
