"""The one way by which an adapter gets into vLLM: only with the bytes that were registered.

The digest is taken again before every load, also after a restart of vLLM: files change on disk
(a fault, a person, an attacker) long after their canary. vLLM opens the files by their path, a
moment after they were hashed; so their marks are compared once more after the load, and an
adapter whose files changed in between is unloaded again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from deploy.engine.validation import check_digest
from deploy.engine.vllm_control import AdapterControl
from deploy.errors import AlteredAdapterError, EngineError
from learner.adapter_folder import Mark, folder_marks


async def load_checked(control: AdapterControl, name: str, path: str, digest: str) -> None:
    """Load a folder under a name, if it holds what `digest` says.

    Raises: AlteredAdapterError when it does not; InvalidAdapterError when it cannot be read or
        vLLM refuses it; EngineError; OSError when the disk fails.
    """
    folder = Path(path)
    marks = await asyncio.to_thread(check_digest, folder, digest)
    await control.load(name, path)
    if await asyncio.to_thread(_marks, folder) != marks:
        changed = f"{path}: the folder changed while vLLM read it"
        try:
            await control.unload(name)
        except EngineError as error:
            raise AlteredAdapterError(f"{changed}, and is still loaded: {error}") from error
        raise AlteredAdapterError(changed)


def _marks(folder: Path) -> tuple[Mark, ...]:
    """The marks, or none when the folder cannot be read any more: it changed."""
    try:
        return folder_marks(folder)
    except OSError:
        return ()
