"""Compiled blocks: the same values and gradients, one compilation for all lengths, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from learner.grpo.trainer import GrpoTrainer
from learner.policy import memory, self_test
from learner.policy.adapter_io import sampled_by
from learner.policy.logprobs import Policy, joint_pack
from learner.policy.memory import recompute_layers
from learner.policy.packing import Pack, pack_group
from learner.policy.self_test import compile_blocks
from learner.records import Parent
from sidecar.settings import Learner
from tests.learner.conftest import job_of, make_group, make_row, with_effect

LENGTHS = [60]


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that is told to compile whatever it gets, and forgets it."""
    monkeypatch.setattr(self_test, "COMPILED_TOKENS", {"cpu": 1})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def policy(policy: Policy) -> Policy:
    return with_effect(policy)


@pytest.fixture
def packs() -> list[Pack]:
    """Packs of one, three and four segments, and of two groups together."""
    one = make_group(range(3, 20), [make_row(range(20, 30))])
    two = make_group(range(5, 35), [make_row([7, 8, 9, 10]), make_row([9, 4])])
    three = make_group(range(4, 15), [make_row([7, 8, 9]), make_row([9, 4, 5]), make_row([11, 12])])
    found = [pack_group(each, max_tokens=100)[0] for each in (one, two, three)]
    assert [len(pack.segments) for pack in found] == [1, 3, 4]
    return [*found, joint_pack([two, three])]


def passed(policy: Policy, pack: Pack) -> tuple[Tensor, Tensor]:
    policy.model.zero_grad()
    values, _ = policy.logprobs(pack)
    values.sum().backward()
    gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return values.detach(), torch.cat(gradients)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_compiled_blocks_give_the_same_for_all_lengths_by_one_compilation(
    policy: Policy, packs: list[Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_return_freed_blocks", lambda: None)
    plain = [passed(policy, pack) for pack in packs]

    with capture_logs() as logs:
        assert compile_blocks(policy, LENGTHS)

    assert [one["event"] for one in logs] == ["blocks_compiled"]
    before = graphs()
    assert before > 0
    for again in (False, True):  # then with layers that are computed twice
        for pack, (values, gradients) in zip(packs, plain, strict=True):
            found, same = passed(policy, pack)
            torch.testing.assert_close(found, values, atol=1e-6, rtol=1e-6)
            assert (same - gradients).norm() <= 1e-6 * gradients.norm()
            with torch.no_grad(), sampled_by(policy, Parent(name="base")):
                policy.logprobs(pack)
        if not again:
            recompute_layers(policy)
    assert graphs() == before, "no length, no sampler and no second pass compiles anything"


def _with_backend(backend: str) -> Callable[..., Any]:
    true = torch.compile

    def compiled(plain: Callable[..., Any], **how: Any) -> Any:
        return true(plain, backend=backend, **how)

    return compiled


def _breaks(plain: Callable[..., Any], **_: Any) -> Any:
    def none(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no compiler\nin this image")

    return none


def _differs(plain: Callable[..., Any], **_: Any) -> Any:
    def other(*given: Any, **named: Any) -> Any:
        return plain(*given, **named).roll(1, -1)

    return other


@pytest.mark.parametrize(
    ("broken", "why"), [(_breaks, "RuntimeError: no compiler"), (_differs, "gradients differ by")]
)
def test_blocks_that_do_not_compile_or_differ_stay_as_they_are(
    policy: Policy,
    packs: list[Pack],
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[..., Any],
    why: str,
) -> None:
    plain, _ = passed(policy, packs[0])
    monkeypatch.setattr(torch, "compile", broken)

    with capture_logs() as logs:
        assert not compile_blocks(policy, LENGTHS)

    assert [one["event"] for one in logs] == ["blocks_not_compiled"]
    assert why in logs[0]["why"]
    assert torch.equal(passed(policy, packs[0])[0], plain)


@pytest.mark.parametrize(("least", "compiled"), [(1, True), (10_000, False)])
def test_a_run_that_is_long_enough_compiles_and_says_so(
    tiny_base: Path,
    tmp_path: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
    least: int,
    compiled: bool,
) -> None:
    monkeypatch.setattr(self_test, "COMPILED_TOKENS", {"cpu": least})
    monkeypatch.setattr(torch, "compile", _with_backend("eager"))
    settings = learner_settings.model_copy(update={"max_drift": 100.0})
    groups = [make_group([3, 4, 5, 6, 7], [make_row([9, 10, 11], 0.5), make_row([12, 13], -0.5)])]
    job = job_of(groups, settings, base_model_path=str(tiny_base), folder=tmp_path)

    outcome = GrpoTrainer().train(job)

    assert outcome.algorithm["compiled"] is compiled
    assert (graphs() > 0) is compiled
