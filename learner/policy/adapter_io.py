"""Load a base model with a trainable LoRA, and save that LoRA as a standard PEFT folder.

Every linear layer of the decoder is adapted (of some mixtures of experts attention's alone:
`adapted_layers`), the head and the embeddings never: servers ignore or mishandle LoRA there. The
saved files are read back and checked, because a matrix that is silently missing would serve the
base's answers under the adapter's name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ingest.grouping.selection import UNTOLD_TOKENS
from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest
from learner.base_weights import not_plain
from learner.errors import (
    DeviceError,
    IncompleteAdapterError,
    NonFiniteError,
    OutOfMemoryError,
    ParentError,
)
from learner.explain import one_line
from learner.origin import not_plain_lora
from learner.policy.architecture import LONGROPE, adapted_layers, architecture, fix_positions
from learner.policy.attention import use_form
from learner.policy.costs import Prices, prices, sizes
from learner.policy.kept import KEPT
from learner.policy.logprobs import Policy, wants_autocast
from learner.policy.memory import is_out_of_memory, limit_torch
from learner.policy.self_test import checked, refusal
from learner.ranks import Alone, Ranks
from learner.records import Parent
from sidecar.settings import Learner
from sidecar.visible import visible

ADAPTER = "default"
SEED = 0
"""Random seed for the matrices of an adapter that starts from the base."""
"""Name of the trained adapter in peft."""
BASE_CURE = "copy or download the files of serving.base_model_path again"
PARENT_CURE = "restore the folder from a backup, or roll back to another version"
_SHAPES = re.compile(
    r"size mismatch for (\S+): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)"
)
"""In torch's text, for each tensor of another shape."""
KINDS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Of the matrices that another trainer gives."""
SAMPLER = "sampler"
"""Name in peft of another adapter, while the answers that it sampled are checked."""
_TABLES = (dict, torch.nn.ModuleDict, torch.nn.ParameterDict, BufferDict)
"""Types in which a layer of peft keeps its parts by adapter."""


def base_dtype(device: torch.device, *, autocast: bool) -> torch.dtype:
    """Return the type of the base's weights. fp32 weights on a CPU keep the residual stream in
    fp32; on a GPU memory is scarcer."""
    return torch.bfloat16 if autocast and device.type == "cuda" else torch.float32


def load_policy(
    base_model_path: str, parent: Parent, settings: Learner, ranks: Ranks | None = None
) -> Policy:
    """Load the base with the parent's adapter, or with a fresh one that has no effect yet.

    Raises: DeviceError; OutOfMemoryError; ParentError when the base or the parent is missing,
        broken, quantised or of another shape.
    """
    if not base_model_path:
        raise ParentError("serving.base_model_path is empty; name the weights that vLLM serves")
    transformers_logging.disable_progress_bar()
    device = open_device(settings.device)
    limit_torch(device, settings.memory_fraction)
    autocast = wants_autocast(settings.precision, device)
    dtype = base_dtype(device, autocast=autocast)
    _require_folder(base_model_path)
    with _loading(f"base {base_model_path}", BASE_CURE):
        config = plain_config(base_model_path)
        shape = architecture(config.get_text_config())
        if shape.refused:
            raise ParentError(refusal(base_model_path, shape.refused))

        def load() -> Any:  # Any: as above
            # None: torch's own kernel where the model takes it, else the model's code.
            return AutoModelForCausalLM.from_pretrained(
                base_model_path, dtype=dtype, attn_implementation="eager" if shape.eager else None
            )

        alone = (ranks or Alone()).size == 1
        base = KEPT.copy(lambda: load().to(device)) if alone else load()
        if shape.by_length:
            # Until the records tell (`follow_server`). Only long factors serve any length.
            fix_positions(base, stretched=shape.by_length == LONGROPE)
        form = use_form(base, shape, device, torch.bfloat16 if autocast else dtype)
    with _loading(f"parent {parent.name}", PARENT_CURE):
        model = _with_adapter(base, parent, settings, device)
        if autocast:
            _without_copies(model)
        # peft writes the path of the base; the config must name it as vLLM does.
        model.peft_config[ADAPTER].base_model_name_or_path = base_model_path
        model = (ranks or Alone()).place(model, device)
        policy = Policy(
            model=model,
            device=device,
            autocast=autocast,
            shape=shape,
            form=form,
            prices=_prices(config.get_text_config()),
        )
    with _loading(f"base {base_model_path}", BASE_CURE):
        return checked(
            policy,
            base_model_path,
            parent.name if parent.path is not None else "",
            most=settings.pack_tokens or UNTOLD_TOKENS,
        )


def load_shapes(base_model_path: str, parent: Parent, settings: Learner) -> Any:  # Any: peft
    """Return the base without weights, on torch's device `meta`, and its adapter, for one that is
    trained elsewhere. Raises: ParentError."""
    _require_folder(base_model_path)
    with _loading(f"base {base_model_path}", BASE_CURE), torch.device("meta"):
        base = AutoModelForCausalLM.from_config(plain_config(base_model_path))
    with _loading(f"parent {parent.name}", PARENT_CURE):
        model = _with_adapter(base, parent, settings, torch.device("cpu"))
        model.peft_config[ADAPTER].base_model_name_or_path = base_model_path
        return model


def take_adapter(model: Any, given: Path, folder: Path) -> None:  # Any: as above
    """Write the adapter of another trainer as this one would have, and check the written files.

    model: of `load_shapes`. given: a PEFT folder, of which only rank, alpha and the matrices count.
    Raises: ParentError, NonFiniteError, IncompleteAdapterError; OSError when the disk refuses.
    """
    config = model.peft_config[ADAPTER]
    with _loading(f"the adapter in {given}", "it is not what learner.rank and the base ask for"):
        alpha = _read_object("the adapter", given / CONFIG).get("lora_alpha")
        if alpha != config.lora_alpha:
            raise ParentError(f"its lora_alpha is {alpha!r}; learner.alpha is {config.lora_alpha}")
        weights = load_file(given / WEIGHTS)
        if not {one.dtype for one in weights.values()} <= KINDS:
            raise ParentError("its matrices are of another kind than bf16, fp16 and fp32")
        # It says which shapes are wrong.
        set_peft_model_state_dict(model, weights)
    shutil.copyfile(given / WEIGHTS, folder / WEIGHTS)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    _write_canonical(folder / CONFIG)
    check_folder(model, folder)


def _prices(config: Any) -> Prices:  # Any: a config of transformers, not typed
    try:
        return prices(sizes(config))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return Prices()


def open_device(name: str) -> torch.device:
    """Return the torch device of this name, tested with one addition. Raises: DeviceError.

    A card becomes the process's current one, which FSDP2 and NCCL take.
    """
    try:
        device = torch.device(name)
        (torch.ones(1, device=device) + 1).item()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # torch's message continues with advice about its source code
        why = one_line(error).split(". ")[0]
        raise DeviceError(
            f"learner.device = {name!r} cannot be used: {why}; set it to cpu, or to cuda on a "
            "machine whose GPU and driver torch supports"
        ) from error
    return device


@contextmanager
def _loading(what: str, cure: str) -> Iterator[None]:
    """Translate the errors that a library raises for an untrusted file. cure: what to do then.

    Any class is possible: a config that is no JSON object gives TypeError, AttributeError or
    RecursionError.
    """
    try:
        yield
    except (ParentError, OutOfMemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"{what} does not fit into memory ({one_line(error)}); free memory, or use a "
                "machine with more memory or a smaller base"
            ) from error
        raise ParentError(f"{what} cannot be loaded: {_why(error)}; {cure}") from error


def _why(error: Exception) -> str:
    said = one_line(error)
    if found := _SHAPES.search(said):
        return f"{found[1]} has the shape {found[2]}; its config and the base ask for {found[3]}"
    return said


def _require_folder(base_model_path: str) -> None:
    """Raises: ParentError when a path, which is no name of the Hugging Face Hub, has no folder, or
    the folder holds what is no file."""
    if base_model_path.startswith(("/", ".", "~")) and not Path(base_model_path).is_dir():
        raise ParentError(
            f"base {base_model_path} cannot be loaded: there is no such folder; set "
            "serving.base_model_path to the folder of the weights that vLLM serves, or to their "
            "name on the Hugging Face Hub"
        )
    if (odd := not_plain(Path(base_model_path))) is not None:
        raise ParentError(f"base {base_model_path}: {odd} is not a plain file; {BASE_CURE}")


def plain_config(base_model_path: str) -> Any:  # Any: a config of transformers, not typed
    """Return the base's config, which says that it has plain weights. Raises: ParentError, and
    whatever transformers raises for a config that it cannot read."""
    config = AutoConfig.from_pretrained(base_model_path)
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            method = found.get("quant_method", "") if isinstance(found, dict) else type(found)
            raise ParentError(
                f"base {base_model_path} is quantised ({method or 'no method named'}); the learner "
                "needs plain weights: set serving.base_model_path to those that it was made from; "
                "the drift check tells whether they are close enough"
            )
    return config


def _with_adapter(
    base: Any, parent: Parent, settings: Learner, device: torch.device
) -> Any:  # Any: peft is not typed
    torch.manual_seed(SEED)
    if parent.path is None:
        head = base.get_output_embeddings()
        linear = [
            name
            for name, module in base.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ]
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,
            target_modules=adapted_layers(base.config.model_type, linear),
            task_type="CAUSAL_LM",
        )
        return get_peft_model(base, config)
    _require_plain(f"parent {parent.name}", parent.path / CONFIG)
    # Without `torch_device` peft reads the weights onto the first GPU, which is usually vLLM's.
    model = PeftModel.from_pretrained(
        base, str(parent.path), is_trainable=True, torch_device=str(device)
    )
    _switch_dropout_off(model)
    check_folder(model, parent.path)
    _require_matrices_alone(model, parent)
    _require_shape(model.peft_config[ADAPTER], parent, settings)
    return model


def _without_copies(model: Any) -> None:  # Any: as above
    """Give LoRA the inputs of its layers as they are. Autocast makes bf16 of them anyhow, so peft's
    copy in fp32 changes no bit: on an H100 a pass of 1.7B took 0.91 of the time without it."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


