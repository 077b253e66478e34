"""The base that a process keeps: its weights are shared, its modules are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.policy import adapter_io, kept as module, memory
from learner.policy.adapter_io import load_policy
from learner.policy.kept import GROWTH, KeptBase
from learner.policy.memory import recompute_layers, room_of
from learner.records import Parent
from sidecar.settings import Learner

CPU = torch.device("cpu")


@pytest.fixture
def load(tiny_base: Path) -> Any:
    return lambda: AutoModelForCausalLM.from_pretrained(tiny_base)


def test_what_a_run_does_to_modules_is_gone_with_its_copy(
    tiny_base: Path, learner_settings: Learner, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptBase(keeps=True)
    monkeypatch.setattr(adapter_io, "KEPT", kept)
    policy = load_policy(str(tiny_base), Parent(name="base"), learner_settings)
    recompute_layers(policy)
    policy.model.get_base_model().get_decoder().register_forward_hook(lambda *_: None)

    fresh, again = load(), kept.copy(load)

    names = [name for name, _ in fresh.named_modules()]
    assert [name for name, _ in again.named_modules()] == names
    assert any("lora" in name for name, _ in policy.model.named_modules())
    assert not again.is_gradient_checkpointing
    assert not any(one.training or one._forward_hooks for one in again.modules())
    assert again.config._attn_implementation == fresh.config._attn_implementation
    shared = dict(policy.model.get_base_model().get_decoder().named_parameters())
    name = "norm.weight"
    assert again.get_decoder().get_parameter(name) is shared[name]
    assert again.lm_head.weight is again.model.embed_tokens.weight, "tied, as they were"
    assert kept.rest() == ""


def test_a_changed_weight_is_found(load: Any) -> None:
    kept = KeptBase(keeps=True)
    base = kept.copy(load)
    assert kept.rest() == ""

    base.model.norm.weight.data[3] += 1e-7

    assert kept.rest() == "a run changed the base's weights"


def test_a_process_that_grows_is_given_up(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used = 100 << 20
    monkeypatch.setattr(module, "_anonymous_bytes", lambda: used)
    kept = KeptBase(keeps=True)
    used = 70 << 20
    assert kept.rest() == "", "before its first base there is nothing to compare with"
    kept.copy(load)
    used = 100 << 20
    assert kept.rest() == ""
    used = int(100 * GROWTH) << 20
    assert kept.rest() == ""

    used += 1 << 20

    assert kept.rest() == "it holds 126 MB, after its first run 100 MB"


def test_what_the_base_takes_is_room_for_the_next_run(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = iter((5_000, 9_000))
    monkeypatch.setattr(module, "_anonymous_bytes", lambda: next(grown))
    kept = KeptBase(keeps=True)
    kept.copy(load)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1_000)
    monkeypatch.setattr(memory, "KEPT", kept)

    room = room_of(CPU, 1.0)

    assert room is not None
    assert (kept.held, room.free) == (4_000, 5_000)
