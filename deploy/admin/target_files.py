"""Say at once when a rollback's target cannot be loaded, because its files are gone or changed.

The rollback is in effect by then and waits for no disk: only its reply does, for a moment, and only
where some vLLM has yet to load the target. Left out: folders that another machine has, which
control fetches where `adapters.url` is set.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from deploy.engine.validation import check_digest
from deploy.errors import InvalidAdapterError, UnknownAdapterError, error_line
from deploy.registry import versions
from sidecar.errors import StoreError
from sidecar.store.database import Database

LIMIT_S: Final = 2.0
"""Time to read the files: a GB is hashed in that, and a disk that hangs must not hold the reply."""


def with_files(note: str | None, database: Database, adapter: str) -> str | None:
    """Add to the note about a target that is not loaded what is wrong with its files.

    note: None when every vLLM has it loaded: then nothing is read.
    """
    if note is None:
        return None
    try:
        with database.read() as session:
            version = versions.find(session, adapter)
    except (UnknownAdapterError, StoreError):
        return note  # the rollback is made, and its reply must not fail
    found: list[str] = []

    def look() -> None:
        try:
            check_digest(Path(version.path), version.digest)
        except InvalidAdapterError as error:
            found.append(error_line(error))
        except OSError:
            return  # the disk's fault, and no word about the files

    looking = threading.Thread(target=look, name="target-files", daemon=True)
    looking.start()
    looking.join(LIMIT_S)
    if not found or found[0] in note:  # a vLLM was refused it for that, and the note says so
        return note
    return (
        f"{note}; its folder is missing or altered on this machine, and vLLM will not get it so "
        f"({found[0]}): restore {version.path}, or name another version, or base"
    )
