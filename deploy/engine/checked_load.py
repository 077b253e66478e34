"""Load an adapter into vLLM only if its files are those that were registered; prove it live there.

Every load goes through here. The digest is computed again before each load, also after a restart
of vLLM: files can change on disk (a fault, a person, an attacker) long after their canary. vLLM
opens the files by path, a moment after they were hashed. So the files' metadata ("marks") is
compared again after the load, and an adapter whose files changed in between is unloaded.

Folders are read in threads of their own: a disk that hangs (a dead NFS) takes all of these, and the
lease, the rollbacks and the rest of control go on in theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from deploy.engine.probe import Liveness, compare
from deploy.engine.validation import check_digest
from deploy.engine.vllm_control import AdapterControl
from deploy.errors import AlteredAdapterError, EngineError
from learner.adapter_folder import Mark, folder_marks

FOLDER_THREADS = 4
"""Folders that are read at once: hashing keeps a core busy, so more would not be faster."""
_threads = ThreadPoolExecutor(FOLDER_THREADS, thread_name_prefix="adapter-folder")
Marks = tuple[Mark, ...]
P = ParamSpec("P")
T = TypeVar("T")


async def in_folder_thread(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, in one of the threads that only read adapter folders."""
    work = partial(copy_context().run, read, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


async def load_checked(
    control: AdapterControl,
    name: str,
    path: str,
    digest: str,
    *,
    begins: Callable[[Marks], None] = lambda marks: None,
) -> None:
    """Load a folder under a name, if its digest is `digest` (SHA-256, hex).

    begins: told the folder's marks before vLLM is asked; a load that is cut off here may end there,
        and is then to be compared by `check_unchanged`.
    Raises: AlteredAdapterError when it is not; InvalidAdapterError when the folder is unreadable or
        vLLM refuses it; EngineError; OSError when the disk fails.
    """
    marks = await in_folder_thread(check_digest, Path(path), digest)
    begins(marks)
    await control.load(name, path)
    await check_unchanged(control, name, path, marks)


async def check_unchanged(control: AdapterControl, name: str, path: str, marks: Marks) -> None:
    """Unload an adapter whose folder changed since it had these marks.

    Raises: AlteredAdapterError when it did.
    """
    if await in_folder_thread(_marks, Path(path)) == marks:
        return
    changed = f"{path}: the folder changed while vLLM read it"
    try:
        await control.unload(name)
    except EngineError as error:
        raise AlteredAdapterError(f"{changed}, and is still loaded: {error}") from error
    raise AlteredAdapterError(changed)


async def ask_liveness(control: AdapterControl, name: str, *, model: str) -> Liveness:
    """Ask a vLLM whether an adapter that it has loaded has an effect there. Raises: EngineError.

    model: name of the base.
    """
    before = await control.probe(model)
    adapter = await control.probe(name)
    after = await control.probe(model)
    return compare(name, adapter=adapter, base_before=before, base_after=after)


def _marks(folder: Path) -> Marks:
    """Return the folder's marks; empty when it became unreadable, which is a change too."""
    try:
        return folder_marks(folder)
    except OSError:
        return ()
