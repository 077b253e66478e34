"""How the suite runs: its tiers, and which tests go first.

Tier 1 (`--tier 1`, `make test`) runs laws, contracts and examples, and one real loop on a real
vLLM. Tier 2 (`make test-all`, and pytest without the option) adds `TIER_2` and what has the mark
`tier_2`. `scripts/tests` runs either in parts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from support.kafka_broker import broker, running_broker
from support.stores import (
    empty_store,
    new_store,
    postgres,
    run_on_both,
    share_compiled_statements,
    store_kind,
)
from support.tiers import TIER_2

__all__ = [  # fixtures of all tests
    "broker",
    "empty_store",
    "new_store",
    "postgres",
    "running_broker",
    "store_kind",
]

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")  # no test asserts a time

FIRST = ("tests/end_to_end/test_loop.py", "tests/end_to_end/", "tests/clients/test_vllm_unasked.py")
"""Beginnings of node ids. The engines of `end_to_end` and the one of `test_vllm_unasked.py` end
with the file, the one that the other files of `clients` share with the process: in this order one
runs at a time."""
SERVICES = {"fork", "running_broker", "start_process"}
"""Fixtures that start a process of their own."""


_configure = structlog.configure


def _configure_without_cache(*given: Any, **named: Any) -> None:
    """A logger that is kept at its first use would show nothing to tests that run after a test in
    which a process set up its logs."""
    _configure(*given, **{**named, "cache_logger_on_first_use": False})


structlog.configure = _configure_without_cache
share_compiled_statements()


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_on_both(metafunc)


def of_tier_2(item: pytest.Item) -> bool:
    """Whether the test has the mark, or starts PostgreSQL, Kafka or a proxy's process."""
    if item.get_closest_marker("tier_2"):
        return True
    spec = getattr(item, "callspec", None)
    given = spec.params.values() if spec else ()
    named = any(one in ("postgres", "kafka") for one in given)
    return named or not SERVICES.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order by `FIRST`, then by file; those of a file stay as they are."""
    if config.getoption("tier") == 1:
        later = [item for item in items if of_tier_2(item)]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if not of_tier_2(item)]
    items.sort(key=lambda item: (place(item.nodeid), item.nodeid.split("::")[0]))


def pytest_collection_finish() -> None:
    """The garbage collector need not look at the imported libraries and the tests themselves again
    and again: with them a search takes a quarter of a second and more."""
    gc.collect()
    gc.freeze()


def place(nodeid: str) -> int:
    return next((i for i, start in enumerate(FIRST) if nodeid.startswith(start)), len(FIRST))
