"""Loading a base with a LoRA, saving it, and what is refused."""

from __future__ import annotations

import errno
import json
import resource
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest
from learner.errors import IncompleteAdapterError, NonFiniteError, ParentError
from learner.policy.adapter_io import load_policy, open_device, sampled_by, save_adapter
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import Parent
from sidecar.settings import Learner
from tests.learner.conftest import make_group, make_row, with_effect


@pytest.fixture
def policy(tiny_base: Path, learner_settings: Learner) -> Policy:
    return with_effect(load_policy(str(tiny_base), Parent(name="base"), learner_settings))


def test_saved_and_loaded_it_gives_the_same_log_probabilities(
    policy: Policy, tiny_base: Path, tmp_path: Path, learner_settings: Learner
) -> None:
    (pack,) = pack_group(
        make_group([1, 2, 3], [make_row([4, 5, 6]), make_row([7, 8])]), max_tokens=100
    )
    save_adapter(policy, tmp_path)

    again = load_policy(str(tiny_base), Parent(name="p", path=tmp_path), learner_settings)

    base = load_policy(str(tiny_base), Parent(name="base"), learner_settings)
    with torch.no_grad():
        expected = policy.logprobs(pack)[0]
        assert torch.equal(again.logprobs(pack)[0], expected)
        assert not torch.allclose(base.logprobs(pack)[0], expected, atol=1e-3)
    assert sum(p.requires_grad for p in again.model.parameters()) == 28


def test_the_dropout_of_an_imported_lora_is_off_and_stays_in_its_config(
    policy: Policy, tiny_base: Path, tmp_path: Path, learner_settings: Learner
) -> None:
    """As a parent, and as the adapter that sampled a group."""
    (pack,) = pack_group(
        make_group([1, 2, 3], [make_row([4, 5, 6]), make_row([7, 8])]), max_tokens=100
    )
    imported, written = tmp_path / "imported", tmp_path / "written"
    save_adapter(policy, imported)
    config = json.loads((imported / CONFIG).read_text())
    (imported / CONFIG).write_text(json.dumps({**config, "lora_dropout": 0.5}))
    parent = Parent(name="p", path=imported, digest=folder_digest(imported))

    again = load_policy(str(tiny_base), parent, learner_settings)
    base = load_policy(str(tiny_base), Parent(name="base"), learner_settings)

    with torch.no_grad():
        expected = policy.logprobs(pack)[0]
        assert torch.equal(again.logprobs(pack)[0], expected)
        with sampled_by(base, parent):
            assert torch.equal(base.logprobs(pack)[0], expected)
    save_adapter(again, written)
    assert json.loads((written / CONFIG).read_text())["lora_dropout"] == 0.5


def test_the_folder_is_standard_peft_and_names_the_served_base(
    policy: Policy, tiny_base: Path, tmp_path: Path
) -> None:
    save_adapter(policy, tmp_path)

    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(tiny_base)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["target_modules"] == sorted(config["target_modules"])
    assert sorted({name.rpartition(".")[2] for name in config["target_modules"]}) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    assert not config["modules_to_save"]
    assert len(load_file(tmp_path / WEIGHTS)) == 28


def test_a_weight_that_is_not_finite_is_refused(policy: Policy, tmp_path: Path) -> None:
    parameter = next(p for p in policy.model.parameters() if p.requires_grad)
    with torch.no_grad():
        parameter[0, 0] = float("nan")

    with pytest.raises(NonFiniteError, match="lora_A"):
        save_adapter(policy, tmp_path)


def test_a_parent_that_lacks_a_matrix_is_refused(
    policy: Policy, tiny_base: Path, tmp_path: Path, learner_settings: Learner
) -> None:
    save_adapter(policy, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    del weights["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
    save_file(weights, tmp_path / WEIGHTS)

    with pytest.raises(ParentError, match=r"1 matrices missing.*up_proj\.lora_B") as caught:
        load_policy(str(tiny_base), Parent(name="p", path=tmp_path), learner_settings)

    assert isinstance(caught.value.__cause__, IncompleteAdapterError)


@pytest.mark.parametrize(
    ("base", "parent", "message"),
    [
        ("", Parent(name="base"), "base_model_path is empty"),
        ("/nowhere/at/all", Parent(name="base"), "base /nowhere/at/all cannot be loaded"),
        (None, Parent(name="p", path=Path("/nowhere")), "parent p: .* is missing"),
    ],
)
def test_what_is_missing_is_named(
    tiny_base: Path, learner_settings: Learner, base: str | None, parent: Parent, message: str
) -> None:
    with pytest.raises(ParentError, match=message):
        load_policy(base if base is not None else str(tiny_base), parent, learner_settings)


@pytest.mark.parametrize(("name", "value"), [("rank", 8), ("alpha", 16)])
def test_a_parent_of_another_rank_or_alpha_is_refused(
    policy: Policy,
    tiny_base: Path,
    tmp_path: Path,
    learner_settings: Learner,
    name: str,
    value: int,
) -> None:
    """It would keep its own, and settings and lineage would say what no adapter has."""
    save_adapter(policy, tmp_path)
    changed = learner_settings.model_copy(update={name: value})

    with pytest.raises(ParentError, match=rf"has {name} \d, and learner\.{name} is {value}"):
        load_policy(str(tiny_base), Parent(name="p", path=tmp_path), changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("velora_config", {}),
        ("task_type", "TOKEN_CLS"),
    ],
)
def test_a_parent_that_is_more_than_a_plain_lora_is_refused_before_it_is_read(
    policy: Policy,
    tiny_base: Path,
    tmp_path: Path,
    learner_settings: Learner,
    name: str,
    value: object,
) -> None:
    """Training went through, and the new version could not be saved."""
    save_adapter(policy, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, name: value}))
    (tmp_path / WEIGHTS).unlink()

    with pytest.raises(ParentError, match=f"{name} is .*; the learner continues plain LoRA only"):
        load_policy(str(tiny_base), Parent(name="p", path=tmp_path), learner_settings)


