"""A store with API keys beside the state of the proxies that a test starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import api_keys
from support.migrated_store import open_migrated


class KeyStore:
    def __init__(self, folder: Path) -> None:
        self.database = open_migrated(folder / "store.db")

    def create(self, **changes: Any) -> tuple[str, str]:
        """Returns: the key's id and the key."""
        return api_keys.create(self.database, **changes)

    def revoke(self, key_id: str) -> None:
        api_keys.revoke(self.database, key_id)


@pytest.fixture
def keys(state_dir: Path) -> Iterator[KeyStore]:
    store = KeyStore(state_dir)
    yield store
    store.database.close()
