"""Which process of a run this one is. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sidecar.errors import SettingsError

RANK, SIZE, LOCAL_RANK, LOCAL_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
"""torchrun's variables."""


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    size: int
    local_rank: int
    """Among those of this machine."""
    local_size: int


def given_place(environ: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher gave; None for a process on its own. Raises:
    SettingsError."""
    names = (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)
    if RANK not in environ or SIZE not in environ:
        return None
    try:
        rank, size, local, local_size = (
            int(environ.get(name, default))
            for name, default in zip(names, ("0", "1", "0", "1"), strict=True)
        )
    except ValueError:
        found = ", ".join(f"{name}={environ.get(name)}" for name in names)
        raise SettingsError(f"{found}: these are torchrun's, and numbers") from None
    return Place(rank, size, local, local_size) if size > 1 else None