def _switch_dropout_off(model: Any) -> None:  # Any: as above
    """Compute with whole matrices, as vLLM does, whatever `lora_dropout` an adapter came with.

    Its config keeps the value. The layers' own flags stay: checkpointing sets some of them.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()


def _require_plain(what: str, path: Path) -> None:
    """Refuse, before its weights are read, an adapter that is more than the two matrices of each
    layer: such a version could be trained on, and neither saved nor served."""
    config = _read_object(what, path)
    found = not_plain_lora(config)
    if found is not None:
        value = one_line(ValueError(visible(str(config.get(found.member)))))
        raise ParentError(
            f"{what}: {path}: {found.member} is {value}, {found.why}; the learner "
            "continues plain LoRA only: merge it into the base, or roll back to another version"
        )


def _require_matrices_alone(model: Any, parent: Parent) -> None:  # Any: as above
    """Refuse, before the training, a parent that would be saved as more than its LoRA matrices, or
    of which more is trained: the check of the saved folder would refuse the new version.

    Raises: ParentError.
    """
    saved = set(get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False))
    trained = {
        name.replace(f".{ADAPTER}.", ".") for name, p in model.named_parameters() if p.requires_grad
    }
    odd = (saved | trained) ^ _matrices(model, ADAPTER)
    if odd:
        raise ParentError(
            f"parent {parent.name}: {min(odd)} is trained or saved beside the matrices lora_A and "
            "lora_B of its layers; the learner continues plain LoRA only: merge it into the base, "
            "or roll back to another version"
        )


def _require_shape(config: Any, parent: Parent, settings: Learner) -> None:  # Any: as above
    """Refuse a parent whose rank or alpha is not that of the settings: it would stay as it is, and
    the settings would say what no adapter has."""
    for name, found, wanted in (
        ("rank", config.r, settings.rank),
        ("alpha", config.lora_alpha, settings.alpha),
    ):
        if found != wanted:
            raise ParentError(
                f"parent {parent.name} has {name} {found}, and learner.{name} is {wanted}; an "
                f"adapter keeps the {name} that it started with: set learner.{name} = {found}, or "
                "roll back to the base to start anew"
            )


def _read_object(what: str, path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ParentError(f"{what}: {path} is missing")
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ParentError(
            f"{what}: {path} holds no JSON object; restore the folder, or roll back "
            "to a version whose folder is whole"
        )
    return found


@contextmanager
def sampled_by(policy: Policy, sampler: Parent) -> Iterator[None]:
    """Compute with another version's adapter or with the base; then restore the policy's adapter.

    sampler: the version; the base when it has no path.
    Raises: ParentError when its folder is missing, altered, or of another shape.
    """
    model = policy.model
    if sampler.path is None:
        with model.disable_adapter():
            yield
        return
    what = f"adapter {sampler.name}"
    with _loading(what, PARENT_CURE):
        _require_plain(what, sampler.path / CONFIG)
        if folder_digest(sampler.path) != sampler.digest:
            raise ParentError(f"{what}: its folder was changed after registration")
    try:
        with _loading(what, PARENT_CURE):
            model.load_adapter(
                str(sampler.path), adapter_name=SAMPLER, torch_device=str(policy.device)
            )
            _switch_dropout_off(model)
            model.to(policy.device)
            check_folder(model, sampler.path, adapter=SAMPLER)
            model.set_adapter(SAMPLER)
        yield
    finally:
        model.set_adapter(ADAPTER)
        _take_out(model, SAMPLER)


def _take_out(model: Any, adapter: str) -> None:  # Any: as above
    """Remove an adapter from the model, also one that peft gave up while it made its layers.

    peft then forgets the adapter's config and keeps the layers that it has made, among them some
    whose parts are there in some of their tables only.
    """
    if adapter in model.peft_config:
        model.delete_adapter(adapter)
    for module in list(model.modules()):
        if isinstance(module, BaseTunerLayer):
            for table in (*vars(module).values(), *module.children()):
                if isinstance(table, _TABLES) and adapter in table:
                    del table[adapter]


def save_adapter(policy: Policy, folder: Path) -> None:
    """Write the adapter's config and weights, and check the written files. Raises: NonFiniteError,
    IncompleteAdapterError; OSError when the disk refuses."""
    try:
        # Else peft also writes the base's embeddings where the head is adapted.
        policy.model.save_pretrained(str(folder), save_embedding_layers=False)
    except SafetensorError as error:
        raise as_os_error(error, folder) from error
    _write_canonical(folder / CONFIG)
    check_folder(policy.model, folder)


def as_os_error(error: SafetensorError, path: Path) -> OSError:
    """Translate an error of writing: the library raises no OSError, its errno is only in the
    text."""
    number = re.search(r"os error (\d+)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code), str(path))


def _write_canonical(path: Path) -> None:
    """Sort a config, so that the same adapter always has the same digest.

    peft writes its sets in an order that differs from process to process; and for some tasks names
    of saved modules, which the folder never has.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config["target_modules"], str):  # a string is a pattern, and stays one
        config["target_modules"] = sorted(config["target_modules"])
    config["modules_to_save"] = None
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_folder(model: Any, folder: Path, *, adapter: str = ADAPTER) -> None:  # Any: as above
    """Check that a folder holds exactly the LoRA matrices of the model, with finite numbers.
    adapter: its name in peft. Raises: NonFiniteError, IncompleteAdapterError."""
    weights = load_file(folder / WEIGHTS)
    expected = _matrices(model, adapter)
    if not expected or expected != weights.keys():
        missing, foreign = expected - weights.keys(), weights.keys() - expected
        raise IncompleteAdapterError(
            f"{folder / WEIGHTS}: {len(missing)} matrices missing, {len(foreign)} foreign, "
            f"{len(expected)} expected; first: {min(missing | foreign, default='none')}"
        )
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"{name} holds an infinity or NaN")


def _matrices(model: Any, adapter: str) -> set[str]:  # Any: as above
    return {
        f"{name}.{matrix}.weight"
        for name, module in model.named_modules()
        for matrix in ("lora_A", "lora_B")
        if adapter in getattr(module, matrix, ())
    }
