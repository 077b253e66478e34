"""The base class of the admin API's replies, and the parts that need no other room's records."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Out(BaseModel):
    """A part of a reply. JSON has no infinity: a number without end is a damaged one."""

    model_config = ConfigDict(allow_inf_nan=False)


class BusOut(Out):
    """The bus between proxy and ingest, as ingest last saw it."""

    lag: int | None
    """Records that wait to be stored; null when the bus could not be reached."""
    error: str
    """Why it could not be reached; empty when it could."""
    at: float
    """When that was, unix seconds."""
