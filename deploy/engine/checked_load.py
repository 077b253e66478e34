"""Load an adapter into vLLM only if its files are those that were registered.

Every load goes through here. The digest is computed again before each load, also after a restart
of vLLM: files can change on disk (a fault, a person, an attacker) long after their canary. vLLM
opens the files by path, a moment after they were hashed. So the files' metadata ("marks") is
compared again after the load, and an adapter whose files changed in between is unloaded.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from deploy.engine.validation import check_digest
from deploy.engine.vllm_control import AdapterControl
from deploy.errors import AlteredAdapterError, EngineError
from learner.adapter_folder import Mark, folder_marks


async def load_checked(control: AdapterControl, name: str, path: str, digest: str) -> None:
    """Load a folder under a name, if its digest is `digest` (SHA-256, hex).

    Raises: AlteredAdapterError when it is not; InvalidAdapterError when the folder is unreadable or
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
    """Return the folder's marks; empty when it became unreadable, which is a change too."""
    try:
        return folder_marks(folder)
    except OSError:
        return ()
