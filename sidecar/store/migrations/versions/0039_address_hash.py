"""Exchanges of a canary tell their callers apart also where nobody has a key.

Revision ID: 0039_address_hash
Revises: 0038_failed_twice
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0039_address_hash"
down_revision = "0038_failed_twice"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # SQLite adds a column with a default in place.
    kind = sa.String(length=64)
    op.add_column("exchange", sa.Column("address_hash", kind, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("exchange", "address_hash")
