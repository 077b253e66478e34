"""The base of every row class."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, Float, LargeBinary
from sqlalchemy.orm import DeclarativeBase

from sidecar.store.tables import METADATA


class Base(DeclarativeBase):
    """A row; its table belongs to the store's metadata."""

    metadata = METADATA
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[Any]: JSON,
        bytes: LargeBinary,
        float: Float,
    }
