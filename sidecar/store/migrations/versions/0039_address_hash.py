"""The baseline: the oldest schema that migrations start from.

It has the id of the last of the 39 migrations that it replaced, so a store of that revision needs
none. A new store runs no migration: `env.py` makes its tables from the models.

Revision ID: 0039_address_hash
"""

from __future__ import annotations

revision = "0039_address_hash"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    raise RuntimeError("env.py makes the tables of a new store")
