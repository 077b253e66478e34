"""Check what a run needs of this machine before one starts: packages, weights, device, memory."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from learner.progress.export import why_no_export
from learner.progress.lacks import Lack
from sidecar.settings import Settings

PACKAGES = ("torch", "transformers", "peft", "safetensors")

EMPTY = "it is empty; name the folder or hub name of the weights that vLLM serves"


def why_no_packages(*, scheduled: bool = True) -> str:
    """Say which packages of a run are not installed, and what to do; "" when all are there.

    Imports nothing. scheduled: the schedule wants them, not a person who asks for one run.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if not missing:
        return ""
    elsewhere = ', or set learner.schedule = "manual" where another machine learns'
    return (
        f"{', '.join(missing)} cannot be imported; run `pip install '.[learner]'` in the folder "
        f"that the sidecar was installed from{elsewhere if scheduled else ''}"
    )


def why_not_ready(settings: Settings) -> Iterator[Lack]:
    """Yield what a run lacks on this machine. Loads no weights, and downloads nothing."""
    if lacks := why_no_packages(scheduled=settings.learner.schedule != "manual"):
        yield Lack("learner.schedule", lacks)
        return
    if why := why_no_export(settings.learner.export):
        yield Lack("learner.export", f"{why}; runs go on without it", "warning")
    no_base = _why_no_base(settings.serving.base_model_path)
    if no_base:
        yield Lack("serving.base_model_path", no_base)
    no_device = _why_no_device(settings.learner.device)
    if no_device:
        yield Lack("learner.device", no_device)
    if not (no_base or no_device):
        yield from _why_no_room(settings)


def _why_no_base(path: str) -> str:
    if not path:
        return EMPTY
    folder = Path(path)
    if not folder.is_dir():
        return "" if _in_hub_cache(path) else _neither(path)
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json; name the folder of the weights that vLLM serves"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return f"{folder} has no *.safetensors; name the folder of the weights that vLLM serves"
    # Imported here: torch and peft take seconds to load, and the checks above need neither.
    from learner.errors import LearnerError
    from learner.policy.adapter_io import plain_config

    try:
        plain_config(path)
    except LearnerError as problem:
        return str(problem)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return f"{folder}/config.json cannot be read ({problem})"
    return ""


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _neither(path: str) -> str:
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        return f"{path} is no folder; name the weights that vLLM serves"
    return (
        f"{path} is no folder, and not in this machine's hub cache; run `hf download {path}`, or "
        "name a folder"
    )


def _why_no_device(name: str) -> str:
    if name == "cpu":
        return ""  # torch always has it, and takes seconds to load
    from learner.errors import DeviceError
    from learner.policy.adapter_io import open_device

    try:
        open_device(name)
    except DeviceError as problem:
        return str(problem)
    return ""


def _why_no_room(settings: Settings) -> Iterator[Lack]:
    from learner.policy.adapter_io import open_device
    from learner.policy.room import shortage

    device = open_device(settings.learner.device)
    found = shortage(settings.serving.base_model_path, settings.learner, device)
    if found is None:
        return
    if found.lasts:
        yield Lack("learner.memory_fraction", found.why)
    else:
        yield Lack("learner.device", found.why, "warning")
