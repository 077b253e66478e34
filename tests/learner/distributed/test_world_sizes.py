"""Two processes train what one trains: loss, gradients, adapter. With gloo, on the CPU."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.distributed import trainer
from learner.distributed.sharded import Sharded
from learner.errors import FaultyGroupsError, RankLostError, RunStoppedError
from learner.grpo.answers import OUT_OF_VOCABULARY
from learner.grpo.checks import NON_FINITE
from learner.policy.architecture import blocks_of
from learner.records import StepMetrics, TrainingGroup
from sidecar.settings import Learner
from support.forking import Forked
from tests.learner.distributed.conftest import Train, Trained

pytestmark = pytest.mark.usefixtures("forked")

NOT_COMPARED = ("seconds", "tokens_per_s", "peak_memory_bytes")


def compared(step: StepMetrics) -> dict[str, float]:
    figures = replace(step, left_out={}).flat
    known = {name: value for name, value in figures.items() if value is not None}
    return {name: value for name, value in known.items() if name not in NOT_COMPARED}


def require_equal(one: Trained, two: Trained, left_out: Mapping[str, int] | None = None) -> None:
    """left_out: what the second run alone says in each step that it left out."""
    assert len(one.outcome.metrics) == len(two.outcome.metrics) == 2
    for alone, together in zip(one.outcome.metrics, two.outcome.metrics, strict=True):
        assert together.left_out == {**alone.left_out, **(left_out or {})}
        assert compared(together) == pytest.approx(compared(alone), rel=1e-4, abs=1e-6)
    assert one.weights.keys() == two.weights.keys()
    for name, expected in one.weights.items():
        torch.testing.assert_close(two.weights[name], expected, atol=1e-6, rtol=1e-4)


def settings_of(several: Learner, *, shared: bool) -> tuple[Learner, Learner]:
    """One process, and two of them."""
    return (
        several.model_copy(update={"processes": 1}),
        several.model_copy(update={"shard_base": shared}),
    )


@pytest.mark.parametrize(("shared", "checkpointing"), [(False, "off"), (True, "off"), (True, "on")])
def test_two_processes_train_what_one_trains(
    train: Train,
    groups: tuple[TrainingGroup, ...],
    several: Learner,
    shared: bool,
    checkpointing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.grpo.trainer.CHECKPOINTING", checkpointing)
    one, two = settings_of(several, shared=shared)

    expected, found = train(groups, one, quiet=3), train(groups, two, quiet=3)

    require_equal(expected, found)
    moved = max(float(w.abs().max()) for n, w in expected.weights.items() if "lora_B" in n)
    assert moved > 1e-3
    assert found.outcome.algorithm["processes"] == 2
    assert found.outcome.drift is not None
    assert found.outcome.drift == expected.outcome.drift


def test_a_group_that_fails_in_one_process_is_left_out_by_all(
    train: Train, groups: tuple[TrainingGroup, ...], several: Learner
) -> None:
    """Its token is found before its pass begins."""
    bad = groups[3]
    rows = (replace(bad.rows[0], token_ids=(1, 999)), *bad.rows[1:])
    broken = (*groups[:3], replace(bad, rows=rows), *groups[4:])
    one, two = settings_of(several, shared=True)

    expected = train((*groups[:3], *groups[4:]), one)
    found = train(broken, two)

    assert {g: fault.reason for g, fault in found.outcome.faults.items()} == {
        "g3": OUT_OF_VOCABULARY
    }
    require_equal(expected, found, {f"groups.{OUT_OF_VOCABULARY}": 1})


@pytest.mark.parametrize("shared", [False, True])
def test_a_loss_that_is_no_number_costs_its_group_in_all_processes(
    train: Train, groups: tuple[TrainingGroup, ...], several: Learner, shared: bool
) -> None:
    """The fault comes in a step, after the other process has computed its groups."""
    bad = groups[4]
    rows = tuple(replace(row, advantage=float("inf")) for row in bad.rows)
    broken = (*groups[:4], replace(bad, rows=rows), *groups[5:])
    one, two = settings_of(several, shared=shared)

    expected = train((*groups[:4], *groups[5:]), one)
    found = train(broken, two)

    assert list(found.outcome.faults) == ["g4"]
    assert "its loss is" in found.outcome.faults["g4"].text
    require_equal(expected, found, {f"groups.{NON_FINITE}": 1})


def test_a_stop_ends_all_processes(
    train: Train, groups: tuple[TrainingGroup, ...], several: Learner
) -> None:
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise RunStoppedError("asked to stop")

    _, two = settings_of(several, shared=True)

    with pytest.raises(RunStoppedError):
        train(groups, two, check_stop=stop)


@pytest.mark.parametrize("shared", [False, True])
def test_a_process_that_is_killed_ends_the_run_with_words(
    train: Train,
    groups: tuple[TrainingGroup, ...],
    several: Learner,
    forked: list[Forked],
    shared: bool,
) -> None:
    calls = 0

    def kill() -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            forked[0].kill()

    _, two = settings_of(several, shared=shared)

    with pytest.raises(RankLostError, match=r"process 1 was killed \(SIGKILL\)") as lost:
        train(groups, two, check_stop=kill)

    # What it computed is suspected; it may have been between two groups.
    assert set(lost.value.faults) <= {group.group_id for group in groups}
    assert forked[0].returncode == -9


def test_a_process_that_ends_before_it_has_come_is_not_waited_for(
    train: Train, groups: tuple[TrainingGroup, ...], several: Learner, config: Path
) -> None:
    """It cannot read its settings. Waiting for it would take this test's time."""
    config.write_text("[learner]\nno_such_setting = 1\n")

    with pytest.raises(RankLostError, match=r"process 1 failed \(exit code 2\)") as lost:
        train(groups, several)

    assert not lost.value.faults


def test_the_processes_of_a_machine_find_each_other_on_loopback_alone(
    several: Learner, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket on all addresses would take the second connection too."""

    def launch(_rank: int, _size: int, port: int, _config: Path) -> None:
        socket.create_connection((trainer.LOOPBACK, port)).close()
        socket.create_connection(("127.0.0.2", port)).close()

    monkeypatch.setattr(trainer, "_launch", launch)

    with pytest.raises(ConnectionRefusedError), trainer.started(several, config):
        pytest.fail("it listens on other addresses")


def test_a_pass_that_fails_in_its_middle_ends_a_run_that_shares_the_base(
    train: Train,
    groups: tuple[TrainingGroup, ...],
    several: Learner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first process fails in a block of its second group; the other waits in that pass."""
    passes = 0

    def fail(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 12:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")

    place = Sharded.place

    def breaking(self: Sharded, model: Any, device: torch.device) -> Any:
        placed = place(self, model, device)
        blocks_of(placed.get_base_model().get_decoder())[1].register_forward_pre_hook(fail)
        return placed

    monkeypatch.setattr(Sharded, "place", breaking)
    _, two = settings_of(several, shared=True)

    with pytest.raises(FaultyGroupsError, match="failed in a pass that all processes") as ended:
        train(groups, two)

    (fault,) = ended.value.faults.values()
    assert fault.reason == "out_of_memory"
