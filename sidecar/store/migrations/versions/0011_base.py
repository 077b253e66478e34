"""The exchange that a request and its prompt ids are stored as a difference from

Revision ID: 0011_base
Revises: 0010_wide_integers
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011_base"
down_revision = "0010_wide_integers"
branch_labels = None
depends_on = None

HAS_BASE = sa.text("base_id IS NOT NULL")


def upgrade() -> None:
    op.add_column("exchange", sa.Column("base_id", sa.String(64), nullable=True))
    op.create_index("ix_exchange_base_id", "exchange", ["base_id"], sqlite_where=HAS_BASE)


def downgrade() -> None:
    """Rows that have a base cannot be read by an older version."""
    op.drop_index("ix_exchange_base_id", "exchange")
    op.drop_column("exchange", "base_id")
