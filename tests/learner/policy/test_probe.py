"""What the learner writes for the comparison with vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from learner.adapter_folder import PROBE, file_digest
from learner.policy.logprobs import Policy
from learner.policy.self_test import PLACES, probe_of, write_probe


def test_the_likeliest_tokens_are_those_of_the_whole_model(policy: Policy) -> None:
    ids = (3, 1, 4, 1, 5, 9)

    found = probe_of(policy, [ids], tolerance=0.1)

    assert found.prompts == (ids[:3], ids[:4], ids[:5], ids)
    assert len(found.prompts) == PLACES
    with torch.no_grad():  # transformers' own forward pass, one prompt at a time
        for prompt, likeliest in zip(found.prompts, found.likeliest, strict=True):
            logits_V = policy.model(input_ids=torch.tensor([prompt])).logits[0, -1]
            nats_K, tokens_K = torch.log_softmax(logits_V, -1).topk(10)
            assert list(likeliest) == tokens_K.tolist()
            assert list(likeliest.values()) == pytest.approx(nats_K.tolist(), abs=1e-5)


def test_a_base_without_a_tokenizer_gives_no_file(
    policy: Policy, tiny_base: Path, tmp_path: Path
) -> None:
    assert write_probe(policy, str(tiny_base), tmp_path, tolerance=0.1) is None
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_written_with_its_digest(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) % 48 for letter in text]}

    monkeypatch.setattr(
        "learner.policy.self_test.AutoTokenizer.from_pretrained", lambda path: Tokenizer()
    )

    digest = write_probe(policy, "base", tmp_path, tolerance=0.1)

    assert digest == file_digest(tmp_path / PROBE)


@pytest.mark.parametrize(("ids", "fails"), [([], False), ([3, 4800], False), ([3, 4], True)])
def test_texts_that_are_of_no_or_foreign_tokens_or_cannot_be_computed_cost_the_file_alone(
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ids: list[int],
    fails: bool,
) -> None:
    def cannot(*args: object, **named: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(
        "learner.policy.self_test.AutoTokenizer.from_pretrained",
        lambda path: lambda text: {"input_ids": [*ids, len(text) % 48] if fails else ids},
    )
    if fails:
        monkeypatch.setattr("learner.policy.self_test.probe_of", cannot)
    assert write_probe(policy, "base", tmp_path, tolerance=0.1) is None
    assert list(tmp_path.iterdir()) == []