def test_an_adapter_is_read_onto_the_learners_device(
    policy: Policy,
    tiny_base: Path,
    tmp_path: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """peft would take the first GPU, which is usually vLLM's."""
    save_adapter(policy, tmp_path)
    monkeypatch.setattr(
        "peft.peft_model.infer_device", lambda: pytest.fail("peft chose the device")
    )

    again = load_policy(str(tiny_base), Parent(name="p", path=tmp_path), learner_settings)
    sampler = Parent(name="s", path=tmp_path, digest=folder_digest(tmp_path))
    with sampled_by(again, sampler):
        pass


def test_a_parent_that_would_be_saved_with_more_than_its_matrices_is_refused_before_training(
    policy: Policy,
    tiny_base: Path,
    tmp_path: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its config says: a feature of a later peft may not be known by its name."""
    if not hasattr(LoraConfig, "velora_config"):
        pytest.skip("this peft has no feature that saves more and is asked for by the config alone")
    save_adapter(policy, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "velora_config": {}}))
    monkeypatch.setattr("learner.policy.adapter_io.not_plain_lora", lambda config: None)

    with pytest.raises(ParentError, match=r"lora_velora_embed\S* is trained or saved beside"):
        load_policy(str(tiny_base), Parent(name="p", path=tmp_path), learner_settings)


@pytest.mark.parametrize(
    ("member", "value", "known"),
    [("arrow_config", {"top_k": 1}, False), ("velora_config", {}, False),
     ("init_lora_weights", 7, True)],
)  # fmt: skip
def test_a_sampler_that_peft_gives_up_halfway_leaves_nothing_in_the_policy(
    policy: Policy,
    tmp_path: Path,
    member: str,
    value: object,
    known: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where its config is not known to be odd: the run would train, and not be saved."""
    save_adapter(policy, tmp_path / "before")
    sound = Parent(name="s", path=tmp_path / "before", digest=folder_digest(tmp_path / "before"))
    save_adapter(policy, tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / CONFIG).read_text())
    (tmp_path / "odd" / CONFIG).write_text(json.dumps({**config, member: value}))
    odd = Parent(name="o", path=tmp_path / "odd", digest=folder_digest(tmp_path / "odd"))
    if not known:
        monkeypatch.setattr("learner.policy.adapter_io.not_plain_lora", lambda config: None)
    before = [name for name, _ in policy.model.named_parameters()]

    refused: Exception | None = None
    try:
        with sampled_by(policy, odd):
            pass
    except ParentError as error:
        refused = error

    # Of one that peft can load only the matrices are compared.
    assert refused is not None or (member == "velora_config" and not known)
    assert [name for name, _ in policy.model.named_parameters()] == before
    assert list(policy.model.peft_config) == ["default"]
    assert all("sampler" not in name for name, _ in policy.model.named_modules())
    assert sum(p.requires_grad for p in policy.model.parameters()) == 28
    with sampled_by(policy, sound):
        pass
    save_adapter(policy, tmp_path / "after")
    assert folder_digest(tmp_path / "after") == folder_digest(tmp_path / "before")


@pytest.mark.parametrize(("name", "current"), [("cuda:1", [1]), ("cuda", []), ("cpu", [])])
def test_an_opened_card_is_the_one_that_fsdp_and_nccl_take(
    name: str, current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))  # there is no card

    assert open_device(name) == torch.device(name)

    assert [one.index for one in chosen] == current


def test_a_disk_without_room_for_the_adapter_is_told_with_its_number(
    policy: Policy, tmp_path: Path
) -> None:
    """A real write that the system refuses: the limit of a file's size stands for the disk's."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_adapter(policy, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert caught.value.errno == errno.EFBIG
