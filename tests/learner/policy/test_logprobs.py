"""Log-probabilities: temperature, entropy, precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.policy.adapter_io import base_dtype, load_policy
from learner.policy.logprobs import Policy, wants_autocast
from learner.policy.packing import pack_group
from learner.records import Parent
from sidecar.settings import Learner
from tests.learner.conftest import make_group, make_row

CPU = torch.device("cpu")


def test_the_temperature_divides_the_logits(policy: Policy) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, -1]
    expected = [torch.log_softmax(logits / t, dim=-1)[9].item() for t in (1.0, 0.5, 2.0)]

    rows = [make_row([9], temperature=temperature) for temperature in (1.0, 0.5, 2.0)]
    (pack,) = pack_group(make_group([1, 2, 3], rows), max_tokens=100)
    with torch.no_grad():
        found, _ = policy.logprobs(pack)

    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in expected}) == 3


def test_the_bias_of_a_head_is_added(policy: Policy) -> None:
    head = policy.model.get_base_model().get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.linspace(-3, 3, policy.vocabulary), requires_grad=False)
    (pack,) = pack_group(make_group([1, 2], [make_row([9, 4])]), max_tokens=100)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[1, 2, 9]]), use_cache=False).logits[0, 1:]
        found, _ = policy.logprobs(pack)

    told = torch.log_softmax(logits, dim=-1)
    assert found.tolist() == pytest.approx([float(told[0, 9]), float(told[1, 4])], abs=1e-5)


@pytest.mark.parametrize(
    ("device", "autocast", "dtype"),
    [
        ("cuda:1", True, torch.bfloat16),
        ("cuda", False, torch.float32),
        ("cpu", True, torch.float32),
    ],
)
def test_the_base_is_in_half_precision_on_a_card_alone(
    device: str, autocast: bool, dtype: torch.dtype
) -> None:
    assert base_dtype(torch.device(device), autocast=autocast) is dtype


def test_entropy_is_summed_over_the_targets(policy: Policy) -> None:
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[1, 2]]), use_cache=False).logits[0, -1]
        expected = torch.distributions.Categorical(logits=logits).entropy().item()
        (pack,) = pack_group(make_group([1, 2], [make_row([9]), make_row([8])]), max_tokens=100)
        _, entropy = policy.logprobs(pack)

    assert entropy == pytest.approx(2 * expected, rel=1e-5)


def test_bf16_products_end_before_the_head(tiny_base: Path, learner_settings: Learner) -> None:
    """Behind the hidden states, which bf16 products made, all is as in float64 to 1e-4 nats."""
    half = load_policy(
        str(tiny_base),
        Parent(name="base"),
        learner_settings.model_copy(update={"precision": "bfloat16"}),
    )
    (pack,) = pack_group(
        make_group([1, 2, 3], [make_row([4, 5, 6]), make_row([7, 8])]), max_tokens=100
    )

    with torch.no_grad():
        found, whole = half.logprobs(pack)[0], half.distributions(pack)
        hidden = half._hidden(pack)[list(pack.sources)]
        weight = half.model.get_base_model().get_output_embeddings().weight
    expected = torch.log_softmax(hidden.double() @ weight.double().t(), dim=-1)

    torch.testing.assert_close(whole.double(), expected, atol=1e-4, rtol=0)
    at = torch.tensor(pack.targets)[:, None]
    torch.testing.assert_close(found.double(), expected.gather(-1, at)[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("precision", "features", "expected"),
    [
        ("float32", {"avx512_bf16": True}, False),
        ("bfloat16", {}, True),
        ("auto", {"avx512_bf16": True}, True),
        ("auto", {"amx_bf16": True}, True),
        ("auto", {"avx2": True, "avx512_bf16": False}, False),
    ],
)
def test_auto_takes_bf16_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, precision: Any, features: dict[str, bool], expected: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)

    assert wants_autocast(precision, CPU) is expected


@pytest.mark.parametrize("has_it", [True, False])
def test_auto_takes_bf16_on_cards_that_do_not_only_emulate_it(
    monkeypatch: pytest.MonkeyPatch, has_it: bool
) -> None:
    """The card that is asked for decides; it may not be the first."""
    asked: list[torch.device] = []

    @contextmanager
    def device(one: torch.device) -> Iterator[None]:
        asked.append(one)
        yield
        asked.append(torch.device("cpu"))

    def is_supported(*, including_emulation: bool) -> bool:
        return including_emulation or (has_it and asked == [torch.device("cuda:1")])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)

    assert wants_autocast("auto", torch.device("cuda:1")) is has_it
    assert wants_autocast("bfloat16", torch.device("cuda:1"))
