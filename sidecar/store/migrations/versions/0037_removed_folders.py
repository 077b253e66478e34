"""Retention removes adapter folders; keys of changes are found by their time.

Revision ID: 0037_removed_folders
Revises: 0036_newest_move
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0037_removed_folders"
down_revision = "0036_newest_move"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_version", sa.Column("removed_at", sa.Float()))
    op.create_index("ix_idempotent_reply_at", "idempotent_reply", ["at"])


def downgrade() -> None:
    op.drop_index("ix_idempotent_reply_at", "idempotent_reply")
    op.drop_column("adapter_version", "removed_at")
