"""Real clients get from the sidecar what they get from vLLM: the same script, asked of both.

vLLM is the real one, the model is the demo's, and everything is greedy. One request runs at a time,
so that batches, and with them the last digits of log-probabilities, are the same in every run.
"""

from __future__ import annotations

import contextlib
import copy
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.between import between
from tests.clients.comparison import TIME_KEYS, differences
from tests.clients.conftest import ALSO_WITH_CAPTURE_OFF, SCRIPTS, Runner
from tests.clients.servers import Servers

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1200)]

CLIENTS = (
    "openai_chat",
    "openai_others",
    "openai_async",
    "anthropic_messages",
    "litellm_chat",
    "langchain_chat",
    "agents_sdk",
    "pydantic_agents",
)


def test_no_script_is_forgotten() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*CLIENTS, "steps"}


@pytest.mark.parametrize("client", CLIENTS)
def test_every_step_comes_to_its_end_at_vllm(client: str, runner: Runner) -> None:
    seen = runner.seen(client)[runner.servers.vllm]

    assert [f"{step}: {came['at']}" for step, came in seen.items() if broke_off(came)] == []
    assert len(seen) >= 3


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_from_the_sidecar_what_it_gets_from_vllm(client: str, runner: Runner) -> None:
    assert runner.differing(client, runner.servers.capture_on) == {}


@pytest.mark.parametrize("client", sorted(ALSO_WITH_CAPTURE_OFF))
def test_a_client_gets_the_same_when_nothing_is_captured(client: str, runner: Runner) -> None:
    assert runner.differing(client, runner.servers.capture_off) == {}


def test_a_difference_in_one_word_of_a_reply_is_noticed(runner: Runner) -> None:
    """A server between that changes a city stands for any proxy that is not faithful."""
    steps = runner.seen("openai_async")[runner.servers.vllm]

    with between(runner.servers.vllm, lambda data: data.replace(b"Paris", b"Parma")) as liar:
        changed = runner.run("openai_async", "all", liar.url)[liar.url]

    noticed = {step for step in steps if differences(steps[step], changed[step])}
    assert noticed >= {"chat", "chat_stream", "chat_stream_with_a_tool", "response_stream"}


def test_any_change_of_any_value_in_a_real_result_is_noticed(runner: Runner) -> None:
    steps = runner.seen("openai_others")[runner.servers.vllm]
    missed = []
    for step, came in steps.items():
        leaves = list(paths(came))
        for path in leaves[:: max(1, len(leaves) // 25)]:
            planted = copy.deepcopy(came)
            change(planted, path)
            if not differences(came, planted):
                missed.append((step, path))

    assert all(path[-1] in TIME_KEYS for _, path in missed)
    assert missed, "times are among the values, and they may differ"


def test_both_ways_of_running_were_tried(servers: Servers, runner: Runner) -> None:
    """One sidecar has recorded exchanges to learn from, the other none."""
    runner.seen("openai_async")

    assert recorded(servers, "capture_on") >= 5
    assert recorded(servers, "capture_off") == 0


def broke_off(came: Any) -> bool:
    return isinstance(came, dict) and "broke_off" in came


def recorded(servers: Servers, capture: str) -> int:
    """Exchanges in a sidecar's outbox, which gets its table with the first of them."""
    with contextlib.closing(sqlite3.connect(servers.folder / capture / "outbox.db")) as outbox:
        tables = outbox.execute("SELECT count(*) FROM sqlite_master WHERE name = 'outbox'")
        if tables.fetchone() == (0,):
            return 0
        return int(outbox.execute("SELECT count(*) FROM outbox").fetchone()[0])


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value that holds no other."""
    if isinstance(value, dict) and value:
        for key, member in value.items():
            yield from paths(member, (*path, key))
    elif isinstance(value, list) and value:
        for index, member in enumerate(value):
            yield from paths(member, (*path, index))
    elif path:
        yield path


def change(value: Any, path: tuple[Any, ...]) -> None:
    *before, last = path
    for key in before:
        value = value[key]
    old = value[last]
    if isinstance(old, str):
        value[last] = f"x{old}"
    elif isinstance(old, int | float) and not isinstance(old, bool):
        value[last] = old + 1
    else:
        value[last] = "planted"
