"""Check what a run needs of this machine before one starts: packages, weights, device, memory."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from learner.base_weights import base_folder
from learner.progress.export import why_no_export
from learner.progress.watch import Missing
from sidecar.processes import missing_packages
from sidecar.settings import Settings

EMPTY = "it is empty; name the folder or hub name of the weights that vLLM serves"


def why_no_packages(*, scheduled: bool = True) -> str:
    """Say which packages of a run are not installed, and what to do; "" when all are there.

    scheduled: the schedule wants them, not a person who asks for one run.
    """
    lacks = missing_packages("learner")
    elsewhere = ', or set learner.schedule = "manual" where another machine learns'
    return lacks and f"{lacks}{elsewhere if scheduled else ''}"


def why_not_ready(settings: Settings) -> Iterator[Missing]:
    """Yield what a run lacks on this machine. Loads no weights, and downloads nothing."""
    if lacks := why_no_packages(scheduled=settings.learner.schedule != "manual"):
        yield Missing("learner.schedule", lacks)
        return
    if why := why_no_export(settings.learner.export):
        yield Missing("learner.export", f"{why}; runs go on without it", "warning")
    tinker = bool(settings.learner.tinker_url)
    no_base = _why_no_base(settings.serving.base_model_path, weights=not tinker)
    if no_base:
        yield Missing("serving.base_model_path", no_base)
    if tinker:
        if find_spec("tinker") is None:
            from learner.tinker import NO_TINKER  # here, because torch takes seconds to load

            yield Missing("learner.tinker_url", NO_TINKER)
        return
    yield from _of_device(settings, base_is_there=not no_base)


def _why_no_base(path: str, *, weights: bool) -> str:
    """weights: False: the config is enough."""
    if not path:
        return EMPTY
    folder = Path(path)
    if not folder.is_dir():
        return "" if base_folder(path) else _neither(path)
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json; name the folder of the weights that vLLM serves"
    if weights and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
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


def _neither(path: str) -> str:
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        return f"{path} is no folder; name the weights that vLLM serves"
    return (
        f"{path} is no folder, and not in this machine's hub cache; run `hf download {path}`, or "
        "name a folder"
    )


def _of_device(settings: Settings, *, base_is_there: bool) -> Iterator[Missing]:
    name = settings.learner.device
    if name == "cpu" and not base_is_there:
        return  # torch always has it, and takes seconds to load
    from learner.errors import DeviceError
    from learner.policy.adapter_io import open_device
    from learner.policy.memory import shortage

    try:
        device = open_device(name)
    except DeviceError as problem:
        yield Missing("learner.device", str(problem))
        return
    found = None
    if base_is_there:
        found = shortage(settings.serving.base_model_path, settings.learner, device)
    if found is None:
        return
    if found.lasts:
        yield Missing("learner.memory_fraction", found.why)
    else:
        yield Missing("learner.device", found.why, "warning")
